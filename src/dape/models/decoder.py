"""Decoder-only language model, a Hugging Face PreTrainedModel.

ids → embed → n × [norm → attention; norm → MLP] → norm → logits
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from dape.checksums import verify_checksums, write_checksums
from dape.layers import check_rotations
from dape.models.attention import Attention, Context
from dape.models.canon import TAPS, Canon
from dape.models.config import DapeConfig
from dape.models.remote_code import write_entries
from dape.positions import PositionEncoding, Positions, randomized_positions
from dape.positions.masks import (
    KeyValueCache,
    check_not_sharded,
    check_packing_arguments,
    decoder_positions,
    starts_again,
)
from dape.scores import ScoreProcessor

if TYPE_CHECKING:
    from dape.models.parallel import Shares

# Files that `save_pretrained` writes.
SAVED = ("*config.json", "*.safetensors", "*.index.json", "dape_*.py")


class MLP(nn.Module):
    """Two layers with GELU between."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class DapeDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + MLP(norm(x)); after each norm a Canon layer, if the method has one there."""

    def __init__(self, config: DapeConfig, layer: int) -> None:
        super().__init__()
        method, options = config.layer_methods[layer], config.score_options or {}
        self.attention = Attention(
            config.hidden_size,
            config.num_attention_heads,
            scores=method.build_scores(
                config.num_attention_heads, width=config.score_width, layer=layer, **options
            ),
            num_key_value_heads=config.num_key_value_heads,
            dropout=config.attention_dropout,
            head_norm=config.head_norm,
            head_gate=config.head_gate,
            window=method.window,
            backend=config.backend,
            layer=layer,
        )
        self.mlp = MLP(config.hidden_size, config.intermediate_size or 4 * config.hidden_size)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)
        # The initial scale of what is added to the residual stream falls with the number of layers. No subclass marks
        # it, because quantisers replace nn.Linear itself.
        for linear in (self.attention.out, self.mlp.down):
            linear.__dict__["writes_residual"] = True
        self.canon_a, self.canon_c = (
            Canon(config.hidden_size, layer, state) if place in method.canon else None
            for state, place in enumerate("ac")
        )

    def forward(
        self,
        x: Tensor,
        encoding: PositionEncoding,
        context: Context,
        past_key_values: KeyValueCache | None = None,
        last_rows: int | None = None,
    ) -> Tensor:
        # By name, for tools that move arguments between devices: see _skip_keys_device_placement. Gradient
        # checkpointing, which calls the layer again, drops the cache by its name.
        rows = last_rows
        if self.canon_c is not None and last_rows is not None:
            rows = min(last_rows + TAPS - 1, x.shape[1])
        inputs = self.attention_norm(x)
        if self.canon_a is not None:
            inputs = self.canon_a(inputs, context.positions, past_key_values)
        attended = self.attention(
            inputs, encoding=encoding, context=context, past_key_values=past_key_values, last_rows=rows
        )
        x = (x if rows is None else x[:, -rows:]) + self.dropout(attended)
        inputs = self.mlp_norm(x)
        if self.canon_c is not None:
            inputs = self.canon_c(inputs, context.positions, past_key_values)
            x, inputs = (y if last_rows is None else y[:, -last_rows:] for y in (x, inputs))
        return x + self.dropout(self.mlp(inputs))


class DapePreTrainedModel(PreTrainedModel):
    """Initialisation and the flags that transformers reads."""

    config_class = DapeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DapeDecoderLayer"]  # noqa: RUF012 (transformers declares it so)
    # Arguments of layers that tools for spreading layers over devices do not move: encodings are modules with
    # hooks of their own.
    _skip_keys_device_placement = ["past_key_values", "encoding"]  # noqa: RUF012 (as above)
    _can_compile_fullgraph = True
    _input_embed_layer = "embed"

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *arguments: Any, verify: bool = True, **options: Any
    ) -> Any:
        """As PreTrainedModel.from_pretrained, after the checksums in the folder were verified.

        verify: False takes files as they are that were edited after they were saved.
        """
        if verify and pretrained_model_name_or_path is not None:
            verify_checksums(Path(pretrained_model_name_or_path, options.get("subfolder") or ""))
        return super().from_pretrained(pretrained_model_name_or_path, *arguments, **options)

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """Ours whatever is requested by default; a name of another implementation raises."""
        if requested_attention not in (None, "eager", "dape"):
            raise ValueError(
                f'attn_implementation="{requested_attention}" is not for models of dape, which attend by their own op: '
                f'leave it out, and choose a backend of the op by DapeConfig(backend="…")'
            )
        return "eager"

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        """As PreTrainedModel.save_pretrained, with `auto_map`, the code that it points to, and checksums."""
        super().save_pretrained(save_directory, *arguments, **options)
        if arguments[0] if arguments else options.get("is_main_process", True):
            self._complete(Path(save_directory))

    def _upload_modified_files(self, working_dir: Any, *arguments: Any, **options: Any) -> Any:
        """Include code and checksums in `save_pretrained(push_to_hub=True)`."""
        self._complete(Path(working_dir))
        return super()._upload_modified_files(working_dir, *arguments, **options)

    @staticmethod
    def _complete(folder: Path) -> None:
        write_entries(folder)
        write_checksums(folder, sorted(path.name for pattern in SAVED for path in folder.glob(pattern)))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """No effect: `write_entries` saves our code as a whole, where transformers would copy it class by class."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module; called for every module, children before their parents."""
        std = self.config.initializer_range
        if isinstance(module, (PositionEncoding, ScoreProcessor)):
            # transformers protects loaded weights from torch's initialisers only, not from any other code in a reset.
            loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            values = [parameter.clone() for parameter in loaded]
            module.reset_parameters()
            for parameter, value in zip(loaded, values, strict=True):
                parameter.copy_(value)
        elif id(module) in self._inner_modules():
            # Encodings and score processors initialise their own submodules.
            return
        elif isinstance(module, nn.Linear):
            residual_std = 2 / self.config.num_hidden_layers / math.sqrt(self.config.hidden_size)
            nn.init.normal_(module.weight, std=residual_std if hasattr(module, "writes_residual") else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, Canon):
            module.reset_parameters()
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.bias)

    def _inner_modules(self) -> set[int]:
        """Identities of the modules inside position encodings and score processors."""
        outer = [m for m in self.modules() if isinstance(m, (PositionEncoding, ScoreProcessor))]
        return {id(inner) for module in outer for inner in module.modules()}


class DapeModel(DapePreTrainedModel):
    """Token ids to hidden states."""

    def __init__(self, config: DapeConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.encoding_index = config.encoding_index
        self.has_canon = any(method.canon for method in config.layer_methods)
        self.encodings = nn.ModuleList(
            config.layer_methods[self.encoding_index.index(number)].build_position(
                num_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                hidden_size=config.hidden_size,
                **(config.position_options or {}),
            )
            for number in range(max(self.encoding_index) + 1)
        )
        self.layers = nn.ModuleList(
            DapeDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        last_rows: int | None = None,
        shares: Shares | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, hidden], with the cache if requested.

        last_rows: return only the last `last_rows` tokens; the last layer then skips the other queries.
        shares: context parallelism; the input is the whole sequence, the output this process's tokens.
        output_attentions: also return the weights of every layer, T×T, computed by the reference path.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if shares is not None:
            given = {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
                "use_cache": use_cache or None,
                "output_attentions": output_attentions or self.config.output_attentions or None,
                "last_rows": last_rows,
            }
            return self._run_share(input_ids, inputs_embeds, shares, given, bool(output_hidden_states))
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        check_packing_arguments(position_ids, kwargs)
        check_not_sharded()
        # Positions after cached tokens must continue theirs, which is checked with the positions.
        cached = past_key_values is not None and not torch.compiler.is_compiling()
        begun = cached and int(cast(Cache, past_key_values).get_seq_length()) > 0
        packed = not begun and starts_again(position_ids, attention_mask)
        layers = [] if past_key_values is None else past_key_values.layers
        keeps_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        if self.has_canon and past_key_values is not None and not keeps_states:
            raise ValueError(
                f"{self.config.method} needs a cache of hidden states: build it with DynamicCache(config=model.config)"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        if packed and (use_cache or past_key_values is not None):
            raise ValueError(
                "position_ids start again within a row, which packs several documents, but a cache would mix the "
                "documents when it is continued: pass use_cache=False and no past_key_values"
            )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if self.training and self.config.randomized_positions and position_ids is None:
            if past_key_values is not None:
                raise ValueError(
                    f"randomized_positions={self.config.randomized_positions} draws positions for whole inputs in "
                    f"training, which a cache could not continue: pass use_cache=False and no past_key_values"
                )
            position_ids = randomized_positions(x.shape[1], self.config.randomized_positions, device=x.device)
        positions, arranged = decoder_positions(
            x.shape[1],
            device=x.device,
            cache=past_key_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
        )
        for encoding in self.encodings:
            check_rotations(
                cast(PositionEncoding, encoding), positions, past_key_values, 0, self.config.method
            )
        keep_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        keep_weights = self.config.output_attentions if output_attentions is None else output_attentions
        if arranged is not None and (self.has_canon or self._reads_earlier_queries()):
            raise ValueError(
                f"padding between tokens, across which {self.config.method} would convolve: pad at the ends of rows"
            )
        if (
            attention_mask is not None
            and attention_mask.dim() == 4
            and (begun or (past_key_values is not None and torch.compiler.is_compiling()))
            and self._reads_earlier_queries()
        ):
            raise ValueError(
                f"an attention_mask by query does not say which keys the cached queries saw, which "
                f"{self.config.method} reads again: pass [batch, tokens], or no cache (use_cache=False)"
            )
        context = Context(
            positions,
            arrange=None if arranged is None else arranged.arrange,
            shown=[] if keep_weights else None,
        )
        output = self._run(x, context, past_key_values, bool(keep_states), last_rows)
        if arranged is not None and output.attentions is not None:
            output.attentions = cast(Any, tuple(map(arranged.in_original_order, output.attentions)))
        if output.attentions is not None and past_key_values is not None and past_key_values.is_compileable:
            # As in transformers' models: a column for every slot of a preallocated cache.
            room = past_key_values.get_mask_sizes(1, 0)[0]
            shown = (F.pad(weights, (0, room - weights.shape[-1])) for weights in output.attentions)
            output.attentions = cast(Any, tuple(shown))
        return output

    def _run_share(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        shares: Shares,
        given: dict[str, Any],
        keep_states: bool,
    ) -> BaseModelOutputWithPast:
        """Hidden states of this process's tokens; the input is the whole sequence."""
        if self.has_canon:
            raise ValueError(
                f"{self.config.method} mixes neighbouring tokens, which other processes may hold: it cannot be used with shares"
            )
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} cannot be used with shares, of whole, unpadded windows")
        if self.training and self.config.randomized_positions:
            raise ValueError(
                "randomized_positions cannot be used with shares: each process would draw others"
            )
        whole = cast(Tensor, inputs_embeds if input_ids is None else input_ids)
        if whole.shape[1] != shares.num_tokens:
            raise ValueError(
                f"shares are of {shares.num_tokens} tokens, the input has {whole.shape[1]}: pass the whole sequence"
            )
        own = shares.part(whole, 1)
        positions = shares.positions(own.device)
        context = Context(Positions(positions, positions), shares=shares)
        return self._run(own if input_ids is None else self.embed(own), context, None, keep_states)

    def _reads_earlier_queries(self) -> bool:
        layers = (cast(DapeDecoderLayer, layer) for layer in self.layers)
        return any(layer.attention.scores.program().earlier_rows for layer in layers)

    def encoding(self, layer: int) -> PositionEncoding:
        """The position encoding of a layer."""
        return cast(PositionEncoding, self.encodings[self.encoding_index[layer]])

    def _run(
        self,
        x: Tensor,
        context: Context,
        past_key_values: KeyValueCache | None,
        keep_states: bool,
        last_rows: int | None = None,
    ) -> BaseModelOutputWithPast:
        states: list[Tensor] = []
        x = self.dropout(self.encoding(0).embed(x, context.positions.queries))
        # Self-speculative decoding, which drafts with the first layers alone, lowers the configured number meanwhile.
        layers = list(self.layers)[: self.config.num_hidden_layers]
        for index, layer in enumerate(layers):
            states.append(x)
            x = layer(
                x,
                encoding=self.encoding(index),
                context=context,
                past_key_values=past_key_values,
                last_rows=last_rows if index + 1 == len(layers) else None,
            )
        x = self.norm(x)
        states.append(x)
        return BaseModelOutputWithPast(
            last_hidden_state=cast(Any, x),
            past_key_values=cast(Any, past_key_values),
            hidden_states=cast(Any, tuple(states) if keep_states else None),
            attentions=cast(Any, None if context.shown is None else tuple(context.shown)),
        )


class DapeForCausalLM(DapePreTrainedModel, GenerationMixin):
    """The language model: hidden states to the next token's logits."""

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012 (as above)

    def __init__(self, config: DapeConfig) -> None:
        super().__init__(config)
        self.model = DapeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The padding mask itself: our attention takes intervals, never a T×T mask.

        For a preallocated cache it has the cache's length, so that all steps compile for one shape.
        """
        cache = kwargs.get("past_key_values")
        if attention_mask is None or attention_mask.dim() != 2 or cache is None or not cache.is_compileable:
            return attention_mask
        return F.pad(attention_mask, (0, max(0, cache.get_mask_sizes(1, 0)[0] - attention_mask.shape[1])))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        shares: Shares | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T or logits_to_keep, vocabulary], and the loss if labels are given.

        shares: context parallelism (`dape.models.parallel.Shares`). Every process passes the same ids and labels;
                logits are of its own tokens, the loss is its share: losses and gradients sum to those of the whole
                sequence.
        """
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        outputs = self.model(*inputs, use_cache=use_cache, shares=shares, **kwargs)
        hidden = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            if shares is not None:
                following = F.pad(labels[:, 1:], (0, 1), value=-100)
                kwargs.setdefault("num_items_in_batch", (following != -100).sum())
                kwargs["shift_labels"] = shares.part(following, 1)
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class DapeForSequenceClassification(GenericForSequenceClassification, DapePreTrainedModel):
    """Sequence classification from the hidden state of the last token."""


class DapeForTokenClassification(GenericForTokenClassification, DapePreTrainedModel):
    """Token classification."""


# Trainer and others look up models that predict the next token in this table of class names.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DapeConfig.model_type] = DapeForCausalLM.__name__
