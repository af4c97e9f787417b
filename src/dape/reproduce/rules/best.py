"""Rules on which of several language models is best, from setting to setting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from dape.report.results import Estimate
from dape.reproduce.evidence import Evidence, Finding
from dape.reproduce.folders import Folder
from dape.reproduce.language import Language, Trained
from dape.reproduce.paper import Paper
from dape.reproduce.rules.choosing import Choice, Chosen, models, settings
from dape.reproduce.rules.telling import STEPS, against, lengths_of, ppl, signed


def some_lower(
    folder: Folder,
    _: Paper,
    *,
    methods: Sequence[Choice],
    b: Choice,
    need: str | int = "every",
    **chosen_by: Any,
) -> Evidence:
    """In every setting the best of the methods is better than b."""
    data, chosen, findings = Language.of(folder), Chosen(), []
    for options, length in _fields(data, [*methods, b], chosen, **chosen_by):
        base = options.pop()
        best = min(options, key=lambda one: data.loss(one, length).value)
        gap = data.difference((1, best, length), (-1, base, length))
        findings.append(Finding(-gap.value, gap.error, against(data, best, base, length, gap)))
    return Evidence(findings, chosen.missing, need)


def best_is_not_largest(
    folder: Folder, _: Paper, *, methods: Sequence[Choice], need: str | int = "every", **chosen_by: Any
) -> Evidence:
    """In every setting some method is better than the last one named, the largest."""
    data, chosen, findings = Language.of(folder), Chosen(), []
    for options, length in _fields(data, methods, chosen, **chosen_by):
        largest = options.pop()
        best = min(options, key=lambda one: data.loss(one, length).value)
        gap = data.difference((1, best, length), (-1, largest, length))
        findings.append(Finding(-gap.value, gap.error, against(data, best, largest, length, gap)))
    return Evidence(findings, chosen.missing, need, "settings")


def best_varies(folder: Folder, _: Paper, *, methods: Sequence[Choice], **chosen_by: Any) -> Evidence:
    """Two settings have different best methods, each better than the other one's best in its own setting.

    Two settings with the same best method speak against it, by as much as that method leads in both.
    """
    data, chosen, findings = Language.of(folder), Chosen(), []
    fields = list(_fields(data, methods, chosen, **chosen_by))
    ranked = [sorted(options, key=lambda one: data.loss(one, length).value) for options, length in fields]
    for (first, (_a, at)), (second, (_b, to)) in combinations(zip(ranked, fields, strict=True), 2):
        same = _kind(first[0]) == _kind(second[0])
        rivals = (first[1], second[1]) if same else (_like(second[0], first), _like(first[0], second))
        leads = [
            (data.difference((-1, best, length), (1, rival, length)), best, rival, length)
            for best, rival, length in ((first[0], rivals[0], at), (second[0], rivals[1], to))
        ]
        gap, best, rival, length = min(leads, key=lambda lead: lead[0].value / (lead[0].error or 1e-12))
        text = against(data, best, rival, length, Estimate(-gap.value, gap.error))
        findings.append(Finding(-gap.value if same else gap.value, gap.error, text))
    if len(fields) == 1:
        chosen.lack("a second setting")
    return Evidence(findings, chosen.missing, "some", "pairs of settings")


def _kind(one: Trained) -> tuple[str, str]:
    return one.method, one.variant


def _like(one: Trained, options: Sequence[Trained]) -> Trained:
    return next(option for option in options if _kind(option) == _kind(one))


def _fields(
    data: Language,
    methods: Sequence[Choice],
    chosen: Chosen,
    *,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "longest",
    view: str = STEPS,
) -> list[tuple[list[Trained], int]]:
    """All methods side by side, for every corpus, training length and length read where all of them were run."""
    fields = []
    for place in settings(data, corpus, train, view, chosen):
        found = [models(data, choice, place, view, chosen) for choice in methods]
        if all(found):
            options = [models_[0] for models_ in found]
            fields += [(list(options), length) for length in lengths_of(data, *options, at=at, chosen=chosen)]
    return fields


def best_train_length(
    folder: Folder, _: Paper, *, a: Choice, corpus: Any = None, view: str = STEPS
) -> Evidence:
    """At each of the training lengths, the model trained at it reads better than those trained at another."""
    data, chosen, findings = Language.of(folder), Chosen(), []
    for place in settings(data, corpus, "shortest", view, chosen):
        wanted = {"method": a} if isinstance(a, str) else a
        found = models(data, {**wanted, "train": "all"}, place, view, chosen)
        for one in found:
            for other in (model for model in found if model.train_length != one.train_length):
                length = one.train_length
                if length in data.lengths(one, other):
                    gap = data.difference((1, one, length), (-1, other, length))
                    text = (
                        f"{one.label} read at {length} has perplexity {ppl(data, one, length)} if trained at {length}, "
                        f"{ppl(data, other, length)} if trained at {other.train_length} ({one.corpus}; loss {signed(gap)})"
                    )
                    findings.append(Finding(-gap.value, gap.error, text))
        if len(found) == 1:
            chosen.lack(f"{found[0].label} at a second training length")
    return Evidence(findings, chosen.missing)
