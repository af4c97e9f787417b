"""Time of a training step by method, model size and length, each interleaved with the one it is compared with."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure

from dape.bench.model import Options, training_step
from dape.bench.timing import median_and_range, take_turns, timing_of
from dape.lab.environment import environment
from dape.lab.figures import FAINT, LEGEND, PANEL, canvas, legend, style_of
from dape.lab.folders import Folder
from dape.lab.kinds import Kind, Plan
from dape.lab.paper import Paper, Printed
from dape.lab.records import Results, find_results
from dape.lab.stats import Estimate, median_error, quotient
from dape.lab.tables import OURS, PAPER, Cell, Row, Table, plain


class Timing(Kind):
    """Milliseconds of a step, and their ratio to a base, round by round."""

    scale_keys = frozenset({"methods", "length", "batch", "lengths", "tokens", "rounds", "base", "note"})

    def finish(self, plan: Plan) -> dict[str, Any]:
        """Two rows per method, size and length; sizes in existing results are not timed again."""
        from dape.lab.execute import save

        settings, path = plan.settings, plan.workspace.results(plan.experiment)
        before = find_results(path)
        rounds = {str(size): count for size, count in settings["rounds"].items()}
        timed = [t for t in timings(before) if t["count"] == rounds.get(t["size"])]
        for entry in timed:
            entry.setdefault("environment", before["environment"] if before else {})
        seconds = before["seconds"] if before and timed else 0.0
        failures: list[dict[str, Any]] = []
        wanted = {
            size: [(size, *shape, method) for shape in shapes(settings) for method in settings["methods"]]
            for size in rounds
        }

        def gather() -> dict[str, Any]:
            entries = {_key(entry): entry for entry in timed}
            order = [key for keys in wanted.values() for key in keys]
            results = Results({"kind": "timing"})
            for key in order:
                if key in entries:
                    results.add(*_as_rows(entries[key]))
            missing = [", ".join(map(str, key)) for key in order if key not in entries]
            body = {"seconds": round(seconds, 1), "missing": missing, "failures": failures}
            return {**body, "runs": results["runs"], "rows": results["rows"]}

        for size, keys in wanted.items():
            if set(keys) <= set(map(_key, timed)):
                continue
            start = time.perf_counter()
            try:
                machine = {"environment": environment(plan.workspace.jobs)}
                own = [{**entry, **machine} for entry in time_steps(size, settings)]
                timed = [entry for entry in timed if entry["size"] != size] + own
            except (torch.OutOfMemoryError, MemoryError) as error:
                failure = {"label": size, "method": "", "seed": 0, "error": f"not enough memory: {error}"}
                failures.append(failure)
            seconds += time.perf_counter() - start
            save(plan, gather())
        return gather()

    def tables(self, folder: Folder, paper: Paper) -> list[Table]:
        """Tables of milliseconds and ratios by method, size and length; ours, then the paper's."""
        data, shown = Times(folder.best), []
        if data.times:
            methods = list(dict.fromkeys(method for times in data.times.values() for method in times))
            heads = [f"{size}{f', length {length}' if length else ''}" for size, length in data.times]
            rows = [Row(method, OURS, tuple(_cells(data, method))) for method in methods]
            columns = [text for head in heads for text in (f"{head}: ms", f"to {data.base}")]
            shown.append(Table("Milliseconds of a step, and as a ratio", tuple(columns), tuple(rows)))
        return [*shown, *_printed(folder.name, paper)]

    def figure(self, folder: Folder, paper: Paper) -> Figure | None:
        """Figure of the time relative to a method, one point per size or length: ours and the paper's."""
        data, fields = Times(folder.best), []
        if data.times:
            ours = {
                (data.name_of(setup), method): (ratio.value, ratio.error or math.nan)
                for setup, ratios in data.ratios.items()
                for method, ratio in ratios.items()
            }
            fields.append((f"ours, relative to {data.base}", ours))
        printed = paper.shown_with(folder.name, "ratio")
        if printed:
            theirs = {(n.get("size"), n.get("method")): (n.value, math.nan) for n in printed}
            fields.append((f"the paper, relative to {printed[0].get('ratio_to')}", theirs))
        if not fields:
            return None
        methods = list(dict.fromkeys(method for _, points in fields for _, method in points))
        drawn, (axes,) = canvas(len(fields) * PANEL[0] + LEGEND, 1.0 + 0.28 * len(methods), 1, len(fields))
        sizes = list(dict.fromkeys(size for _, points in fields for size, _ in points))
        looks = {size: style_of(index, "dape-kerple") for index, size in enumerate(sizes)}
        for index, (axis, (title, points)) in enumerate(zip(axes, fields, strict=True)):
            axis.axvline(1, color=FAINT, linewidth=0.8, linestyle=":")
            for size in dict.fromkeys(size for size, _ in points):
                rows = [(methods.index(m), *points[size, m]) for m in methods if (size, m) in points]
                errors = [error if math.isfinite(error) else 0.0 for _, _, error in rows]
                look = looks[size]
                axis.errorbar(
                    [value for _, value, _ in rows], [row for row, _, _ in rows], xerr=errors, label=size,
                    color=look.colour, marker=look.marker, markersize=5, linestyle="none", elinewidth=0.8, capsize=2,
                )  # fmt: skip
            axis.set_yticks(range(len(methods)), methods if not index else [""] * len(methods))
            axis.set_ylim(len(methods) - 0.5, -0.5)
            axis.grid(axis="both")
            axis.set_axisbelow(True)
            axis.set_title(title, loc="left")
        legend(drawn, axes)
        return drawn


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return (entry["size"], entry["eval_length"], entry["batch_size"], entry["method"])


def timings(results: Results | None) -> list[dict[str, Any]]:
    """An entry for each method, size and length: milliseconds and ratio, each an Estimate, with count and against."""
    entries: dict[int, dict[str, Any]] = {}
    for line in results.lines() if results else ():
        entry = entries.setdefault(line["run"], {**line})
        entry[line["metric"]] = Estimate(line["value"], _nan(line.get("error")))
        entry |= {"against": line["against"]} if line.get("against") else {}
    return list(entries.values())


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _as_rows(entry: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = {name: entry[name] for name in ("method", "size", "batch_size", "environment")}
    shared = {"eval_length": entry["eval_length"], "count": entry["count"]}
    rows = []
    for metric in ("milliseconds", "ratio"):
        estimate = entry[metric]
        row = {"metric": metric, **shared, "value": estimate.value, "error": estimate.error}
        rows.append({**row, "against": entry["against"]} if metric == "ratio" else row)
    return run, rows


def shapes(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Lengths and batch sizes of a step: the given one, or several lengths with the same number of tokens."""
    if "lengths" not in settings:
        return [(settings["length"], settings["batch"])]
    return [(length, max(1, settings["tokens"] // length)) for length in settings["lengths"]]


def time_steps(size: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Time all methods of a size; two models are in memory at a time: the timed one and the common baseline."""
    base, first, rounds = settings["base"], shapes(settings)[0], settings["rounds"][size]
    reference = step_on_device(base, options_of(size, first))
    entries = []
    for shape in shapes(settings):
        for method in settings["methods"]:
            itself = (method, shape) == (base, first)
            step = reference if itself else step_on_device(method, options_of(size, shape))
            taken = take_turns({"base": reference} | ({} if itself else {"own": step}), rounds)
            own = taken["base" if itself else "own"]
            ratio, spread = median_and_range([a / b for a, b in zip(own, taken["base"], strict=True)])
            pace = timing_of(own)
            entry: dict[str, Any] = {"method": method, "size": size, "eval_length": shape[0]}
            entry |= {"batch_size": shape[1], "count": rounds, "itself": itself}
            entry["milliseconds"] = Estimate(pace.milliseconds, median_error(pace.spread, rounds))
            entry["ratio"] = Estimate(ratio, 0.0 if itself else median_error(round(spread, 5), rounds))
            entry["against"] = base + (f" at {first[0]}" if "lengths" in settings else "")
            entries.append(entry)
            del step
            gc.collect()
    return at_one_pace(entries)


def options_of(size: str, shape: tuple[int, int]) -> Options:
    return Options(preset=size, length=shape[0], batch=shape[1])


def step_on_device(method: str, options: Options) -> Callable[[], None]:
    """A step on the GPU if there is one, with synchronisation."""
    if not torch.cuda.is_available():
        return training_step(method, options)
    with torch.device("cuda"):
        step = training_step(method, options)

    def waited() -> None:
        step()
        torch.cuda.synchronize()

    return waited


def at_one_pace(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds rescaled such that their ratios are those of the interleaved measurements."""
    standard = next(entry["milliseconds"].value for entry in entries if entry["itself"])
    for entry in entries:
        time_, ratio = entry["milliseconds"], entry["ratio"]
        scale = ratio.value * standard / time_.value
        entry["milliseconds"] = Estimate(float(f"{time_.value * scale:.6g}"), time_.error * scale)
        entry["ratio"] = Estimate(round(ratio.value, 4), ratio.error)
    return entries


class Times:
    """The times of an experiment: (size, length) → method → milliseconds, and ratios to the base."""

    def __init__(self, results: Results | None) -> None:
        self.times: dict[tuple[str, int], dict[str, Estimate]] = {}
        self.ratios: dict[tuple[str, int], dict[str, Estimate]] = {}
        self.base = ""
        for entry in timings(results):
            setup = (entry["size"], entry.get("eval_length") or 0)
            self.base = self.base or entry["against"]
            self.times.setdefault(setup, {})[entry["method"]] = entry["milliseconds"]
            self.ratios.setdefault(setup, {})[entry["method"]] = entry["ratio"]

    def name_of(self, setup: tuple[str, int]) -> str:
        """Distinctive name of a setup: its size, its length, or both."""
        sizes, lengths = ({setup[part] for setup in self.times} for part in (0, 1))
        words = [setup[0]] if len(sizes) > 1 or len(lengths) == 1 else []
        return ", ".join([*words, f"length {setup[1]}"] if len(lengths) > 1 else words)

    def ratio(self, setup: tuple[str, int], a: str, b: str) -> Estimate:
        """Time of a over time of b."""
        return quotient(self.ratios[setup][a], self.ratios[setup][b])


def _cells(data: Times, method: str) -> list[Cell]:
    cells = []
    for setup, times in data.times.items():
        one, ratio = times.get(method), data.ratios[setup].get(method)
        cells.append(Cell("–") if one is None else plain(one.value, 1, one.error))
        cells.append(Cell("–") if ratio is None else plain(ratio.value, 3, ratio.error or math.nan))
    return cells


def _printed(experiment: str, paper: Paper) -> list[Table]:
    """The table of the times that the paper prints, by size or by length, with ratios if it has them; or none."""
    printed = {
        quantity: {(_setup(n), n.get("method")): n.value for n in paper.shown_with(experiment, quantity)}
        for quantity in ("milliseconds", "ratio")
    }
    columns = [
        (setup, quantity)
        for setup in dict.fromkeys(setup for setup, _ in printed["milliseconds"])
        for quantity, values in printed.items()
        if any(setup == other for other, _ in values)
    ]
    rows = [
        Row(
            method,
            PAPER,
            tuple(
                plain(printed[quantity].get((setup, method)), 3 if quantity == "ratio" else 1)
                for setup, quantity in columns
            ),
        )
        for method in dict.fromkeys(method for _, method in printed["milliseconds"])
    ]
    heads = tuple("ratio" if quantity == "ratio" else f"{setup}: ms" for setup, quantity in columns)
    title = "The paper's milliseconds" + (", and ratios to dape1x3-kerple" if printed["ratio"] else "")
    return [Table(title, heads, tuple(rows))] if rows else []


def _setup(number: Printed) -> str:
    """Size or length that a printed time is of."""
    return number.get("size") or f"length {number.get('train_length')}"
