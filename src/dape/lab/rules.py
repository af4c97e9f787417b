"""Rules for claims: from the results of an experiment to evidence.

    def rope_conv_within(data):
        return lower(data, "dape1x3-rope", "rope", at="within")

A rule takes `data` and returns `Evidence`: comparisons with standard errors, and what is missing. `data` has the results
as a frame (`data.frame`) and as losses, accuracies and times; `data.on("hit")` is the same for a slice of the tokens.
A new rule is a function here, or in a paper's claims.py, that returns `data.evidence(findings)`.

Keyword arguments that rules on language models pass on (corpus, train, at, view) are those of dape.lab.selection.
`need` is the number of comparisons that must favour the claim: "every", "some", "most", or a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, TypeVar

import numpy as np

from dape.evaluation.inference import Estimate, VariancePrior, crossed_mean
from dape.lab.accuracies import Solver, has_learned
from dape.lab.evidence import Evidence, Finding, finding
from dape.lab.kinds.maps import measured
from dape.lab.records import STEP, listed
from dape.lab.selection import Choice, Data, Pick, Where, setting_of, trained_on
from dape.lab.stats import Trained, quotient, signed

T = TypeVar("T")


# --- language models


def lower(
    data: Data,
    a: Choice | None = None,
    b: Any = None,
    *,
    pairs: Sequence[tuple[Choice, Any]] = (),
    factor: float = 1.0,
    need: str | int = "every",
    **where: Any,
) -> Evidence:
    """a's perplexity is below b's (each of them), by a factor at least; `pairs`: several such pairs (a, b).

    A factor below 1 allows a to be that much worse: 0.95 says that a is at most 5 % worse.
    """
    scope = Where(**where)
    if not pairs and (a is None or b is None):
        raise ValueError("lower compares a with b: give both, or several such pairs")
    compared: list[tuple[Any, Any]] = list(pairs) or [(a, b)]
    gaps = (gap for first, second in compared for gap in data.gaps(first, second, scope))
    return data.evidence([finding(*gap, sign=-1, beyond=math.log(factor)) for gap in gaps], need)


def ordered(data: Data, methods: Sequence[Choice], **where: Any) -> Evidence:
    """Every method is better than the one named before it."""
    return lower(data, pairs=[(after, before) for before, after in pairwise(methods)], **where)


def near(data: Data, a: Choice, b: Any, *, within: float, **where: Any) -> Evidence:
    """The perplexities of a and b differ by no more than the factor `within`, either way."""
    gaps = list(data.gaps(a, b, Where(**where)))
    room = [replace(gap[0], value=math.log(within) - abs(gap[0].value)) for gap in gaps]
    return data.evidence([finding(left, *gap[1:]) for left, gap in zip(room, gaps, strict=True)])


def falls(data: Data, a: Any, **chosen: Any) -> Evidence:
    """From the training length (see `Losses.start`) to the lengths `at`, perplexity falls, by a factor at least."""
    return _changes(data, a, -1, **chosen)


def rises(data: Data, a: Any, **chosen: Any) -> Evidence:
    """From the training length to the lengths `at`, perplexity rises, by a factor at least."""
    return _changes(data, a, 1, **chosen)


def _changes(
    data: Data, a: Any, sign: int, *, factor: float = 1.0, need: str | int = "every", **where: Any
) -> Evidence:
    scope = Where(**{"at": "longest", **where})
    losses, findings, short = data.losses, [], []
    for one in data.chosen(a, scope):
        start, lengths = losses.start(one), data.lengths(one, at=scope.at)
        if one.train_length not in losses.rows[one]:
            data.lack(f"{one.label} at its training length {one.train_length}")
            continue
        if start is None or lengths[-1:] <= [start]:
            short.append(f"{one.label} beyond {start or 2 * losses.last} tokens")
            continue
        for length in (n for n in lengths if n > start):
            change = losses.difference((1, one, length), (-1, one, start))
            text = (
                f"{one.label} has perplexity {data.ppl(one, start)} at {start} and {data.ppl(one, length)} at "
                f"{length} tokens ({one.corpus}; change of the loss {signed(change)})"
            )
            about = text, setting_of(one), (one.label,)
            findings.append(finding(change, *about, sign=sign, beyond=math.log(factor)))
    # A setting whose inputs are too short to tell is left out if others can.
    data.missing += [] if findings else short
    return data.evidence(findings, need)


def at_most(data: Data, a: Any, perplexity: float, **where: Any) -> Evidence:
    """The perplexity of a is at most `perplexity`."""
    scope, findings = Where(**where), []
    for one in data.chosen(a, scope):
        for length in data.lengths(one, at=scope.at):
            text = (
                f"{one.label} has perplexity {data.ppl(one, length)} at {length} tokens ({trained_on(one)})"
            )
            loss = data.losses.loss(one, length)
            about = text, setting_of(one), (one.label,)
            findings.append(finding(loss, *about, sign=-1, beyond=-math.log(perplexity)))
    return data.evidence(findings)


def some_lower(
    data: Data,
    methods: Sequence[Choice],
    b: Choice,
    *,
    need: str | int = "every",
    unit: str = "comparisons",
    **where: Any,
) -> Evidence:
    """In every setting the best of the methods is better than b."""
    findings = []
    for (*options, base), length in data.fields([*methods, b], Where(**{"at": "longest", **where})):
        best = min(options, key=lambda one: data.losses.loss(one, length).value)
        # Another of the methods may be the best elsewhere: they are pooled as one.
        findings.append(replace(finding(*data.gap(best, base, length), sign=-1), methods=()))
    return data.evidence(findings, need, unit)


def best_varies(data: Data, methods: Sequence[Choice], **where: Any) -> Evidence:
    """Two settings have different best methods, each better than the other one's best in its own setting.

    Two settings with the same best method are against it, by as much as that method leads in both.
    """
    fields = [
        sorted(
            ((one, length) for one in options), key=lambda entry: data.losses.loss(entry[0], entry[1]).value
        )
        for options, length in data.fields(methods, Where(**{"at": "longest", **where}))
    ]

    def lead(one: tuple[Trained, int], other: tuple[Trained, int]) -> Finding:
        return finding(*data.gap(one[0], other[0], one[1]), sign=-1)

    return _best_varies(data, fields, lambda entry: (entry[0].method, entry[0].variant), lead, "setting")


def _best_varies(
    data: Data,
    fields: list[list[T]],
    name: Callable[[T], Any],
    lead: Callable[[T, T], Finding],
    unit: str,
) -> Evidence:
    """fields: competitors in each setting, the best first; lead: of one over another of the same setting."""
    findings = []
    for first, second in combinations(fields, 2):
        same = name(first[0]) == name(second[0])
        rivals = (
            (first[1], second[1])
            if same
            else (
                next(one for one in first if name(one) == name(second[0])),
                next(one for one in second if name(one) == name(first[0])),
            )
        )
        leads = [lead(first[0], rivals[0]), lead(second[0], rivals[1])]
        least = min(leads, key=lambda finding: finding.value / (finding.error or 1e-12))
        findings.append(replace(least, value=-least.value) if same else least)
    if len(fields) == 1:
        data.lack(f"a second {unit}")
    return data.evidence(findings, "some", f"pairs of {unit}s")


def best_train_length(data: Data, a: Choice, **where: Any) -> Evidence:
    """At each of the training lengths, the model trained at it is better than those trained at another."""
    findings = []
    pick = replace(Pick(a) if isinstance(a, str) else a, train="all")
    for setting in data.settings(Where(**{"train": "shortest", **where})):
        models = data.models(pick, setting, where.get("view", STEP))
        for one in models:
            for other in models:
                if one is not other and one.train_length in data.losses.lengths(one, other):
                    findings.append(finding(*data.gap(one, other, one.train_length), sign=-1))
        if len(models) == 1:
            data.lack(f"{models[0].label} at a second training length")
    return data.evidence(findings)


def gain_grows(data: Data, a: Choice, b: Any, **where: Any) -> Evidence:
    """The gain of a over b is larger at the longest length than at the training length."""
    losses, findings = data.losses, []
    for one, other in data.pairs(a, b, Where(**where)):
        lengths, start = losses.lengths(one, other), losses.start(one)
        if start not in lengths or lengths[-1] <= start:
            data.lack(f"{one.label} and {other.label} at two lengths")
            continue
        terms = ((1.0, one), (-1.0, other))
        near_, far = (losses.difference(*((f, model, n) for f, model in terms)) for n in (start, lengths[-1]))
        growth = losses.difference(
            *((f, model, lengths[-1]) for f, model in terms), *((-f, model, start) for f, model in terms)
        )
        text = (
            f"{one.label} minus {other.label}: loss {signed(near_)} at {start} and {signed(far)} at {lengths[-1]} "
            f"tokens ({one.corpus}; difference {signed(growth)})"
        )
        findings.append(finding(growth, text, setting_of(one, other), (one.label, other.label), sign=-1))
    return data.evidence(findings)


def gain_is_recall(data: Data, a: Choice, b: Any, *, share: float = 0.5, **where: Any) -> Evidence:
    """More than `share` of the gain of a over b, summed over tokens, is on recall hits."""
    scope, hits, others = Where(**where), data.on("hit"), data.on("other")
    findings = []
    for one, other in hits.pairs(a, b, scope):
        for length in hits.lengths(one, other, at=scope.at):
            parts, seeds = [], sorted({*hits.losses.seeds(one)} & {*hits.losses.seeds(other)})
            for seed in seeds:
                (gain, hit), (rest, more) = (
                    part.losses.by_document(
                        (-1, 1), [part.losses.rows[t][length][seed] for t in (one, other)], one.corpus
                    )
                    for part in (hits, others)
                )
                parts.append((gain, rest, hit + more, hit))
            gain, rest, tokens, hit = (np.stack(values) for values in zip(*parts, strict=True))
            prior = data.losses.seed_prior((1, one, length), (-1, other, length))
            if prior is not None:
                # Of the gain as a whole; each part counts by its factor at most.
                prior = VariancePrior(prior.variance * max(share, 1 - share) ** 2, prior.dof)
            lead = crossed_mean((1 - share) * gain - share * rest, tokens[0], seeds=prior)
            total = (gain + rest).sum()
            text = (
                f"{one.label} gains {total / tokens.sum():.3f} nats a token over {other.label}, "
                f"{100 * gain.sum() / total:.0f} % of it on the {100 * hit.sum() / tokens.sum():.0f} % of tokens that "
                f"recall could copy ({trained_on(one)}, evaluated at {length}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''})"
            )
            findings.append(finding(lead, text, setting_of(one, other), (one.label, other.label)))
    return data.evidence(findings)


def gains_more_on_hits(data: Data, a: Choice, b: Any, **where: Any) -> Evidence:
    """The gain of a over b per token is larger on recall hits than on all other tokens."""
    scope, hits, others = Where(**where), data.on("hit"), data.on("other")
    findings = []
    for one, other in hits.pairs(a, b, scope):
        for length in hits.lengths(one, other, at=scope.at):
            terms = (-1.0, one, length), (1.0, other, length)
            on_hits, elsewhere = (part.losses.difference(*terms) for part in (hits, others))
            # Both vary with the same documents and seeds: as if independent, the error is too large rather than too small.
            error = math.hypot(on_hits.error, elsewhere.error)
            lead = Estimate(on_hits.value - elsewhere.value, error, min(on_hits.dof, elsewhere.dof))
            text = (
                f"{one.label} gains {signed(on_hits)} nats a token over {other.label} on recall hits, "
                f"{signed(elsewhere)} on other tokens ({trained_on(one)}, evaluated at {length})"
            )
            findings.append(finding(lead, text, setting_of(one, other), (one.label, other.label)))
    return data.evidence(findings)


def recalls_more(data: Data, a: Choice, b: Any, **where: Any) -> Evidence:
    """On tokens that recall can copy only beyond the training length, the loss of a falls more than that of b."""
    changes, findings = data.on("new", "change"), []
    scope = Where(**{"at": "beyond", **where})
    for one, other in changes.pairs(a, b, scope):
        for length in changes.lengths(one, other, at=scope.at):
            gap = changes.losses.difference((1, one, length), (-1, other, length))
            own = [signed(Estimate(changes.losses.loss(model, length).value)) for model in (one, other)]
            text = (
                f"on tokens that can be copied only beyond {one.train_length} tokens, the loss of {one.label} changes by "
                f"{own[0]}, that of {other.label} by {own[1]} ({one.corpus}, evaluated at {length}; difference {signed(gap)})"
            )
            findings.append(finding(gap, text, setting_of(one, other), (one.label, other.label), sign=-1))
    return data.evidence(findings)


def matches_paper(
    data: Data,
    methods: Sequence[str],
    *,
    corpus: Any,
    train_length: int,
    lengths: Sequence[int],
    variants: Sequence[str] = ("",),
    within: float = 1.03,
) -> Evidence:
    """Perplexities agree with the paper's within a factor, wherever it prints one."""
    findings: list[Finding] = []
    if data.folder.best is not None and data.folder.best.get("printed"):
        # The paper's numbers agree with themselves.
        data.lack("a training")
        return data.evidence(findings)
    for setting in data.settings(Where(corpus, train_length)):
        name = data.losses.paper_corpus(setting.corpus)
        for method, variant in ((method, variant) for method in methods for variant in variants):
            about = {"corpus": name, "train_length": train_length, "method": method, "variant": variant}
            printed = {n.get("eval_length"): n.value for n in data.paper.find("perplexity", **about)}
            for length in (n for n in lengths if n in printed):
                for one in data.models(Pick(method, variant), setting, STEP):
                    loss = data.losses.loss(one, length)
                    off = replace(loss, value=abs(loss.value - math.log(printed[length])))
                    text = f"{one.label} {data.ppl(one, length)}, the paper's {printed[length]} ({trained_on(one)}, evaluated at {length})"
                    scope = text, setting_of(one), (one.label,)
                    findings.append(finding(off, *scope, sign=-1, beyond=-math.log(within)))
    return data.evidence(findings)


# --- tasks: mean accuracy over the tested lengths and over seeds; tasks and layers: all by default


def more_accurate(
    data: Data, a: str, b: Any, *, tasks: Any = None, layers: Any = None, need: str | int = "every"
) -> Evidence:
    """On every task, or on `need` of them, a is more accurate than b."""
    findings = []
    for one in _solvers(data, a, tasks, layers):
        for method in listed(b):
            other = one._replace(method=method)
            if other not in data.accuracies.rows:
                data.lack(f"{other.label} on {one.task}")
                continue
            findings.append(_lead(data, one, other))
    return data.evidence(findings, need, "tasks" if len(listed(b)) == 1 else "comparisons")


def accuracy_bound(
    data: Data, a: Any, *, least: float, tasks: Any = None, layers: Any = None, at: Any = "all"
) -> Evidence:
    """The accuracy of a is at least `least`, at every length `at` ("all", "longest", or lengths)."""
    findings = []
    for method in listed(a):
        for one in _solvers(data, method, tasks, layers):
            lengths = data.accuracies.lengths(one)
            wanted = {"all": lengths, "longest": lengths[-1:]}.get(at) if isinstance(at, str) else listed(at)
            for length in wanted or ():
                share = data.accuracies.accuracy(one, [length])
                if not share.known:
                    data.lack(f"{one.label} on {one.task} at length {length}")
                    continue
                text = f"{one.label} gives {percent(share)} right answers at length {length} ({one.task})"
                about = text, (one.task, one.layers), (one.label,)
                findings.append(finding(share, *about, beyond=least))
    return data.evidence(findings)


def best_varies_by_task(
    data: Data, methods: Sequence[str], *, tasks: Any = None, layers: Any = None
) -> Evidence:
    """Two tasks have different best methods, each better than the other one's best in its own task."""
    fields = _task_fields(data, methods, tasks, layers)
    return _best_varies(data, fields, lambda one: one.method, lambda a, b: _lead(data, a, b), "task")


def best_is_among(
    data: Data,
    methods: Sequence[str],
    others: Sequence[str],
    *,
    tasks: Any = None,
    layers: Any = None,
    need: str | int = "every",
) -> Evidence:
    """On every task, or on `need` of them, the best of the methods is more accurate than the best of the others."""
    findings = []
    for solvers in _task_fields(data, [*methods, *others], tasks, layers):
        best, rival = (next(one for one in solvers if one.method in group) for group in (methods, others))
        findings.append(replace(_lead(data, best, rival), methods=()))
    return data.evidence(findings, need, "tasks")


def _task_fields(data: Data, methods: Sequence[str], tasks: Any, layers: Any) -> list[list[Solver]]:
    """The methods on each task where all of them were run, the best first."""
    fields = []
    for one in _solvers(data, methods[0], tasks, layers):
        solvers = [one._replace(method=method) for method in methods]
        if absent := [other.label for other in solvers if other not in data.accuracies.rows]:
            data.lack(f"{', '.join(absent)} on {one.task}")
        else:
            fields.append(sorted(solvers, key=lambda solver: -data.accuracies.accuracy(solver).value))
    return fields


def _solvers(data: Data, method: str, tasks: Any, layers: Any) -> list[Solver]:
    """The method on the tasks of the claim."""
    solvers = []
    for task in data.accuracies.tasks() if tasks is None else listed(tasks):
        depths = data.accuracies.layers(task) if layers is None else listed(layers)
        mine = [
            s for s in data.accuracies.rows if (s.task, s.method) == (task, method) and s.layers in depths
        ]
        if not mine:
            data.lack(f"{method} on {task}")
        solvers += mine
    return solvers


def _lead(data: Data, one: Solver, other: Solver) -> Finding:
    """Difference in accuracy, on the same samples if those are known."""
    first, second = data.accuracies.accuracy(one), data.accuracies.accuracy(other)
    unlearned = not (has_learned(one.task, first) or has_learned(other.task, second))
    text = f"{one.label} {percent(first)}, {other.label} {percent(second)} ({one.task}{', neither learned' * unlearned})"
    about = text, (one.task, one.layers), (one.label, other.label)
    return finding(data.accuracies.difference(one, other), *about)


def percent(estimate: Estimate, digits: int = 1) -> str:
    error = f" ± {100 * estimate.error:.{digits}f}" if math.isfinite(estimate.error) else ""
    return f"{100 * estimate.value:.{digits}f}{error} %"


# --- times, each compared within one interleaved measurement, and maps


def slower(data: Data, a: str, b: Any, *, sizes: Any = None, factor: float = 1.0) -> Evidence:
    """A step of a takes longer than one of b, by a factor at least, at every size."""
    findings = []
    for method in listed(b):
        for setup in _setups(data, a, method, sizes):
            ratio = data.times.ratio(setup, a, method)
            one, other = data.times.times[setup][a], data.times.times[setup][method]
            text = (
                f"{a} takes {one.value:.1f} ms and {method} {other.value:.1f} ms at {data.times.name_of(setup)} "
                f"({_ratio(ratio)} times)"
            )
            findings.append(finding(ratio, text, setup, (a, method), beyond=factor))
    return data.evidence(findings)


def overhead_falls(data: Data, a: str, b: str, *, sizes: Any = None) -> Evidence:
    """The time of a over the time of b is less for each larger size; sizes in the order of b's times."""
    findings = []
    setups = sorted(_setups(data, a, b, sizes), key=lambda setup: data.times.times[setup][b].value)
    for length in dict.fromkeys(length for _, length in setups):
        for small, large in pairwise(setup for setup in setups if setup[1] == length):
            before, after = data.times.ratio(small, a, b), data.times.ratio(large, a, b)
            text = (
                f"{a} takes {_ratio(before)} times as long as {b} at {small[0]}, "
                f"{_ratio(after)} times at {large[0]}"
            )
            error = math.hypot(before.error, after.error)
            findings.append(Finding(before.value - after.value, error, text, setting=length))
    if setups and not findings:
        data.lack("a second size")
    return data.evidence(findings)


def slower_when_longer(data: Data, a: str, *, times: int, factor: float = 1.0) -> Evidence:
    """A step of a at `times` the shortest length takes longer than one at that, by a factor at least."""
    known, findings = data.times, []
    for size in dict.fromkeys(size for size, _ in known.times):
        lengths = [length for name, length in known.times if name == size and a in known.times[name, length]]
        short = min(lengths, default=0)
        if short * times not in lengths:
            data.lack(f"{a} at {times} times the shortest length")
            continue
        few, many = (size, short), (size, short * times)
        ratio = quotient(known.ratios[many][a], known.ratios[few][a])
        text = (
            f"{a} takes {known.times[few][a].value:.1f} ms for a step at length {few[1]} and "
            f"{known.times[many][a].value:.1f} ms at {many[1]} ({_ratio(ratio)} times{f', {size}' if size else ''})"
        )
        findings.append(finding(ratio, text, size, beyond=factor))
    if not known.times:
        data.lack(a)
    return data.evidence(findings)


def _setups(data: Data, a: str, b: str, sizes: Any) -> list[tuple[str, int]]:
    """Sizes and lengths where both were timed."""
    wanted, known = None if sizes is None else listed(sizes), data.times.times
    for size in wanted or ():
        if all(name != size for name, _ in known):
            data.lack(f"size {size}")
    setups = [setup for setup in known if wanted is None or setup[0] in wanted]
    for name in (a, b):
        if not any(name in known[setup] for setup in setups):
            data.lack(name)
    return [setup for setup in setups if {a, b} <= set(known[setup])]


def _ratio(ratio: Estimate) -> str:
    return f"{ratio.value:.3f}" + (f" ± {ratio.error:.3f}" if math.isfinite(ratio.error) else "")


def sink_higher(data: Data, a: str, b: str) -> Evidence:
    """More of the weight goes to the first token in a than in b, at every length."""
    shares, findings = measured(data.folder.best, "sink_share"), []
    for method in (a, b):
        if all(name != method for name, _ in shares):
            data.lack(method)
    for length in sorted({length for _, length in shares}):
        if (a, length) in shares and (b, length) in shares:
            one, other = shares[a, length], shares[b, length]
            text = f"{a} gives the first of {length} tokens {percent(one, 3)} of the weight, {b} {percent(other, 3)}"
            error = math.hypot(one.error, other.error)
            findings.append(Finding(one.value - other.value, error, text, min(one.dof, other.dof)))
    return data.evidence(findings)
