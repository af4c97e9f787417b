"""What a retrofit gained, from the table of results: rows, sentences and a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from dape.evaluation.statistics import Estimate, perplexity
from dape.evaluation.table import ALL, Term, contrast, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE, TRAINED_ON, UNTRAINED = "base", "base trained on", ", untrained"
# Slice of the key tokens: see KEY_GAIN in dape.evaluation.by_length.
KEY = "key"


@dataclass(frozen=True)
class Report:
    """Losses of a base, of what it became, and of what stands beside it, as rows of the table of results.

    A method of the table is "base", "base trained on", a method that the base's weights are read with as they are
    ("rope[…], untrained"), or a retrofit.
    """

    table: pd.DataFrame

    @property
    def window(self) -> int:
        """Tokens that the base was made for."""
        return int(self.table["train_length"].iloc[0])

    @cached_property
    def methods(self) -> list[str]:
        return list(self.table["method"].unique())

    @property
    def retrofits(self) -> list[str]:
        """Retrofits, the one with the lowest loss at the longest input last."""
        own = [m for m in self.methods if m not in (BASE, TRAINED_ON) and not m.endswith(UNTRAINED)]
        return sorted(own, key=lambda m: -self.loss(m, self.lengths[-1]).value)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of input, from the window on."""
        return sorted(int(n) for n in self.table["length"].unique() if n >= self.window)

    @property
    def control(self) -> str:
        """What a retrofit must beat, cut to the window: the base trained on for as long, or without it the base."""
        return TRAINED_ON if TRAINED_ON in self.methods else BASE

    def loss(self, method: str, length: int, tokens: str = ALL) -> Estimate:
        return mean(self.table, method, length, slices=(tokens,))

    def gain(self, method: str, length: int, *, over: str | None = None, tokens: str = ALL) -> Estimate:
        """Loss of `over`, by default the control, cut to the window, minus that of the method at `length`."""
        terms = [Term(1, over or self.control, self.window), Term(-1, method, length)]
        return contrast(self.table, terms, slices=(tokens,))

    def uses_context(self) -> Estimate:
        """Loss of the base with half of its window minus its loss with all of it."""
        terms = [Term(1, BASE, self.window // 2), Term(-1, BASE, self.window)]
        # The base is the same for every seed.
        return contrast(self.table[self.table["seed"] == self.table["seed"].min()], terms)

    def key_share(self) -> float:
        """Share of key tokens among the targets."""
        rows = self.table[(self.table["method"] == BASE) & (self.table["length"] == self.window)]
        counts = rows.groupby("slice")["count"].sum()
        return float(counts.get(KEY, 0) / counts[ALL])

    def seeds(self, method: str) -> int:
        return int(self.table[self.table["method"] == method]["seed"].nunique())

    def rows(self) -> list[tuple[str, list[str]]]:
        """The table's rows as text: a label, and a cell for each length."""
        cut = [self.window] * len(self.lengths)
        rows = [(f"base, cut to {self.window}", self._perplexities(BASE, cut))]
        if self.control != BASE:
            rows.append((f"{self.control}, cut to {self.window}", self._perplexities(self.control, cut)))
        rows.append((BASE, self._perplexities(BASE, self.lengths)))
        others = [m for m in self.methods if m.endswith(UNTRAINED)]
        rows += [(m, self._perplexities(m, self.lengths)) for m in (*others, *self.retrofits)]
        for method in self.retrofits[-1:]:
            gains = [self.gain(method, n) for n in self.lengths]
            rows.append((f"loss − {self.control}, cut", [_change(gain) for gain in gains]))
            if self.key_share():
                gains = [self.gain(method, n, tokens=KEY) for n in self.lengths]
                rows.append(
                    (f"… on key tokens ({100 * self.key_share():.0f} %)", [_change(g) for g in gains])
                )
        return rows

    def _perplexities(self, method: str, lengths: list[int]) -> list[str]:
        losses = [self.loss(method, n) for n in lengths]
        return [f"{perplexity(loss.value):.2f}" if loss.known else "–" for loss in losses]

    def sentences(self) -> list[str]:
        """What the numbers say: the base's use of its context, and the gain over the control."""
        parts = {n: self.loss(BASE, n).value for n in (self.window // 4, self.window // 2, self.window)}
        trail = ", ".join(f"{loss:.3f} with {n}" for n, loss in parts.items())
        used = self.uses_context()
        said = [f"The base's loss is {trail} tokens of input."]
        if not used.sign > 0:
            said.append(
                f"It makes no measurable use of the later half of its window ({_change(used)}): on this text a "
                "longer input has little to give, and a flat curve would show nothing."
            )
        if not self.retrofits:
            return said
        best, longest = self.retrofits[-1], self.lengths[-1]
        gain = self.gain(best, longest)
        trained = " for as many steps" if self.control == TRAINED_ON else ""
        rival = f"the {self.control}{trained}, cut to {self.window}"
        seeds = "one seed, interval over documents" if gain.seeds == 1 else f"{gain.seeds} seeds"
        if gain.sign:
            word = "below" if gain.value > 0 else "above"
            said.append(
                f"At {longest} tokens the loss of {best} is {abs(gain.value):.3f} ± {_reach(gain):.3f} {word} that of "
                f"{rival} ({100 * math.expm1(-gain.value):+.0f} % perplexity; {seeds})."
            )
        else:
            said.append(f"At {longest} tokens {best} and {rival} are not apart ({_change(gain)}; {seeds}).")
        if self.control == BASE:
            said.append("How much of this is the training itself, a run with --control shows.")
        return said

    def rich(self) -> Any:
        """The rows as a rich table of perplexities, and paired differences of the loss."""
        from rich.table import Table

        drawn = Table("perplexity at", *map(str, self.lengths), box=None, pad_edge=False)
        for column in drawn.columns[1:]:
            column.justify = "right"
        for label, cells in self.rows():
            drawn.add_row(label, *cells, style="bold" if label in self.retrofits else "")
        return drawn

    def markdown(self) -> str:
        """The rows as a table of Markdown."""
        lines = [["perplexity at", *map(str, self.lengths)], ["---", *["---:"] * len(self.lengths)]]
        lines += [[f"`{label}`" if label in self.methods else label, *cells] for label, cells in self.rows()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def figure(self) -> Figure:
        """Perplexity by length: the base and the retrofits, and the best use of the base's own window as a line."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for method in (BASE, *self.retrofits):
            known = [n for n in self.lengths if self.loss(method, n).known]
            values = [perplexity(self.loss(method, n).value) for n in known]
            axes.plot(known, values, marker="o", label=method)
        for method in dict.fromkeys((BASE, self.control)):
            value = perplexity(self.loss(method, self.window).value)
            style = ":" if method == BASE else "--"
            axes.axhline(value, linestyle=style, color="gray", label=f"{method}, cut to {self.window}")
        axes.set(xscale="log", yscale="log", xlabel="tokens of input", ylabel="perplexity")
        axes.set_xticks(self.lengths, map(str, self.lengths), minor=False)
        axes.minorticks_off()
        axes.legend(frameon=False)
        return figure


def _reach(estimate: Estimate) -> float:
    """Half the width of the 95 % interval."""
    return (estimate.high - estimate.low) / 2


def _change(gain: Estimate) -> str:
    if not gain.known:
        return "–"
    return f"{-gain.value:+.2f} ± {_reach(gain):.2f}" if math.isfinite(gain.low) else f"{-gain.value:+.2f}"
