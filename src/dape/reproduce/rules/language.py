"""Rules on language models: losses paired by window, clustered by document, averaged over seeds.

Arguments that rules share: corpus (the paper's names; all that were run by default), train (training lengths),
at (lengths read), view ("equal-step" or "equal-time"). See choosing.py for what they may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dape.reproduce.evidence import Evidence, Finding
from dape.reproduce.folders import Folder
from dape.reproduce.language import Language
from dape.reproduce.paper import Paper
from dape.reproduce.rules.choosing import Choice, Chosen, listed, models, pairs, settings
from dape.reproduce.rules.telling import STEPS, against, lengths_of, ppl, signed, where


def lower(
    folder: Folder,
    _: Paper,
    *,
    a: Choice | None = None,
    b: Any = None,
    among: Sequence[Sequence[Choice]] = (),
    corpus: Any = None,
    train: Any = "all",
    at: Any = "all",
    factor: float = 1.0,
    need: str | int = "every",
    view: str = STEPS,
) -> Evidence:
    """a's perplexity is below b's (each of them), by a factor at least; `among`: several such pairs [a, b].

    A factor below 1 allows a to be that much worse: 0.95 says that a is at most 5 % worse.
    """
    data, chosen, findings = Language.of(folder), Chosen(), []
    if not among and (a is None or b is None):
        raise ValueError("lower compares a with b: give both, or several such pairs as among")
    compared: list[Any] = list(among) or [(a, b)]
    for first, second in compared:
        for one, other in pairs(data, first, second, corpus, train, view, chosen):
            for length in lengths_of(data, one, other, at=at, chosen=chosen):
                gap = data.difference((1, one, length), (-1, other, length))
                value = -gap.value - math.log(factor)
                findings.append(Finding(value, gap.error, against(data, one, other, length, gap)))
    return Evidence(findings, chosen.missing, need)


def near(
    folder: Folder,
    _: Paper,
    *,
    a: Choice,
    b: Any,
    within: float,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "all",
    view: str = STEPS,
) -> Evidence:
    """The perplexities of a and b differ by no more than the factor `within`, either way."""
    data, chosen, findings = Language.of(folder), Chosen(), []
    for one, other in pairs(data, a, b, corpus, train, view, chosen):
        for length in lengths_of(data, one, other, at=at, chosen=chosen):
            gap = data.difference((1, one, length), (-1, other, length))
            value = math.log(within) - abs(gap.value)
            findings.append(Finding(value, gap.error, against(data, one, other, length, gap)))
    return Evidence(findings, chosen.missing)


def falls(folder: Folder, _: Paper, *, a: Any, factor: float = 1.0, **chosen_by: Any) -> Evidence:
    """From the training length to the lengths `at`, perplexity falls, by a factor at least."""
    return _changes(folder, a, -1, factor, **chosen_by)


def rises(folder: Folder, _: Paper, *, a: Any, factor: float = 1.0, **chosen_by: Any) -> Evidence:
    """From the training length (see `Language.start`) to the lengths `at`, perplexity rises, by a factor at least."""
    return _changes(folder, a, 1, factor, **chosen_by)


def _changes(
    folder: Folder,
    a: Any,
    sign: int,
    factor: float,
    *,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "longest",
    need: str | int = "every",
    view: str = STEPS,
) -> Evidence:
    data, chosen, findings, short = Language.of(folder), Chosen(), [], []
    for place in settings(data, corpus, train, view, chosen):
        for one in (model for choice in listed(a) for model in models(data, choice, place, view, chosen)):
            start, lengths = data.start(one), lengths_of(data, one, at=at, chosen=chosen)
            if one.train_length not in data.scores[one]:
                chosen.lack(f"{one.label} at its training length {one.train_length}")
                continue
            if start is None or lengths[-1:] <= [start]:
                short.append(f"{one.label} beyond {start or 2 * data.last} tokens")
                continue
            for length in (n for n in lengths if n > start):
                change = data.difference((1, one, length), (-1, one, start))
                text = (
                    f"{one.label} has perplexity {ppl(data, one, start)} at {start} and {ppl(data, one, length)} at "
                    f"{length} tokens ({one.corpus}; change of the loss {signed(change)})"
                )
                findings.append(Finding(sign * change.value - math.log(factor), change.error, text))
    # A setting whose inputs are too short to tell is left out if others can.
    return Evidence(findings, [*chosen.missing, *([] if findings else short)], need)


def at_most(
    folder: Folder,
    _: Paper,
    *,
    a: Any,
    perplexity: float,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "all",
    view: str = STEPS,
) -> Evidence:
    """The perplexity of a is at most that."""
    data, chosen, findings = Language.of(folder), Chosen(), []
    for place in settings(data, corpus, train, view, chosen):
        for one in (model for choice in listed(a) for model in models(data, choice, place, view, chosen)):
            for length in lengths_of(data, one, at=at, chosen=chosen):
                loss = data.loss(one, length)
                text = (
                    f"{one.label} has perplexity {ppl(data, one, length)} at {length} tokens ({where(one)})"
                )
                findings.append(Finding(math.log(perplexity) - loss.value, loss.error, text))
    return Evidence(findings, chosen.missing)


def ordered(folder: Folder, paper: Paper, *, methods: Sequence[Choice], **chosen_by: Any) -> Evidence:
    """Every method is better than the one named before it."""
    steps = [(after, before) for before, after in pairwise(methods)]
    return lower(folder, paper, among=steps, **chosen_by)


def gain_grows(
    folder: Folder, _: Paper, *, a: Choice, b: Any, corpus: Any = None, train: Any = "all", view: str = STEPS
) -> Evidence:
    """What a gains over b is more at the longest length than at the training length."""
    data, chosen, findings = Language.of(folder), Chosen(), []
    for one, other in pairs(data, a, b, corpus, train, view, chosen):
        lengths = data.lengths(one, other)
        start = data.start(one)
        if start not in lengths or lengths[-1] <= start:
            chosen.lack(f"{one.label} and {other.label} at two lengths")
            continue
        terms = ((1.0, one), (-1.0, other))
        near_, far = (data.difference(*((f, model, n) for f, model in terms)) for n in (start, lengths[-1]))
        growth = data.difference(
            *((f, model, lengths[-1]) for f, model in terms), *((-f, model, start) for f, model in terms)
        )
        text = (
            f"{one.label} minus {other.label}: loss {signed(near_)} at {start} and {signed(far)} at {lengths[-1]} "
            f"tokens ({one.corpus}; difference {signed(growth)})"
        )
        findings.append(Finding(-growth.value, growth.error, text))
    return Evidence(findings, chosen.missing)


def faster_steps(
    folder: Folder,
    _: Paper,
    *,
    a: Choice,
    b: Any,
    factor: float = 1.0,
    corpus: Any = None,
    train: Any = "shortest",
    view: str = STEPS,
) -> Evidence:
    """A training step of a takes less time than one of b, by a factor at least."""
    data, chosen, findings = Language.of(folder), Chosen(), []
    for one, other in pairs(data, a, b, corpus, train, view, chosen):
        fast, slow = data.step_seconds(one), data.step_seconds(other)
        if math.isnan(fast.value) or math.isnan(slow.value):
            chosen.lack(f"times of {one.label} and {other.label}")
            continue
        error = math.hypot(fast.error / fast.value, slow.error / slow.value)
        text = (
            f"{one.label} takes {1e3 * fast.value:.0f} ms for a step at length {one.train_length}, {other.label} "
            f"{1e3 * slow.value:.0f} ms at length {other.train_length} ({one.corpus})"
        )
        findings.append(Finding(math.log(slow.value / fast.value) - math.log(factor), error, text))
    return Evidence(findings, chosen.missing)


def matches_paper(
    folder: Folder,
    paper: Paper,
    *,
    methods: Sequence[str],
    corpus: Any,
    train_length: int,
    lengths: Sequence[int],
    variants: Sequence[str] = ("",),
    within: float = 1.03,
    view: str = STEPS,
) -> Evidence:
    """Perplexities are the paper's, within a factor, wherever it prints one."""
    data, chosen, findings = Language.of(folder), Chosen(), []
    for place in settings(data, corpus, train_length, view, chosen):
        name = data.paper_corpus(place[0])
        for method, variant in ((method, variant) for method in methods for variant in variants):
            about = {"corpus": name, "train_length": train_length, "method": method, "variant": variant}
            printed = {n.get("eval_length"): n.value for n in paper.find("perplexity", **about)}
            for length in (n for n in lengths if n in printed):
                for one in models(data, {"method": method, "variant": variant}, place, view, chosen):
                    loss = data.loss(one, length)
                    value = math.log(within) - abs(loss.value - math.log(printed[length]))
                    text = f"{one.label} {ppl(data, one, length)}, the paper's {printed[length]} ({where(one)}, read at {length})"
                    findings.append(Finding(value, loss.error, text))
    return Evidence(findings, chosen.missing)
