"""Support of the score image and hidden maps: which entries are zero at the edges of visibility.

A row depends on its visible keys alone. To the right of a causal query's last visible key the hidden maps go on,
computed from zeros; to the left of the first visible key they are zero. Without causality they are zero on both
sides. A row that sees nothing is zero everywhere.

A kernel of kq rows lets row i read rows i − kq + 1 … i. Of these, row i reads as zeros those whose own key it does not
see (padding, another document) and those before the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.types import EVERYTHING, Problem, Visible


@dataclass(frozen=True)
class Edges:
    """Visibility of a call, or of a tile of its rows.

    first, last: [B or 1, Tq], the keys that each query sees.
    last_read:   [B or 1, Tq], the last key in the image; `last`, unless the future leaks.
    last_hidden: [B or 1, Tq], the last column of the hidden maps, or None if they go on.
    earlier:     [B or 1, Tq], number of rows before its own that each row may read; None for all.
    hides_hidden: whether a hidden map has columns to set to zero; False where every row begins at the first key.
    """

    first: Tensor
    last: Tensor
    last_read: Tensor
    last_hidden: Tensor | None
    earlier: Tensor | None
    num_keys: int
    hides_hidden: bool

    @classmethod
    def of(
        cls,
        visible: Visible,
        num_queries: int,
        num_keys: int,
        *,
        causal: bool,
        leak_future: bool = False,
        device: torch.device,
    ) -> Edges:
        sizes = (num_queries, num_keys)
        first, last = visible.bounds(*sizes, causal=causal, device=device)
        last_read, last_hidden = last, None if causal else last
        if leak_future:
            last_read = visible.bounds(*sizes, causal=False, device=device)[1]
            last_hidden = torch.full_like(last, num_keys - 1)
        # If every query sees the first key, it may read all rows before it.
        earlier = None if visible.first is None else visible.readable_rows(*sizes, device=device)
        hides_hidden = last_hidden is not None or visible != EVERYTHING
        return cls(first, last, last_read, last_hidden, earlier, num_keys, hides_hidden)

    @classmethod
    def of_call(cls, problem: Problem) -> Edges:
        """The edges of a whole call."""
        (_, _, *sizes, _), leaks, device = problem.sizes, problem.program.leak_future, problem.q.device
        return cls.of(problem.visible, *sizes, causal=problem.causal, leak_future=leaks, device=device)

    def tile(self, entries: slice, rows: slice, num_keys: int) -> Edges:
        """The edges of some rows of some batch entries, for the first `num_keys` keys."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else (x if x.shape[0] == 1 else x[entries])[:, rows]

        first, last, last_read = (cut(x) for x in (self.first, self.last, self.last_read))
        assert first is not None and last is not None and last_read is not None
        hidden, earlier = cut(self.last_hidden), cut(self.earlier)
        return Edges(first, last, last_read, hidden, earlier, num_keys, self.hides_hidden)

    @property
    def shown(self) -> Tensor:
        """visible(i, j) as booleans [B or 1, 1, Tq, Tk]."""
        return self._between(self.last, self.num_keys)

    @property
    def num_visible(self) -> Tensor:
        """Number of keys that each query sees, [B or 1, Tq]."""
        return (self.last - self.first + 1).clamp(min=0)

    def image(self, x: Tensor) -> Tensor:
        """An image [B, C, Tq, Tk], set to zero where it may not be read."""
        return x.masked_fill(~self._between(self.last_read, x.shape[-1]), 0.0)

    def hidden(self, x: Tensor) -> Tensor:
        """A hidden map [B, C, Tq, n], n at least Tk, set to zero outside its columns."""
        if not self.hides_hidden:
            return x
        inside = self._between(self.last_hidden, x.shape[-1]) & (self.first <= self.last)[:, None, :, None]
        return x.masked_fill(~inside, 0.0)

    def rows_before(self, x: Tensor, distance: int) -> Tensor:
        """x [B, C, Tq, n] with each row replaced by the row `distance` before, zero where that may not be read."""
        if distance == 0:
            return x
        moved = F.pad(x, (0, 0, distance, 0))[:, :, : x.shape[2]]
        if self.earlier is None:
            return moved
        return moved.masked_fill((self.earlier < distance)[:, None, :, None], 0.0)

    def _between(self, last: Tensor | None, num_columns: int) -> Tensor:
        column = torch.arange(num_columns, device=self.first.device)
        inside = column >= self.first[..., None]
        return (inside if last is None else inside & (column <= last[..., None]))[:, None]
