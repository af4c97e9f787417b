"""Attach score processors and position encodings to the attention of a model of transformers, and remove them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from dape.checksums import write_checksums
from dape.methods import Method, parse_method
from dape.models.attention import Attention
from dape.models.canon import Canon
from dape.models.interface import CANON, ENCODING, NAME, SCORES, Call
from dape.models.remote_code import write_entries
from dape.positions import POSITIONS, Grid, PositionEncoding, RoPE, SelfExtend
from dape.positions.kerple import FLOOR, Kerple
from dape.positions.rope import SCALINGS
from dape.rebuildable import constructor_parameters
from dape.retrofitting import check, positions
from dape.retrofitting.settings import Trains
from dape.scores import SCORES as PROCESSORS
from dape.scores import PlainScores, ScoreProcessor

Model = TypeVar("Model", bound=nn.Module)

# Attribute of the model's configuration that records the retrofit, so that it is saved with the model.
RECORD = "dape_retrofit"
# Initial heights of Kerple over the heads. A head's weights fall as distance^−height: from 1 on, the share of keys
# beyond the training length stays bounded.
HEIGHTS = (1.0, 4.0)
# Default factor of a RoPE scaling: as far as `dape retrofit` reports.
FACTOR = 8.0


@dataclass(frozen=True)
class Retrofit:
    """Record of a retrofit, sufficient to rebuild it.

    num_heads: of each attention layer. zero_init: whether processors began as the identity, on which their parameters
    depend. replaced: the previous attention implementation. caches: whether the model decoded with a cache before.
    """

    method: str
    width: int
    num_heads: Sequence[int]
    zero_init: bool = True
    replaced: str = "sdpa"
    caches: bool = True


def retrofit(
    model: Model, method: str = "dape1x3", *, width: int = 32, zero_init: bool = True, self_test: bool = True
) -> Model:
    """Add the score processor and the positions of a method to every attention layer, in place; returns the model.

    method:  a score processor alone keeps the model's own positions and begins by changing nothing: "dape1x3",
             "talking", "mta". With a position encoding, that one replaces the model's: "dape1x3-kerple", "kerple",
             "fox", "nope". "rope" keeps the rotary positions of a model that has them; with options it stretches
             them: "dape1x3-rope[scaling=yarn,factor=8,original_length=256]", the base being the model's own, and by
             default the length that its configuration names, eight times.
    width:   hidden channels of processors that have them.
    zero_init: initialise processors to the identity; False uses PyTorch's random initialisation of convolutions.
    self_test: run a few tokens to check that attention is reproduced, causal, the same with and without a cache, and
             that old positions are off. A model that fails is refused with the reason, and left unchanged.

    Encoders (BERT, ModernBERT), encoder–decoders (T5, in whose self-attention the convolution reads the bias as well) and
    vision models (ViT, DeiT) are retrofitted alike. A vision model keeps its positions; an encoding is added to them, by
    the distance between patches.

    The model keeps its key/value groups, windows, caches and generation. New positions count tokens; they ignore
    gaps in position_ids, which are refused. Save with `save_adapter` or `save_retrofitted`, undo with
    `remove_retrofit`. Of a PEFT model, the base model inside is retrofitted.
    """
    inner = inner_model(model)
    if is_retrofitted(inner):
        raise ValueError("this model is already retrofitted: call dape.remove_retrofit(model) first")
    parsed, keeps = parse_plan(method, inner)
    if parsed.window is not None or parsed.canon not in ("", "a"):
        raise ValueError(f"{parsed.name}: a retrofit keeps MLPs and windows, leave window out and canon at a")
    tested = self_test and not next(inner.parameters()).is_meta
    before = check.logits(inner, check.given(inner)) if tested else None
    replaced = inner.config._attn_implementation or "sdpa"
    _switch(inner, NAME)
    try:
        calls = check.interface_calls(inner)
        parsed = _completed(parsed, inner, calls)
        if parsed.direction == "causal" and not all(call.causal for call in calls):
            raise check.refused(
                inner, f"it is bidirectional, and {parsed.name} has no meaning where the future is visible"
            )
        heads, caches = [call.num_heads for call in calls], bool(getattr(inner.config, "use_cache", True))
        plan = Retrofit(method if keeps else parsed.name, width, heads, zero_init, replaced, caches)
        if before is not None:
            check.check_caps(inner, calls, replaced)
            for call in calls:
                call.module.add_module(SCORES, PlainScores())
            check.check_same_logits(inner, before)
        _attach(inner, calls, plan, parsed, keeps=keeps, tested=tested)
        if before is not None and zero_init and _extends(parsed, inner):
            check.check_near(inner, before, dict(_position_options(parsed)))
        if tested and all(call.causal for call in calls):
            check.check_causal(inner)
            if not _reads_earlier_queries(inner):
                check.check_cache(inner)
    except BaseException:
        _detach(inner, replaced)
        raise
    setattr(inner.config, RECORD, asdict(plan))
    for saving in (save_pretrained, _upload_modified_files):
        inner.__dict__[saving.__name__] = partial(saving, inner)
    if model is not inner:
        save_inside_peft(model)
    # A hook, because setting another implementation later would silently bypass the added modules.
    _hooks(inner).append(inner.register_forward_pre_hook(_check_call, with_kwargs=True))
    if _reads_earlier_queries(inner):
        _use_cache(inner, False)
    return model


def save_pretrained(self: PreTrainedModel, save_directory: Any, *arguments: Any, **options: Any) -> None:
    """save_pretrained of a retrofitted model: adds the code that `trust_remote_code=True` loads."""
    type(self).save_pretrained(self, save_directory, *arguments, **options)
    main = arguments[0] if arguments else options.get("is_main_process", True)
    if not main:
        return
    folder = Path(save_directory)
    if isinstance(self, GenerationMixin) and not self.config.is_encoder_decoder:
        write_entries(folder, retrofitted=True)
    write_weight_checksums(folder)


def write_weight_checksums(folder: Path, pattern: str = "model*.safetensors") -> None:
    """Write checksums of the weights in a folder, which `load_retrofitted` verifies."""
    write_checksums(folder, [path.name for path in folder.glob(pattern)])


def save_inside_peft(model: nn.Module) -> None:
    """Make a PEFT model around a retrofitted one save the added modules along with its own weights."""
    model.__dict__["save_pretrained"] = partial(_save_with_adapter, model)


def _save_with_adapter(self: Any, save_directory: Any, *arguments: Any, **options: Any) -> None:
    """save_pretrained of a PEFT model around a retrofitted one: saves the added modules along with PEFT's weights."""
    from dape.retrofitting.files import save_adapter

    type(self).save_pretrained(self, save_directory, *arguments, **options)
    if options.get("is_main_process", True):
        save_adapter(self, save_directory)
        write_weight_checksums(Path(save_directory), "adapter_model.safetensors")


def _upload_modified_files(self: Any, working_dir: Any, *arguments: Any, **options: Any) -> Any:
    """The same for `save_pretrained(push_to_hub=True)`."""
    write_entries(Path(working_dir), retrofitted=True)
    write_weight_checksums(Path(working_dir))
    return type(self)._upload_modified_files(self, working_dir, *arguments, **options)


def remove_retrofit(model: Model) -> Model:
    """Restore the model's own attention and positions, in place; its weights stay as trained.

    Parameters that stopped requiring gradients stay so: call `model.requires_grad_(True)` to train them.
    """
    inner = inner_model(model)
    plan = record(inner)
    _detach(inner, plan.replaced)
    delattr(inner.config, RECORD)
    model.__dict__.pop("save_pretrained", None)
    _use_cache(inner, plan.caches)
    return model


def parse_plan(method: str, model: PreTrainedModel) -> tuple[Method, bool]:
    """The method, and whether the model keeps its own positions."""
    pair, bracket, options = method.partition("[")
    alone = re.fullmatch(r"([a-z_]+)(?:\d+x\d+)?", pair)
    if alone and alone[1] in PROCESSORS and pair not in POSITIONS:
        # The bias that a model passes itself is one for the processor to read.
        own = "t5" if _passes_bias(model) else "nope"
        return parse_method(f"{own if pair == 'plain' else f'{pair}-{own}'}{bracket}{options}"), True
    parsed = parse_method(method)
    encoding = POSITIONS[parsed.position]
    if encoding.embed is not PositionEncoding.embed:
        raise ValueError(
            f'method="{method}": "{parsed.position}" is added to token embeddings, and a retrofit changes attention '
            f"alone; choose an encoding that acts there, such as {Method('kerple', parsed.processor, parsed.kernel).name}"
        )
    if _passes_bias(model) and not encoding.additive:
        reason = (
            f'"{parsed.position}" adds no bias that would replace its own; name one that does, such as kerple'
        )
        raise check.refused(model, reason)
    unchanged = issubclass(encoding, RoPE) and not _position_options(parsed)
    return parsed, unchanged and bool(positions.rotary_modules(model))


def set_trainable(model: nn.Module, trains: Trains) -> None:
    """Let all parameters require gradients, those of attention layers alone, or those of added modules alone.

    With "all", parameters that were frozen before stay frozen.
    """
    if trains not in get_args(Trains):
        raise ValueError(f'trains="{trains}", expected one of {", ".join(get_args(Trains))}')
    if trains == "all":
        return
    chosen = added_parameters(model)
    if trains == "attention":
        chosen |= {parameter for layer in attention_layers(model) for parameter in layer.parameters()}
    for parameter in inner_model(model).parameters():
        parameter.requires_grad_(parameter in chosen and parameter.is_floating_point())


def record(model: nn.Module) -> Retrofit:
    """Record of the model's retrofit; raises if it has none."""
    inner = inner_model(model)
    if not is_retrofitted(inner):
        raise ValueError("this model has no score processor of ours: add it with dape.retrofit(model)")
    return Retrofit(**getattr(inner.config, RECORD))


def is_retrofitted(model: nn.Module) -> bool:
    """Whether the model has the added modules; its configuration may record some that plain transformers did not load."""
    return bool(retrofitted_layers(model))


def added_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of score processors, encodings and Canon layers, of a retrofitted model or of one of ours."""
    added = (m for m in model.modules() if isinstance(m, PositionEncoding | ScoreProcessor | Canon))
    return {value for module in added for value in module.parameters()}


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Attention modules of a retrofitted model or of one of ours, in order of layers."""
    return retrofitted_layers(model) or [m for m in model.modules() if isinstance(m, Attention)]


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the added modules by name in the model (in the base model, if PEFT wraps it)."""
    inner = inner_model(model)
    return {name: value for name, value in inner.named_parameters() if is_added(name)}


def is_added(name: str) -> bool:
    """Whether the parameter `name` belongs to an added module."""
    return any(f".{part}." in name for part in (SCORES, ENCODING, CANON))


def retrofitted_layers(model: nn.Module) -> list[nn.Module]:
    """Attention modules with a score processor, in order of layers."""
    return [layer for layer in model.modules() if SCORES in layer._modules]


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, without PEFT's wrappers."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = cast(Any, model).get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise check.refused(model, "pass a model of transformers")
    if getattr(model.config, "add_cross_attention", False):
        raise check.refused(model, "it has cross-attention, whose scores are of two sequences")
    return model


def own_length(model: nn.Module) -> int | None:
    """Tokens that a model was made for, if its configuration says so."""
    config: Any = model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _passes_bias(model: nn.Module) -> bool:
    """Whether attention layers pass a position bias of the model's own, as T5's do."""
    return any(hasattr(layer, "compute_bias") for layer in model.modules())


def _sees_patches(model: PreTrainedModel) -> bool:
    return model.main_input_name == "pixel_values"


def _attach(
    model: PreTrainedModel, calls: list[Call], plan: Retrofit, method: Method, *, keeps: bool, tested: bool
) -> None:
    hooks, options = _hooks(model), {}
    normalised = dict(method.options).get("normaliser", "softmax") != "softmax"
    if normalised or "zero_init" in constructor_parameters(PROCESSORS[method.processor]):
        options = {"zero_init": plan.zero_init} | {n: v for n, v in method.options if n == "zero_init"}
    stretched = not keeps and issubclass(POSITIONS[method.position], RoPE) and positions.rotary_modules(model)
    if stretched:
        hooks += positions.stretch(model, _rope(model, method))
    elif not keeps and not _sees_patches(model):
        hooks += positions.switch_off(model)
        if tested and not _passes_bias(model):
            check.check_without_positions(model)
    for number, call in enumerate(calls):
        layer, like = call.module, next(call.module.parameters())
        # Frozen and quantised weights may have dtypes that convolutions cannot have; then float32 is right.
        dtype = like.dtype if like.is_floating_point() else torch.float32
        with torch.device(like.device):
            scores: ScoreProcessor = method.build_scores(
                call.num_heads, width=plan.width, layer=number, **options
            )
            encoding = None
            if not (keeps or stretched or method.position == "nope"):
                encoding = method.build_position(
                    num_heads=call.num_heads,
                    head_dim=call.head_dim,
                    hidden_size=model.config.get_text_config().hidden_size,
                )
                gentle_start(encoding, beside_others=_sees_patches(model))
                if _sees_patches(model):
                    encoding = Grid(encoding, prefix=call.num_keys - math.isqrt(call.num_keys) ** 2)
        layer.add_module(SCORES, scores.to(dtype))
        if encoding is not None:
            layer.add_module(ENCODING, encoding.to(dtype))
            if type(encoding).token_state is not PositionEncoding.token_state:
                hooks.append(layer.register_forward_pre_hook(positions.carry_state, with_kwargs=True))
        if method.canon:
            canon = Canon(model.config.get_text_config().hidden_size)
            if plan.zero_init:
                nn.init.zeros_(canon.weight)
            layer.add_module(CANON, canon.to(like.device, dtype))
            hooks.append(layer.register_forward_pre_hook(positions.mix_neighbours, with_kwargs=True))


def _extends(method: Method, model: PreTrainedModel) -> bool:
    """Whether the method is SelfExtend or ReRoPE in place of the model's own rotation."""
    return issubclass(POSITIONS[method.position], SelfExtend) and bool(positions.rotary_modules(model))


def _completed(method: Method, model: PreTrainedModel, calls: list[Call]) -> Method:
    """The method with options that the model decides.

    Of a RoPE scaling, the model's own length as original_length, and the factor; of SelfExtend, the model's own rotation,
    and half of its length as the near window.
    """
    given, length = dict(_position_options(method)), own_length(model)
    own: dict[str, Any] = {}
    if _extends(method, model):
        own["base"] = positions.rotary_base(model)
        own["fraction"] = positions.rotary_width(model) / calls[0].head_dim
        own |= {"near": max(1, length // 2)} if length else {}
    elif issubclass(POSITIONS[method.position], RoPE) and "scaling" in given:
        own["factor"] = FACTOR
        if "original_length" in SCALINGS[given["scaling"]].needs and length:
            own["original_length"] = length
    missing = ((name, value) for name, value in own.items() if name not in given)
    return replace(method, options=(*method.options, *missing))


def _rope(model: PreTrainedModel, method: Method) -> RoPE:
    given = dict(_position_options(method))
    if "fraction" in given:
        raise ValueError(f"fraction={given['fraction']} is decided by the model: leave it out")
    given.setdefault("base", positions.rotary_base(model))
    encoding = POSITIONS[method.position]
    return cast(RoPE, encoding(head_dim=positions.rotary_width(model), **given))


@torch.no_grad()
def gentle_start(encoding: PositionEncoding, *, beside_others: bool = False) -> None:
    """Initialise an encoding such that it disturbs a model trained with other positions little.

    beside_others: the model keeps its positions, and begins with hardly any of these.
    """
    if isinstance(encoding, Kerple):
        low, high = (FLOOR, 2 * FLOOR) if beside_others else HEIGHTS
        heights = torch.linspace(low, high, len(encoding.raw_height)) - FLOOR
        encoding.raw_height.copy_(heights.to(encoding.raw_height.device))


def _detach(model: PreTrainedModel, implementation: str) -> None:
    for layer in retrofitted_layers(model):
        for name in (SCORES, ENCODING, CANON):
            layer._modules.pop(name, None)
    for hook in _hooks(model):
        hook.remove()
    del model._dape_hooks
    for saving in (save_pretrained, _upload_modified_files):
        model.__dict__.pop(saving.__name__, None)
    _switch(model, implementation)


def _hooks(model: nn.Module) -> list[Any]:
    if "_dape_hooks" not in model.__dict__:
        model.__dict__["_dape_hooks"] = []
    return model.__dict__["_dape_hooks"]


def _use_cache(model: PreTrainedModel, value: bool) -> None:
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = value
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.use_cache = value


def _reads_earlier_queries(model: nn.Module) -> bool:
    """Whether caches of keys and values do not suffice: earlier queries or hidden states are read again."""
    return any(
        CANON in layer._modules or cast(Any, layer)._modules[SCORES].program().earlier_rows
        for layer in retrofitted_layers(model)
    )


def _position_options(method: Method) -> list[tuple[str, Any]]:
    known = constructor_parameters(POSITIONS[method.position])
    return [(name, value) for name, value in method.options if name in known]


def _switch(model: PreTrainedModel, implementation: str) -> None:
    try:
        model.set_attn_implementation(implementation)
    except ValueError as error:
        raise check.refused(model, str(error)) from error
    if model.config._attn_implementation != implementation:
        reason = f'it did not take attn_implementation="{implementation}": {check.NO_INTERFACE}'
        raise check.refused(model, reason)


def _check_call(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    inner = cast(PreTrainedModel, model)
    implementation = inner.config._attn_implementation
    if implementation != NAME:
        raise ValueError(
            f'attn_implementation="{implementation}" hides the scores from what dape.retrofit added: call '
            f'model.set_attn_implementation("{NAME}"), or dape.remove_retrofit(model) to drop it'
        )
    position_ids = kwargs.get("position_ids")
    if position_ids is None or torch.compiler.is_compiling():
        return
    encodings = [
        layer._modules[ENCODING] for layer in retrofitted_layers(inner) if ENCODING in layer._modules
    ]
    if encodings and bool((position_ids.diff(dim=-1) > 1).any()):
        raise ValueError(
            "position_ids leave gaps between tokens, but positions that dape.retrofit added count tokens by ones"
        )
    cache = kwargs.get("past_key_values")
    seen = 0 if cache is None else int(cache.get_seq_length())
    index = torch.arange(position_ids.shape[-1], device=position_ids.device) + seen
    if any(cast(PositionEncoding, e).absolute for e in encodings) and bool((position_ids > index).any()):
        raise ValueError(
            f"position_ids go up to {int(position_ids.max())}, but there are {len(index)} tokens after {seen} that the "
            f"cache counts: the positions that dape.retrofit added count tokens, so pass a cache that counts those it "
            f"drops (DynamicCache(config=model.config)), or the whole input (use_cache=False)"
        )
