"""Configuration of the decoder, a Hugging Face PretrainedConfig: a method name and the sizes."""

from __future__ import annotations

import math
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from dape.methods import Method, canonical, check_embeddings, encoding_index, layer_methods
from dape.ops.score_attention.api import check_backend
from dape.settings import check_choice

# Format of saved models: incremented when older versions of this package would misread them.
FORMAT = 1
# Options that transformers writes into any configuration or reads from it, besides the fields of PretrainedConfig; none
# that changes layers or caches, such as sliding_window, which our attention would not follow.
OF_TRANSFORMERS = {
    *vars(GenerationConfig()),
    *("model_type", "name_or_path", "_name_or_path", "_commit_hash"),
    *("auto_map", "custom_pipelines", "tokenizer_class"),
    *("torch_dtype", "quantization_config", "attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation_internal", "gradient_checkpointing", "loss_type"),
    *("num_labels", "classifier_dropout", "token_classification_bias"),
}


class DapeConfig(PretrainedConfig):
    """A decoder-only language model: pre-LayerNorm, GELU, biases, untied embeddings, any method.

    method:           position encoding and score processor, such as "dape1x3-kerple" (`dape methods`); a list of
                      methods, or names with "/" between, is cycled over the layers.
    score_width:      hidden channels of processors that have them.
    score_options:    further options of the score processor (padding, residual, depth, groups …).
    head_norm:        RMSNorm of each head's output, scaled by depth (multi-token attention).
    head_gate:        a learned gate for each head's output.
    position_options: options of the position encoding (such as scaling and factor of RoPE).
    randomized_positions: in training, draw positions below this maximum (None: 0, 1, 2, …).
    initializer_range: standard deviation of the weights; None for √(2 / (5 · hidden_size)).
    backend:          backend of the attention op; "auto" takes the fastest that can run.
    max_position_embeddings: number of tokens in a training window, if known; no limit, inputs may be longer.
    """

    model_type = "dape"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers declares it so)

    method: str | list[str] = "dape1x3-kerple"
    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    score_width: int = 32
    score_options: dict[str, Any] | None = None
    position_options: dict[str, Any] | None = None
    randomized_positions: int | None = None
    head_norm: bool = False
    head_gate: bool = False
    layer_norm_eps: float = 1e-5
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float | None = None
    backend: str = "auto"
    max_position_embeddings: int | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    dape_format: int = FORMAT

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """No effect, as for the models: `write_entries` saves our code as a whole."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.dape_format != FORMAT:
            here = f"this version of dape reads format {FORMAT}: load it with the version that wrote it"
            raise ValueError(f"the model has format {self.dape_format}, {here}")
        # What tools have added to a saved configuration had no effect before either.
        for name in () if self.transformers_version else sorted(kwargs.keys() - OF_TRANSFORMERS):
            check_choice("option", name, DapeConfig.__annotations__)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}"
            )
        check_backend(self.backend)
        self.method = canonical(self.method)
        check_embeddings(self.layer_methods)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.initializer_range is None:
            self.initializer_range = math.sqrt(2 / (5 * self.hidden_size))
        self.score_options = self.score_options or {}
        self.position_options = self.position_options or {}
        super().__post_init__(**kwargs)

    @property
    def layer_methods(self) -> tuple[Method, ...]:
        """The method of every layer."""
        return layer_methods(self.method, self.num_hidden_layers)

    @property
    def layer_types(self) -> list[str] | None:
        """What a cache keeps of every layer: beside keys and values, hidden states that Canon layers mix."""
        methods = self.layer_methods
        if not any(method.canon for method in methods):
            return None
        return ["hybrid" if method.canon else "full_attention" for method in methods]

    @property
    def number_of_conv_states(self) -> int:
        """Of a layer with Canon layers."""
        return 2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def encoding_index(self) -> list[int]:
        """Index of each layer's encoding in the model."""
        return encoding_index(self.layer_methods)
