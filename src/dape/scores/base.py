"""What a score processor is: it owns parameters and computes attention from q, k, v and a bias."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from dape.ops.score_attention import Bias, ConvWeights, Visible, attention
from dape.ops.score_attention.reference import process_scores
from dape.ops.score_attention.types import EVERYTHING


class ScoreProcessor(nn.Module):
    """What happens to q·k before the softmax. Override `weights`; None leaves the scores as they are."""

    summary: ClassVar[str] = ""

    def reset_parameters(self) -> None:
        """Draw the parameters anew, by functions of torch.nn.init alone."""

    def weights(self) -> ConvWeights | None:
        return None

    @property
    def earlier_rows(self) -> int:
        """How many queries before its own a row depends on; where there are any, chunks must bring them along."""
        return 0

    def forward(
        self,
        scores: Tensor,
        bias: Tensor | None = None,
        *,
        causal: bool = True,
        visible: Visible | None = None,
    ) -> Tensor:
        """Processed scores [B, H, Tq, Tk], ready for the softmax: −∞ where not visible.

        scores: [B, H, Tq, Tk], already scaled; bias: [1 or B, H, Tq, Tk] or None.
        """
        if scores.dim() != 4:
            raise ValueError(
                f"scores have shape {tuple(scores.shape)}, expected [batch, heads, queries, keys]"
            )
        if bias is not None and (
            bias.shape[0] not in (1, scores.shape[0]) or bias.shape[1:] != scores.shape[1:]
        ):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, expected {(1, *scores.shape[1:])} or {tuple(scores.shape)}"
            )
        self.check(scores.shape[1], has_bias=bias is not None)
        return process_scores(scores, bias, self.weights(), visible or EVERYTHING, causal=causal)

    def check(self, num_heads: int, *, has_bias: bool) -> None:
        """Raise if this processor was built for other channels."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Bias = None,
        causal: bool = True,
        visible: Visible | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> Tensor:
        """The whole attention, [B, H, Tq, D], never T×T in memory; arguments as in attention."""
        return attention(
            q,
            k,
            v,
            self.weights(),
            bias=bias,
            causal=causal,
            visible=visible,
            scale=scale,
            dropout=dropout,
            backend=backend,
        )
