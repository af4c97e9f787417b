"""Talking heads (Shazeer et al. 2020): heads mixed linearly before and after the softmax."""

from __future__ import annotations

from dape.ops.score_attention import ScoreProgram
from dape.scores.base import ScoreProcessor, linear_stage
from dape.scores.keyconv import identity_conv


class TalkingHeads(ScoreProcessor):
    """Logits W₁ S + B, weights W₂ softmax(logits), W₁ and W₂ [H, H] across heads. Starts as the identity.

    before, after: whether heads mix before, and after, the softmax.
    """

    summary = "heads mixed linearly before and after the softmax"
    reference = "Shazeer et al. 2020, arXiv 2003.02436"

    def __init__(self, num_heads: int, *, before: bool = True, after: bool = True) -> None:
        super().__init__()
        if not (before or after):
            raise ValueError("before=False and after=False leave the scores as they are: use plain scores")
        self.before = identity_conv(num_heads, (1, 1), 1, 0) if before else None
        self.after = identity_conv(num_heads, (1, 1), 1, 0) if after else None

    def program(self) -> ScoreProgram:
        pre = linear_stage(self.before)
        return ScoreProgram(pre, linear_stage(self.after), "bias" if pre else "scores+bias")
