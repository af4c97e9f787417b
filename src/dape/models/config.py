"""The decoder's configuration: a method name and the sizes, saved and loaded the Hugging Face way."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any, ClassVar

from transformers import PretrainedConfig

from dape.methods import Method, parse_method
from dape.ops.score_attention.api import check_backend
from dape.positions import POSITIONS

# Of saved models: raised when older versions of this package could no longer read them rightly.
FORMAT = 1


class DapeConfig(PretrainedConfig):
    """A decoder-only language model: pre-LayerNorm, GELU, biases, untied embeddings, any method.

    method:           position encoding and score processor, such as "dape1x3-kerple" (`dape methods`).
    score_width:      channels between the two convolutions.
    score_options:    further options of ScoreConv (padding, residual, leak_future, zero_init).
    position_options: options of the position encoding (such as scaling and factor of RoPE).
    randomized_positions: in training, draw positions from this many places (None: 0, 1, 2, …).
    initializer_range: standard deviation of the weights; None for √(2 / (5 · hidden_size)).
    backend:          of the attention op; "auto" takes the fastest that can run.
    use_cache:        always False for kernels over several queries (such as "dape3x3-kerple"): rows then need earlier
                      queries, and a cache keeps keys and values alone.
    """

    # Runs before each configuration is made; registering our models waits here until one is wanted.
    before_use: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    model_type = "dape"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers declares it so)

    method: str = "dape1x3-kerple"
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
    layer_norm_eps: float = 1e-5
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float | None = None
    backend: str = "auto"
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    dape_format: int = FORMAT

    def __post_init__(self, **kwargs: Any) -> None:
        type(self).before_use()
        if self.dape_format != FORMAT:
            raise ValueError(
                f"the model has format {self.dape_format}, this version of dape reads format {FORMAT}: load it with "
                f"the version that wrote it"
            )
        for unknown in kwargs:
            # transformers keeps whatever it is given; a near miss of a name of ours is a mistake.
            if near := difflib.get_close_matches(unknown, self.__annotations__, n=1, cutoff=0.8):
                raise ValueError(f'DapeConfig has no option "{unknown}"; did you mean "{near[0]}"?')
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}"
            )
        check_backend(self.backend)
        self.method = parse_method(self.method).name
        self.use_cache = self.use_cache and self.can_cache
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
    def parsed_method(self) -> Method:
        return parse_method(self.method)

    @property
    def can_cache(self) -> bool:
        """Whether keys and values of earlier tokens are all that the next token needs of them."""
        return self.parsed_method.query_kernel_size == 1

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_encodings(self) -> int:
        """How many instances of the position encoding the model has: one a layer, or one for all."""
        return 1 if POSITIONS[self.parsed_method.position].shared else self.num_hidden_layers
