"""Migration of results of earlier versions to the current schema: `dape migrate FILE…`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dape.files import plain, read_json
from dape.lab.records import SCHEMA, Results
from dape.lab.stats import median_error

Content = dict[str, Any]
# Columns of rows in earlier versions that now belong to their run.
OF_RUN: tuple[str, ...] = (
    "method",
    "variant",
    "seed",
    "corpus",
    "train_length",
    "view",
    "steps",
    "batch_size",
    "train_seconds",
)
OF_RUN += ("seconds_per_step", "train_loss", "parameters", "layers", "size")


def migrate(path: Path) -> bool:
    """Rewrite a file of results in the current schema; False if it already is."""
    content = read_json(path)
    if "rows" in content:
        return False
    kind = kind_of(content)
    if kind is None:
        raise ValueError(f"{path} holds no results of an earlier version")
    results = Results({"schema": SCHEMA, "kind": kind, **about(content)})
    FORMS[kind if "pairs" not in content else "comparison"](content, results)
    results.save(path)
    return True


def kind_of(content: Content) -> str | None:
    """Kind of the experiment, which only those of papers record."""
    if "kind" in content:
        return content["kind"]
    if "pairs" in content:
        return "language"
    if "models" in content:
        return "retrofit"
    return "tasks" if "runs" in content and "records" in content else None


def about(content: Content) -> Content:
    """All entries except the measurements; settings and environment unchanged."""
    gone = {"records", "runs", "scores", "pairs", "changes", "models", "lengths", "complete"}
    kept = {name: value for name, value in content.items() if name not in gone}
    for failure in kept.get("failures", []):
        failure.setdefault(
            "label", failure.pop("cell", f"{failure.get('method')}, seed {failure.get('seed')}")
        )
    environment = kept.get("environment", {})
    if "processor" in environment:
        kept["environment"] = {"cpu": environment.pop("processor"), **environment}
    return kept


def run_of(row: Content, **more: Any) -> Content:
    return {name: row[name] for name in OF_RUN if row.get(name) not in (None, "")} | more


def grouped(rows: list[Content], key: Callable[[Content], Any]) -> list[list[Content]]:
    groups: dict[Any, list[Content]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def language(content: Content, results: Results) -> None:
    identity = ("view", "corpus", "train_length", "method", "variant", "seed", "steps")
    for rows in grouped(content["records"], lambda row: tuple(row.get(name) for name in identity)):
        converted = []
        for row in rows:
            loss = {"metric": "loss", "eval_length": row["eval_length"], "value": row["nll"]}
            windows = row.get("windows")
            converted.append(
                {**loss, "error": row["nll_se"], "count": len(windows or ()) or None, "windows": windows}
            )
        results.add(run_of(rows[0]), converted)


def comparison(content: Content, results: Results) -> None:
    """Convert a comparison: losses without windows; changes and differences as they are."""
    corpus = Path(content["settings"].get("corpus", "")).name
    last = content["settings"].get("last")
    for rows in grouped(content["records"], lambda row: (row["view"], row["method"], row["seed"])):
        first, converted = rows[0], []
        mine = {name: first[name] for name in ("view", "method", "seed")}
        for row in rows:
            loss = {"metric": "loss", "eval_length": row["eval_length"], "value": row["nll"]}
            count = row["tokens"] // last if last else None
            converted.append({**loss, "error": row["nll_se"], "count": count})
        for metric, entries, against in (
            ("change", content["changes"], "from_length"),
            ("difference", content["pairs"], "baseline"),
        ):
            for row in entries:
                if all(row[name] == value for name, value in mine.items()):
                    value = {
                        "metric": metric,
                        "eval_length": row["eval_length"],
                        "against": str(row[against]),
                    }
                    converted.append({**value, "value": row[metric], "error": row[f"{metric}_se"]})
        results.add(run_of(first, corpus=corpus), converted)


def tasks(content: Content, results: Results) -> None:
    if "runs" in content:
        for run in content["runs"]:
            rows = [row for row in content["records"] if row["run"] == run["name"]]
            kept = {name: run[name] for name in ("name", "method", "seed", "train_seconds", "test_seconds")}
            kept |= {"corpus": run["task"], "layers": run["num_layers"], "train_loss": run["final_loss"]}
            kept |= {name: run[name] for name in ("parameters", "settings")}
            results.add(kept, accuracy_rows(rows, run["score"]))
        return
    identity = ("task", "method", "variant", "layers", "seed")
    scores = {tuple(row.get(n) for n in identity): row for row in content.get("scores", ())}
    for rows in grouped(content["records"], lambda row: tuple(row.get(name) for name in identity)):
        scored = scores.get(tuple(rows[0].get(name) for name in identity), {})
        seconds = {"train_seconds": scored["train_seconds"]} if "train_seconds" in scored else {}
        run = run_of(rows[0], corpus=rows[0]["task"], **seconds)
        results.add(run, accuracy_rows(rows, scored.get("score")))


def accuracy_rows(rows: list[Content], mean: float | None) -> list[Content]:
    converted: list[Content] = [
        {"metric": "accuracy", "eval_length": r["length"], "value": r["accuracy"], "count": r["samples"]}
        for r in rows
    ]
    return converted + ([{"metric": "mean_accuracy", "value": mean}] if mean is not None else [])


def timing(content: Content, results: Results) -> None:
    for row in content["records"]:
        common = {"eval_length": row["length"], "count": row["rounds"]}
        base = row.get("ratio_length")
        itself = row["method"] == row["ratio_to"] and row["length"] == (base or row["length"])
        error = 0.0 if itself else median_error(row["ratio_spread"], row["rounds"])
        against = row["ratio_to"] + (f" at {base}" if base else "")
        time = {"metric": "milliseconds", **common, "value": row["milliseconds"]}
        ratio = {
            "metric": "ratio",
            **common,
            "against": against,
            "value": row["ratio"],
            "error": plain(error),
        }
        spread = plain(median_error(row["spread"], row["rounds"]))
        results.add(run_of(row, batch_size=row["batch"]), [{**time, "error": spread}, ratio])


def maps(content: Content, results: Results) -> None:
    identity = ("corpus", "method", "variant", "train_length", "seed")
    for rows in grouped(content["records"], lambda row: tuple(row.get(name) for name in identity)):
        converted = []
        for row in rows:
            common = {"eval_length": row["length"], "layer": row["layer"], "head": row["head"]}
            for metric in ("sink_share", "entropy", "processed"):
                if row.get(metric) is not None:
                    windows = row.get("sink_shares") if metric == "sink_share" else None
                    converted.append({"metric": metric, **common, "value": row[metric], "windows": windows})
        results.add(run_of(rows[0]), converted)


def retrofit(content: Content, results: Results) -> None:
    settings = content["settings"]
    for name, row in content["models"].items():
        run = {"method": settings["method"], "variant": name, "seed": settings["seed"], "corpus": "stdlib"}
        rows = []
        for index, length in enumerate(content["lengths"]):
            rows.append({"metric": "loss", "eval_length": length, "value": row["loss"][index]})
            change = {"metric": "change", "eval_length": length, "against": str(content["lengths"][0])}
            rows.append({**change, "value": row["change"][index], "error": row["change_se"][index]})
        results.add({**run, "train_length": settings["train_length"]}, rows)


FORMS: dict[str, Callable[[Content, Results], None]] = {
    "comparison": comparison,
    "language": language,
    "maps": maps,
    "retrofit": retrofit,
    "tasks": tasks,
    "timing": timing,
}
