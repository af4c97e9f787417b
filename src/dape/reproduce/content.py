"""What an experiment shows: its tables by kind, ours beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dape.report.style import times
from dape.reproduce.folders import Folder
from dape.reproduce.language import Language
from dape.reproduce.panels import Line, Panel, our_panels, paper_panels, partner
from dape.reproduce.paper import Paper
from dape.reproduce.rules.maps import measured
from dape.reproduce.rules.tasks import Solver, Tasks, has_learned
from dape.reproduce.rules.timing import Timing
from dape.reproduce.tables import OURS, PAPER, Cell, Row, Table, joined, perplexity, plain, signed

# With more tasks than this, tasks are rows and methods columns; with more columns than that, errors are left out.
FEW_TASKS, FEW_COLUMNS = 3, 6


def tables(folder: Folder, paper: Paper) -> list[Table]:
    """The tables of an experiment; those of the paper alone if it has no results yet."""
    kind = (folder.best or {}).get("kind", folder.kind)
    return KINDS[kind](folder, paper) if kind in KINDS else []


def language(folder: Folder, paper: Paper) -> list[Table]:
    """Perplexity by length, a table for each panel, the paper's curve under ours; then what the paper has alone."""
    ours, theirs = our_panels(folder), paper_panels(folder, paper)
    found = [_panel_table(panel, partner(panel, theirs)) for panel in ours]
    keys = {panel.key for panel in ours}
    found += [_panel_table(panel, None, whose=PAPER) for panel in theirs if panel.key not in keys]
    return found + _step_table(folder, paper)


def _panel_table(panel: Panel, other: Panel | None, whose: str = OURS) -> Table:
    columns = sorted({*panel.columns(), *(other.columns() if other else ())})
    best = {column: _best(panel, column) for column in columns}
    changes = whose == OURS and any(math.isfinite(line.change.value) for line in panel.lines)
    theirs = {line.label: line for line in other.lines} if other else {}
    rows = []
    for line in panel.lines:
        cells = [
            perplexity(line.losses.get(round(column * panel.unit)), best=line is best[column])
            for column in columns
        ]
        rows.append(Row(line.label, whose, (*cells, *([signed(line.change)] if changes else []))))
        if other and line.label in theirs:
            rows.append(_paper_row(theirs.pop(line.label), other, columns, changes))
    if other:
        rows += [_paper_row(line, other, columns, changes) for line in theirs.values()]
    lengths = (times(round(column * panel.unit), panel.unit) for column in columns)
    title = f"Perplexity: {panel.title}" + (f"; {other.title}" if other else "")
    heads = ("", "", *lengths, *(["change"] if changes else []))
    return Table(title, heads, joined(rows), _note(panel, other, changes))


def _paper_row(line: Line, panel: Panel, columns: Sequence[float], changes: bool) -> Row:
    cells = [perplexity(line.losses.get(round(column * panel.unit))) for column in columns]
    return Row(line.label, PAPER, (*cells, *([Cell()] if changes else [])))


def _best(panel: Panel, column: float) -> Line | None:
    length = round(column * panel.unit)
    scored = [
        (line.losses[length].value, place) for place, line in enumerate(panel.lines) if length in line.losses
    ]
    return panel.lines[min(scored)[1]] if len(scored) > 1 else None


def _note(panel: Panel, other: Panel | None, changes: bool) -> str:
    unit = f"1× is {panel.unit} tokens" + (f" for us, {other.unit} in the paper." if other else ".")
    later = any(line.later for line in panel.lines)
    told = " Change: of the loss, in nats, from the training length to the longest" if changes else ""
    told += ", from twice it where the scored tokens fill it" if changes and later else ""
    return f"{unit}{told}{'.' if told else ''}" + (f" {panel.note}" if panel.note else "")


def _step_table(folder: Folder, paper: Paper) -> list[Table]:
    """Milliseconds of a training step by training length, where the paper prints such."""
    printed = [n for n in paper.shown_with(folder.name, "milliseconds") if n.get("train_length")]
    data = Language.of(folder)
    if not printed:
        return []
    trained = [one for one in data.scores if one.view == "equal-step" and one.corpus == data.corpora()[0]]
    ours = {(one.method, one.train_length): data.step_seconds(one).value * 1e3 for one in trained}
    theirs = {(n.get("method"), n.get("train_length")): n.value for n in printed}
    rows: list[Row] = []
    columns: set[float] = set()
    for found in (ours, theirs):
        shortest = min((length for _, length in found), default=1)
        columns |= {length / shortest for _, length in found}
    shown = sorted(columns)
    for method in dict.fromkeys(name for name, _ in [*ours, *theirs]):
        for whose, found in ((OURS, ours), (PAPER, theirs)):
            if any(name == method for name, _ in found):
                shortest = min(length for _, length in found)
                cells = [plain(found.get((method, round(c * shortest))), 1) for c in shown]
                rows.append(Row(method, whose, tuple(cells)))
    heads = ("", "", *(f"{column:g}×" for column in shown))
    title = "Milliseconds of a training step with the same number of tokens, by training length"
    note = "1× is the shortest training length, "
    note += f"{min(n for _, n in ours)} for us, " if ours else ""
    return [Table(title, heads, joined(rows), f"{note}{min(n for _, n in theirs)} in the paper.")]


def tasks(folder: Folder, paper: Paper) -> list[Table]:
    """Accuracy: tasks by methods if there are many tasks, else methods by lengths, a table a task."""
    data = Tasks.of(folder)
    if not data.rows:
        printed = paper.shown_with(folder.name, "accuracy")
        names = list(dict.fromkeys(n.get("task") for n in printed))
        methods = list(dict.fromkeys(n.get("method") for n in printed))
        return [_task_rows(data, names, methods, 0, paper)] if printed else []
    if len(data.tasks()) <= FEW_TASKS:
        return [_by_length(data, task, layers) for task in data.tasks() for layers in data.layers(task)]
    depths = sorted({solver.layers for solver in data.rows})
    return [
        _task_rows(data, data.tasks(), _methods(data, layers), layers, paper, f", {layers} layers")
        for layers in depths
    ]


def _methods(data: Tasks, layers: int) -> list[str]:
    return list(dict.fromkeys(solver.label for solver in data.rows if solver.layers == layers))


def _task_rows(
    data: Tasks, names: Sequence[str], methods: Sequence[str], layers: int, paper: Paper, title: str = ""
) -> Table:
    rows = []
    solvers = {(s.task, s.label): s for s in data.rows if s.layers == layers}
    for task in names:
        found = [data.accuracy(solvers[task, m]) if (task, m) in solvers else None for m in methods]
        best = max((e.value for e in found if e is not None and has_learned(task, e)), default=math.nan)
        wide = len(methods) > FEW_COLUMNS
        cells = [
            Cell("–")
            if e is None
            else plain(100 * e.value, 1, math.nan if wide else 100 * e.error, best=e.value == best)
            for e in found
        ]
        printed = [paper.value("accuracy", task=task, method=method) for method in methods]
        if solvers:
            rows.append(Row(task.replace("_", " "), OURS, tuple(cells)))
        if any(value is not None for value in printed):
            rows.append(Row(task.replace("_", " "), PAPER, tuple(plain(value, 1) for value in printed)))
    note = "Bold: the best, where any is beyond what guessing or always the same answer reaches."
    return Table(f"Accuracy in percent{title}", ("", "", *methods), joined(rows), note if solvers else "")


def _by_length(data: Tasks, task: str, layers: int) -> Table:
    solvers = [solver for solver in data.rows if (solver.task, solver.layers) == (task, layers)]
    lengths = sorted({length for solver in solvers for length in data.lengths(solver)})
    rows = [Row(solver.label, OURS, tuple(_share(data, solver, n) for n in lengths)) for solver in solvers]
    depth = f", {layers} layer{'s' if layers > 1 else ''}" if layers else ""
    heads = ("", "", *(f"length {length}" for length in lengths))
    return Table(f"Accuracy in percent: {task.replace('_', ' ')}{depth}", heads, tuple(rows))


def _share(data: Tasks, solver: Solver, length: int) -> Cell:
    found = data.accuracy(solver, [length])
    return plain(100 * found.value, 1, 100 * found.error)


def timing(folder: Folder, paper: Paper) -> list[Table]:
    """Milliseconds and their ratio by method, size and length; ours, then the paper's."""
    data, found = Timing.of(folder), []
    if data.times:
        methods = list(dict.fromkeys(method for times_ in data.times.values() for method in times_))
        heads = [f"{size}{f', length {length}' if length else ''}" for size, length in data.times]
        rows = [Row(method, OURS, tuple(_times(data, method))) for method in methods]
        columns = [text for head in heads for text in (f"{head}: ms", f"to {data.base}")]
        found.append(Table("Milliseconds of a step, and as a ratio", ("", "", *columns), tuple(rows)))
    printed = paper.shown_with(folder.name, "milliseconds")
    if printed:
        sizes = list(dict.fromkeys(n.get("size") for n in printed))
        methods = list(dict.fromkeys(n.get("method") for n in printed))
        columns = [text for size in sizes for text in (f"{size}: ms", "ratio")]
        rows = [Row(m, PAPER, tuple(_printed_times(paper, m, sizes))) for m in methods]
        found.append(
            Table("The paper's milliseconds, and ratios to dape1x3-kerple", ("", "", *columns), tuple(rows))
        )
    return found


def _times(data: Timing, method: str) -> list[Cell]:
    cells = []
    for place, times_ in data.times.items():
        one, ratio = times_.get(method), data.ratios[place].get(method)
        cells.append(Cell("–") if one is None else plain(one.value, 1, one.error))
        cells.append(Cell("–") if ratio is None else plain(ratio.value, 3, ratio.error or math.nan))
    return cells


def _printed_times(paper: Paper, method: str, sizes: Sequence[str]) -> list[Cell]:
    cells = []
    for size in sizes:
        cells.append(plain(paper.value("milliseconds", method=method, size=size), 1))
        cells.append(plain(paper.value("ratio", method=method, size=size), 3))
    return cells


def maps(folder: Folder, _: Paper) -> list[Table]:
    """The share of the weight on the first token and the entropy, by method and length."""
    shares, entropies = (measured(folder.best or {}, name) for name in ("sink_share", "entropy"))
    rows = []
    for (method, length), share in shares.items():
        entropy = entropies.get((method, length))
        cells = [Cell(f"{length}", length), plain(100 * share.value, 3, 100 * share.error)]
        cells.append(Cell("–") if entropy is None else plain(entropy.value, 2, entropy.error))
        rows.append(Row(method, OURS, tuple(cells)))
    heads = ("", "", "length", "weight on the first token, %", "entropy of a row, nats")
    return [Table("Attention weights, mean over layers and heads", heads, tuple(rows))] if rows else []


KINDS: dict[str, Callable[[Folder, Paper], list[Table]]] = {
    "language": language,
    "tasks": tasks,
    "timing": timing,
    "maps": maps,
}
