"""Self-test of a retrofit: checks on a small input that hold for every model, and for causal ones.

These checks, not a list, decide which models can be retrofitted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dape.models.interface import CALLS, Call, recording

TOKENS, CACHED = 12, 7
# Differences of logits that rounding explains, by dtype, as a share of the largest logit.
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4}
HALF_ROUNDING = 0.05
NO_INTERFACE = "its attention does not go through transformers' attention interface, which hides the scores"


def refused(model: object, reason: str) -> ValueError:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    return ValueError(f'cannot retrofit "{kind}": {reason}')


@contextlib.contextmanager
def inference_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients or random draws in the block; the previous mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def given(model: PreTrainedModel, *, changed: bool = False) -> dict[str, Any]:
    """Arguments of a small forward pass: token ids [1, TOKENS], or an image; `changed` replaces the last token."""
    like = next(model.parameters())
    if model.main_input_name == "pixel_values":
        size, channels = model.config.image_size, getattr(model.config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size
        image = torch.linspace(-1, 1, channels * height * width, device=like.device)
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return {"pixel_values": image.view(1, channels, height, width).to(dtype)}
    table = cast(Tensor, model.get_input_embeddings().weight)
    ids = 3 + 5 * torch.arange(TOKENS, device=table.device)[None]
    if changed:
        ids[:, -1] += 1
    ids = ids % len(table)
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids, "use_cache": False}
    return {"input_ids": ids[:, :CACHED], "decoder_input_ids": ids, "use_cache": False}


def logits(model: PreTrainedModel, arguments: dict[str, Any], **options: Any) -> Tensor:
    """Logits of a forward pass, or hidden states of a model without a head."""
    with inference_mode(model):
        out = model(**{**arguments, **options})
    return out.logits if "logits" in out else out.last_hidden_state


def interface_calls(model: PreTrainedModel) -> list[Call]:
    """The layers that call transformers' attention interface on their own sequence in a forward pass, in order."""
    arguments = given(model)
    if next(model.parameters()).is_meta and "input_ids" in arguments and not model.config.is_encoder_decoder:
        # Without a mask, transformers would read values of meta tensors.
        shape = (1, 1, TOKENS, TOKENS)
        arguments["attention_mask"] = arguments["input_ids"].new_ones(shape, dtype=torch.bool)
    try:
        with recording(CALLS) as calls:
            logits(model, arguments)
    except Exception as error:
        raise refused(model, f"a forward pass fails: {error}") from error
    if not calls:
        raise refused(model, NO_INTERFACE)
    calls = [call for call in calls if not call.crosses]
    if len({id(call.module) for call in calls}) < len(calls):
        raise refused(model, "one of its layers attends twice in a forward pass")
    return calls


def check_caps(model: PreTrainedModel, calls: list[Call], replaced: str) -> None:
    """Raise if the replaced implementation drops the soft caps that layers pass.

    Before version 5.21, transformers runs Gemma 2 by "sdpa" unless told otherwise, and so without its caps.
    """
    caps = [call.softcap for call in calls if call.softcap is not None]
    if caps and replaced == "sdpa":
        raise refused(
            model,
            f'attn_implementation="sdpa" drops its soft cap of {max(caps):g}, which a retrofit applies: call '
            f'model.set_attn_implementation("eager") first, and compare with that',
        )


def check_same_logits(model: PreTrainedModel, before: Tensor) -> None:
    """Raise if the model's logits differ from `before`."""
    reason = "its attention does more than softmax(scores) · values: run through dape.attention its logits change by {}"
    _compare(model, _tried(model, given(model)), before, reason)


def check_near(model: PreTrainedModel, before: Tensor, options: dict[str, Any]) -> None:
    """Raise if the logits differ from `before` though no distance is beyond the near window."""
    if before.shape[1] > options.get("near", 0):
        return
    reason = (
        f"its rotation is not base={options['base']:g} on halves of {options['fraction']:g} of the features: near "
        "tokens change its logits by {}"
    )
    _compare(model, _tried(model, given(model)), before, reason)


def check_causal(model: PreTrainedModel) -> None:
    """Raise if a token's logits depend on tokens after it."""
    first, second = (_tried(model, given(model, changed=changed))[:, :-1] for changed in (False, True))
    reason = (
        "it is bidirectional, tokens see those after them: changing the last one changes earlier logits by {}"
    )
    _compare(model, first, second, reason)


def check_cache(model: PreTrainedModel) -> None:
    """Raise if a cache changes the logits."""
    arguments = given(model)
    ids, whole = arguments["input_ids"], _tried(model, arguments)
    cache = DynamicCache(config=model.config)
    try:
        parts = [
            logits(model, {"input_ids": part}, past_key_values=cache, use_cache=True)
            for part in (ids[:, :CACHED], ids[:, CACHED:])
        ]
    except Exception as error:
        raise refused(model, f"decoding with a cache fails: {error}") from error
    _compare(model, torch.cat(parts, 1), whole, "decoding with a cache changes its logits by {}")


def check_without_positions(model: PreTrainedModel) -> None:
    """Raise if the logits still depend on positions, though they were switched off."""
    arguments = given(model)
    ids = arguments["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    mask = torch.ones_like(ids)
    first, second = (
        _tried(model, arguments, position_ids=positions * step, attention_mask=mask) for step in (1, 2)
    )
    reason = (
        "its own positions could not be switched off (moving tokens apart changes logits by {}); name the "
        'score processor alone, such as "dape1x3", to keep them'
    )
    _compare(model, first, second, reason)


def _tried(model: PreTrainedModel, arguments: dict[str, Any], **options: Any) -> Tensor:
    try:
        return logits(model, arguments, **options)
    except Exception as error:
        raise refused(model, str(error)) from error


def _compare(model: PreTrainedModel, a: Tensor, b: Tensor, reason: str) -> None:
    """Raise with the reason, which names the largest difference, unless rounding explains it."""
    worst, share = (a - b).abs().max().item(), ROUNDING.get(b.dtype, HALF_ROUNDING)
    if not worst <= share * max(1.0, b.abs().max().item()):
        raise refused(model, reason.format(f"{worst:.2g}"))
