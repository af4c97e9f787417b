"""What rules on language models say of a comparison."""

from __future__ import annotations

import math
from typing import Any

from dape.report.results import Estimate
from dape.report.table import number
from dape.reproduce.language import Language, Trained
from dape.reproduce.rules.choosing import Chosen, eval_lengths

STEPS = "equal-step"


def lengths_of(data: Language, *trained: Trained, at: Any, chosen: Chosen) -> list[int]:
    """The lengths that the claim speaks of, of those that all were read at."""
    found = eval_lengths(data.lengths(*trained), trained[0].train_length, at)
    if not found:
        chosen.lack(f"{trained[0].label} at {at}")
    return found


def against(data: Language, one: Trained, other: Trained, length: int, gap: Estimate) -> str:
    trained = {one.train_length, other.train_length}
    both = len(trained) == 1
    names = [f"{t.label}{'' if both else f' trained at {t.train_length}'}" for t in (one, other)]
    place = f"{where(one)}, read at {length}" if both else f"{one.corpus}, read at {length}"
    seeds = len({*data.seeds(one)} & {*data.seeds(other)})
    return (
        f"{names[0]} has perplexity {ppl(data, one, length)}, {names[1]} {ppl(data, other, length)} "
        f"({place}; loss {signed(gap)}, {seeds} seed{'s' if seeds > 1 else ''})"
    )


def where(one: Trained) -> str:
    return f"{one.corpus}, trained at {one.train_length}"


def ppl(data: Language, one: Trained, length: int) -> str:
    loss = data.loss(one, length).value
    return number(math.exp(loss)) if loss < 700 else "inf"


def signed(estimate: Estimate) -> str:
    error = f" ± {estimate.error:.3f}" if math.isfinite(estimate.error) else ""
    return f"{estimate.value:+.3f}{error}".replace("-", "−")
