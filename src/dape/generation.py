"""Text generation: a streamer for our tokenizers, and sampling through transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dape.data import Tokenizer

# Replacement character for bytes that are not, or not yet, a character.
UNFINISHED = "\ufffd"


class TextStreamer(BaseStreamer):
    """Streams text token by token, in whole characters.

    A token is decoded together with those before it, because decoders treat the first token of a text differently,
    and held back while its last character is incomplete.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        self._context = self._written = 0
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompt first, then with each token."""
        self.ids += value.flatten().tolist()
        if self._prompt_seen:
            self._emit(final=False)
        else:
            self._prompt_seen = True
            self._context, self._written = max(0, len(self.ids) - 8), len(self.ids)

    def end(self) -> None:
        self._emit(final=True)

    def _emit(self, *, final: bool) -> None:
        before = self.tokenizer.decode(self.ids[self._context : self._written])
        now = self.tokenizer.decode(self.ids[self._context :])
        if len(now) > len(before) and (final or not now.endswith(UNFINISHED)):
            self.write(now[len(before) :])
            self._context, self._written = self._written, len(self.ids)


@torch.no_grad()
def generate_text(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    write: Callable[[str], object] | None = None,
) -> str:
    """Generate `tokens` tokens after a prompt; `write` is called with the text as it is generated.

    temperature: 0 for greedy decoding. seed: None for a different sample at every call.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty")
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    inputs = torch.tensor([ids], device=model.device)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        produced = model.generate(  # type: ignore[operator]  # of transformers, untyped
            inputs,
            attention_mask=torch.ones_like(inputs),
            # Special tokens are set for other tools; our training texts do not end with one.
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            use_cache=model.config.use_cache,
            streamer=TextStreamer(tokenizer, write) if write else None,
            **sampling,
        )
    return tokenizer.decode(produced[0, len(ids) :].tolist())
