"""Hooks that switch off or stretch a model's own positions, and token states that travel with its cache.

Rotary models compute cosines and sines once per forward pass, in modules named …RotaryEmbedding, and pass them to their
layers. Learned positions are embeddings next to those of the tokens. Both keep their modules and weights: hooks change
their outputs, and are removed with the retrofit.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from dape.models.canon import Canon
from dape.models.interface import CANON, ENCODING, STATE, unpacked
from dape.positions import PositionEncoding, RoPE
from dape.positions.rope import SCALINGS


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that compute the cosines and sines for a model's layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]


def learned_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Position embeddings: those other than the token embeddings with a name that refers to positions."""
    tokens = model.get_input_embeddings()
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not tokens
        and ("position" in name.rpartition(".")[2] or name.rpartition(".")[2] == "wpe")
    ]


def switch_off(model: PreTrainedModel) -> list[RemovableHandle]:
    """Install hooks that remove positions: rotations by zero, learned positions zero."""
    handles = [module.register_forward_hook(_unrotated) for module in rotary_modules(model)]
    for module in learned_modules(model):
        # A table is finite; its first row serves inputs of any length.
        handles.append(module.register_forward_pre_hook(_first_position, with_kwargs=True))
        handles.append(module.register_forward_hook(_nothing))
    return handles


def stretch(model: PreTrainedModel, rope: RoPE) -> list[Any]:
    """Install hooks that rotate with the frequencies of `rope`, with the model's own pairing of features."""

    gain = SCALINGS[rope.scaling].gain(rope)

    def turned(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        positions = cast(Tensor, kwargs["position_ids"] if "position_ids" in kwargs else args[1])
        if rope.by_length and not torch.compiler.is_compiling():
            _check_lengths(rope, positions)
        theta = rope.frequencies(positions.amax(-1, keepdim=True) + 1)
        angles = positions[..., None].to(theta.dtype) * theta
        cos, sin = (_laid_out(f(angles) * gain, output) for f in (torch.cos, torch.sin))
        if isinstance(output, Tensor):
            return torch.complex(cos.float(), sin.float()).to(output.dtype)
        return cos.to(output[0].dtype), sin.to(output[1].dtype)

    def check_padding(module: nn.Module, args: Any, kwargs: Any) -> None:
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is None or positions is not None or torch.compiler.is_compiling() or mask.dim() != 2:
            return
        if mask.shape[1] > rope.original_length and not bool(mask.all()):
            raise ValueError(
                f'scaling="{rope.scaling}" rotates by the number of tokens, but without position_ids padding counts as '
                f"well: pass position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0)"
            )

    handles: list[Any] = [_Mark(module, rope.factor) for module in rotary_modules(model)]
    handles += [module.register_forward_hook(turned, with_kwargs=True) for module in rotary_modules(model)]
    if rope.by_length:
        handles.append(model.register_forward_pre_hook(check_padding, with_kwargs=True))
    return handles


class _Mark:
    """A buffer in saved weights, which plain transformers reports as unexpected: it would drop the scaling in silence."""

    NAME = "stretched_by_dape_retrofit"

    def __init__(self, module: nn.Module, factor: float) -> None:
        self.module = module
        device = next(iter(module.buffers()), torch.empty(0)).device
        module.register_buffer(self.NAME, torch.tensor([factor], device=device))

    def remove(self) -> None:
        del self.module._buffers[self.NAME]


def _check_lengths(rope: RoPE, positions: Tensor) -> None:
    """Raise if cached keys, or those of packed documents, would be rotated by a wrong length."""
    counts = rope.outgrown(positions[..., 0].flatten(), positions.amax(-1).flatten() + 1)
    if counts is not None:
        raise ValueError(
            f'scaling="{rope.scaling}" rotates keys by the input\'s length, so those cached at {counts[0]} tokens do not '
            f"serve {counts[1]}: pass use_cache=False"
        )
    if int(positions.max()) >= rope.original_length and bool((positions.diff(dim=-1) < 0).any()):
        raise ValueError(
            f'scaling="{rope.scaling}" rotates by the length of a document, which position_ids of packed documents do '
            f"not say: pass documents in rows of their own"
        )


def rotary_width(model: PreTrainedModel) -> int:
    """Number of features per head that rotate."""
    widths = set()
    for module in rotary_modules(model):
        output = _probe(model, module)
        widths.add(2 * output.shape[-1] if isinstance(output, Tensor) else _full_width(output[0]))
    if len(widths) != 1:
        raise ValueError(
            f"{type(model).__name__} rotates {' and '.join(map(str, sorted(widths)))} features, by layer: "
            f"its rotary positions can be kept or switched off, not stretched"
        )
    return widths.pop()


def rotary_base(model: PreTrainedModel) -> float:
    """θ of the model's rotary positions."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    base = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    if not isinstance(base, int | float):
        raise ValueError(f"{type(model).__name__} has no single rotary base: name it, as in rope[base=10000]")
    return float(base)


def _probe(model: PreTrainedModel, module: nn.Module) -> Any:
    device = next(model.parameters()).device
    x, positions = torch.zeros(1, 2, 4, device=device), torch.arange(2, device=device)[None]
    if "layer_type" in inspect.signature(module.forward).parameters:
        return module(x, positions, cast(Any, module).layer_types[0])
    return module(x, positions)


def _full_width(cos: Tensor) -> int:
    """Number of features that cosines [1, 2, n] apply to: n, or 2n if there is one per pair."""
    row = cos[0, 1]
    paired = len(row) % 2 == 0 and (torch.equal(row[::2], row[1::2]) or torch.equal(*row.chunk(2)))
    return len(row) if paired else 2 * len(row)


def _laid_out(values: Tensor, like: Any) -> Tensor:
    """Values per pair [B, T, n], expanded in the layout of the model's own cosines."""
    if isinstance(like, Tensor) or like[0].shape[-1] == values.shape[-1]:
        return values
    row = like[0][0, -1]
    neighbours = bool(torch.equal(row[::2], row[1::2])) and not torch.equal(*row.chunk(2))
    return values.repeat_interleave(2, -1) if neighbours else torch.cat([values, values], -1)


def _unrotated(module: nn.Module, _: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return torch.ones_like(output)
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)


def _first_position(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if isinstance(kwargs.get("position_ids"), Tensor):
        kwargs = {**kwargs, "position_ids": torch.zeros_like(kwargs["position_ids"])}
    elif args and not isinstance(args[0], Tensor):
        raise ValueError(f"{type(module).__name__} takes no tensor of positions that could be replaced")
    elif args and type(module) is nn.Embedding:
        args = (torch.zeros_like(args[0]), *args[1:])
    return args, kwargs


def _nothing(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return torch.zeros_like(output)


class StatefulCache:
    """Wrapper of a transformers cache that stores a per-token state as further features of the keys.

    Operations that reorder, crop or copy the cache then include it.
    extra: [B, H, T, n], state of the new tokens; after `update`, of all cached tokens.
    neighbours: whether a key's state is used with those of the tokens before it, which a window's cache drops.
    """

    def __init__(self, extra: Tensor, cache: Cache | None = None, *, neighbours: bool = False) -> None:
        self.extra, self.cache, self.neighbours = extra, cache, neighbours

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        width, groups, dtype = keys.shape[-1], keys.shape[1], keys.dtype
        # [B, H, T, n] as [B, G, T, H/G · n]: a key has the states of all heads that read it.
        size = self.extra.shape[-1]
        packed = self.extra.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)
        # A cache has one dtype, the finer of both: under autocast, states are finer than keys.
        keys, values = self.cache.update(torch.cat([keys, packed], -1), values, layer, *args, **kwargs)
        if self.neighbours and self.get_seq_length(layer) > keys.shape[2]:
            raise ValueError(
                "the encoding that dape.retrofit added reads tokens before the model's window, which its cache drops: "
                "pass use_cache=False"
            )
        self.extra = keys[..., width:].unflatten(3, (-1, size)).transpose(2, 3).flatten(1, 2)
        return keys[..., :width].to(dtype), values.to(dtype)

    def get_seq_length(self, layer: int = 0) -> int:
        return 0 if self.cache is None else int(self.cache.get_seq_length(layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)


def mix_neighbours(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Hook that passes an attention layer's hidden states through its Canon layer."""
    given = [*args[1:], *kwargs.values()]
    own = getattr(module, "layer_idx", 0)
    if any(isinstance(x, Cache | StatefulCache) and int(x.get_seq_length(own)) for x in given):
        raise ValueError(
            "the Canon layers that dape.retrofit added read hidden states of earlier tokens, which caches of "
            "transformers do not keep: pass use_cache=False"
        )
    x = args[0] if args else kwargs["hidden_states"]
    mask = next((y for y in given if isinstance(y, Tensor) and y.dim() == 4), None)
    count = x.shape[1]
    _, counted = unpacked(mask, count, count)
    # A preallocated cache has room after the tokens.
    starts = (torch.arange(count, device=x.device)[None] if counted is None else counted[:, :count]) == 0
    x = cast(Canon, getattr(module, CANON)).mixed(x, starts)
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def carry_state(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Hook that computes the token states of a layer's encoding and passes them to `attend`."""
    encoding = cast(PositionEncoding, getattr(module, ENCODING))
    state = encoding.token_state(args[0] if args else kwargs["hidden_states"])
    assert state is not None
    # Of the module itself where PEFT wraps it.
    turn = cast(MethodType, encoding.turn).__func__
    carried = StatefulCache(state, neighbours=turn is not PositionEncoding.turn)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        carried.cache = value
        return carried

    kwargs = {name: wrapped(value) for name, value in kwargs.items()}
    return tuple(map(wrapped, args)), {**kwargs, STATE: carried}
