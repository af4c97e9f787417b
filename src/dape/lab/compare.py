"""Comparison of methods: a grid of methods × seeds on one text, with frame, tables, figures and a page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dape.data import find_corpus, prepare
from dape.data.preparation import check_room
from dape.evaluation.by_length import default_last
from dape.evaluation.windows import same_targets
from dape.lab.curves import derive, loss_table, verdict, views
from dape.lab.display import Announce, silent
from dape.lab.execute import execute, make_plan
from dape.lab.experiments import Corpus, Experiment, Workspace
from dape.lab.kinds.language import LOCATION_FIELDS, data_folder
from dape.lab.records import STEP, Results, load_results
from dape.lab.runner import launcher_setting, make_launcher
from dape.methods import canonical, split_outside_brackets
from dape.settings import SettingError, setting, split_numbers
from dape.training import TrainConfig, recipe
from dape.training.config import check_memory, packed_recipe
from dape.training.display import check_trackers
from dape.training.run import check_options

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MULTIPLES = (1, 2, 4, 8, 16)


def split_methods(text: str) -> list[str]:
    """Canonical names of methods, separated by commas outside brackets."""
    return [canonical(name.strip()) for name in split_outside_brackets(text, ",") if name.strip()]


def check_methods(text: str) -> None:
    """Raise ValueError unless all are methods without repetition."""
    names = split_methods(text)
    if not names:
        raise ValueError("give at least one method")
    if len(set(names)) < len(names):
        raise ValueError("names one of them twice")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings of a comparison, other than those of a training."""

    methods: str = setting(
        "rope,alibi,kerple,dape-kerple,dape1x3-kerple",
        help="Methods, separated by commas; `dape methods` lists them. Options in brackets: rope[scaling=yarn,factor=8].",
        test=check_methods,
    )
    seeds: str = setting(
        "0",
        help="Seeds, separated by commas; every method is trained once per seed.",
        listed=int,
        low=0,
        high=2**63 - 1,
    )
    lengths: str | None = setting(
        None,
        help="Tokens of input at which to evaluate, separated by commas; by default 1, 2, 4, 8 and 16 times the "
        "training length.",
        listed=int,
        low=1,
        high=2**24,
    )
    baseline: str | None = setting(
        None,
        help="Method with which the others are compared, token by token; by default kerple if present, else the first.",
        test=check_methods,
    )
    last: int | None = setting(
        None,
        help="Tokens predicted at the end of each window; by default a quarter of the shortest length, at most 256.",
        low=1,
        high=2**24,
    )
    windows: int = setting(128, help="Maximum number of evaluation windows.", low=1, high=10**9)
    context: Literal["document", "stream"] = setting(
        "document",
        help='"stream" lets the context continue into earlier documents (for corpora of short ones).',
    )
    equal_time: bool = setting(
        True,
        help="Also train every method for the time of the fastest, with a schedule of the resulting number of steps.",
    )
    jobs: int = setting(
        1,
        help="Concurrent runs, each in its own process; the cores are divided among them.",
        low=1,
        high=1024,
    )
    launcher: str = launcher_setting()
    out: str | None = setting("runs/compare", help="Folder for runs, results and report.")
    config: str | None = setting(
        None,
        help="A TOML, YAML or JSON file of the options of `dape train`; the command line takes precedence.",
    )


# Order of the fields in --help: those above, then a training's.
@dataclass(frozen=True, kw_only=True)
class CompareConfig(TrainConfig, Asked):
    """All settings of `dape compare`: those of the comparison, and those of a training, shared by all methods."""

    out: str | None = setting(
        "runs/compare",
        help="Folder for runs, results and report; finished runs are kept.",
        writes="folder",
        fixes_run=False,
    )
    method: str = setting("kerple", help="", hidden=True)
    seed: int = setting(0, help="", low=0, high=2**63 - 1, hidden=True)
    distributed: Literal["none", "ddp", "fsdp"] = setting("none", help="", hidden=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last is not None and self.last > min(self.length_list):
            raise SettingError(
                "last", self.last, f" must be at most the shortest length, {min(self.length_list)}"
            )
        if self.baseline is not None and self.baseline_method not in self.method_list:
            raise SettingError("baseline", self.baseline, f" is not one of the methods {self.methods}")
        if self.out is None:
            raise ValueError("a comparison needs a folder: give --out")

    @property
    def method_list(self) -> list[str]:
        return split_methods(self.methods)

    @property
    def seed_list(self) -> list[int]:
        return split_numbers("seeds", self.seeds)

    @property
    def length_list(self) -> list[int]:
        if self.lengths is None:
            return [multiple * self.train_length for multiple in MULTIPLES]
        return sorted(split_numbers("lengths", self.lengths))

    @property
    def baseline_method(self) -> str:
        if self.baseline is not None:
            return canonical(self.baseline)
        return "kerple" if "kerple" in self.method_list else self.method_list[0]

    @property
    def folder(self) -> Path:
        return Path(self.out or "").absolute()

    @property
    def num_last(self) -> int:
        return self.last or default_last(self.length_list)

    def corpus_given(self) -> Corpus:
        """The text, with the settings of its splits."""
        given = {"corpus": self.corpus, "validation": self.validation, "field": self.field}
        given |= {"data": self.data} if self.data else {}
        words = [part for part in Path(self.corpus).parts if not set(part) & set("*?[")]
        name = re.sub(r"[^A-Za-z0-9.]+", "-", words[-1] if words else "text").strip("-.") or "text"
        return Corpus(name, given=tuple(given.items()))

    def experiment(self, blocks: Sequence[dict[str, Any]] | None = None) -> Experiment:
        """The grid as an experiment; blocks: those of a sweep, by default one of all methods."""
        known = (
            {field.name for field in fields(TrainConfig)}
            - LOCATION_FIELDS
            - {"method", "seed", "train_length"}
        )
        train = {name: value for name, value in asdict(self).items() if name in known}
        settings: dict[str, Any] = {
            "corpora": [self.corpus_given().name],
            "train_lengths": [self.train_length],
            "seeds": self.seed_list,
            "lengths": self.length_list,
            "windows": self.windows,
            "last": self.num_last,
            "room": max(self.length_list),
            "train": train,
        }
        settings |= {"context": self.context} if self.context != "document" else {}
        settings |= {"equal_time": {}} if self.equal_time else {}
        grid = list(blocks or [{"methods": self.method_list}])
        return Experiment("comparison", "language", grid, {"own": settings})

    def workspace(self) -> Workspace:
        corpus = self.corpus_given()
        return Workspace(self.folder, corpora={corpus.name: corpus}, jobs=self.jobs)

    def shown(self) -> dict[str, Any]:
        """Settings for results.json and the report: lists as lists, without settings that have no effect here."""
        hidden = {
            "method",
            "seed",
            "distributed",
            "position_options",
            "score_options",
            "out",
            "data",
            "config",
        }
        rest = {
            name: value for name, value in asdict(self).items() if name not in hidden and value is not None
        }
        options = {
            name: value for name in ("position_options", "score_options") if (value := getattr(self, name))
        }
        first = {
            "methods": self.method_list,
            "baseline": self.baseline_method,
            "seeds": self.seed_list,
            "corpus": self.corpus,
            "train_length": self.train_length,
            "lengths": self.length_list,
            "last": self.num_last,
            "steps": self.steps,
        }
        return {**first, **{name: value for name, value in rest.items() if name not in first}, **options}

    def command(self, name: str = "compare", **more: str) -> str:
        """The command of this comparison, with every option that differs from the recipe."""
        usual = by_recipe(self.preset, steps=self.steps)
        words = ["dape", name, "--steps", str(self.steps)]
        words += ["--preset", self.preset] if self.preset != CompareConfig.preset else []
        for field in (field.name for field in fields(self)):
            value = getattr(self, field)
            if field not in ("preset", "steps") and value != getattr(usual, field):
                words += option(field.replace("_", "-"), value)
        for field, value in more.items():
            words += [f"--{field.replace('_', '-')}", value]
        return shlex.join(words)


def by_recipe(size: str = "tiny", **changes: Any) -> CompareConfig:
    """Settings of a comparison by the recipe of a preset, with `changes` applied."""
    own = {field.name for field in fields(Asked)} | {"method", "seed", "distributed"}
    trained = {name: value for name, value in changes.items() if name not in own}
    recipe_of_size = {
        name: value for name, value in asdict(recipe(size, **trained)).items() if name not in own
    }
    return CompareConfig(**recipe_of_size, **{name: value for name, value in changes.items() if name in own})


def option(name: str, value: Any) -> list[str]:
    """An option as arguments of a command."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name.removesuffix('s')}", *(f"{key}={of}" for key, of in value.items())]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


class Comparison:
    """Results of a comparison.

    frame:  all measurements, a pandas DataFrame with a line for each method, variant, seed, corpus, lengths, view and
            metric (see dape.lab.records).
    folder: folder of its runs and files, if any.
    """

    def __init__(self, results: Results, folder: Path | None = None) -> None:
        self.results, self.folder = results, folder

    @property
    def frame(self) -> pd.DataFrame:
        return self.results.frame

    @property
    def failed(self) -> bool:
        """Whether a run failed, or a loss is not a number."""
        losses = self.frame.query("metric == 'loss'")["value"]
        return bool(self.results["failures"]) or bool(losses.isna().any())

    def verdict(self, view: str = STEP) -> str:
        """The result in a sentence."""
        return verdict(self.results, view)

    def table(self, metric: str = "perplexity", view: str = STEP) -> pd.DataFrame:
        """Methods by lengths, means over seeds: perplexity, loss, change or difference."""
        import numpy as np

        asked = "loss" if metric == "perplexity" else metric
        shown = self.frame[(self.frame["metric"] == asked) & (self.frame["view"] == view)]
        if shown.empty:
            known = ", ".join(["perplexity", *self.frame["metric"].unique()])
            raise ValueError(f'there is no metric "{metric}" at view "{view}": there are {known}')
        labelled = shown.assign(
            method=[_label(m, v) for m, v in zip(shown["method"], shown["variant"], strict=True)]
        )
        table = labelled.pivot_table("value", "method", "eval_length", sort=False).sort_index(axis=1)
        return np.exp(table) if metric == "perplexity" else table

    def plot(self, quantity: str = "ppl", view: str = STEP) -> Figure:
        """Figure of ppl, nll, change or difference by length, with paired error bars."""
        from dape.lab.figures import comparison_figure

        return comparison_figure(self.results, view, quantity=quantity)

    def latex(self, view: str = STEP) -> str:
        """Table of perplexities for a paper."""
        return loss_table(self.results, view).latex()

    def report(self, path: str | Path) -> Path:
        """Write the self-contained page report.html; returns its path."""
        from dape.lab.report.comparison import write_page

        return write_page(self.results, Path(path))

    def save(self, folder: Path) -> None:
        """Write results.json, results.csv, table.tex, figures/ and report.html; each is replaced atomically."""
        from dape.files import write_atomically
        from dape.lab.figures import write_figures

        self.results.save(folder / "results.json")
        self.results.save_csv(folder / "results.csv")
        if self.results["rows"]:
            write_figures(self.results, folder / "figures")
            write_atomically(folder / "table.tex", "\n".join(map(self.latex, views(self.results))))
        self.report(folder / "report.html")

    def __repr__(self) -> str:
        return f"Comparison: {self.verdict()}"

    def _repr_html_(self) -> str:
        return f"<p>{self.verdict()}</p>{self.table().round(2).to_html()}"


def _label(method: str, variant: str) -> str:
    return f"{method} ({variant})" if variant else method


def run_comparison(
    config: CompareConfig,
    announce: Announce = silent,
    *,
    progress: bool = False,
    blocks: Sequence[dict[str, Any]] | None = None,
    command: str | None = None,
    in_process: bool = False,
) -> Comparison:
    """Execute or resume the comparison, and write its files.

    blocks: those of a sweep. in_process: one run after the other in this process, without workers.
    """
    experiment, workspace = config.experiment(blocks), replace(config.workspace(), in_process=in_process)
    # Builds the settings of every training, so that invalid ones of a sweep are reported before the packing.
    item = make_plan(experiment, workspace).items[0]
    check_trackers(config)
    # A method whose sizes do not fit does not stop the comparison of the others; an option that does not fit does.
    options = config.position_options or config.score_options
    check_options(config, [name for name in config.method_list if options or "[" in name])
    if not packed_recipe(config.data):
        check_room(
            find_corpus(config.corpus, field=config.field),
            max(config.length_list),
            tokenizer=config.tokenizer,
            validation=config.held_out(),
            stream=config.context == "stream",
        )
    launcher = make_launcher(config.launcher, config.folder)
    if not launcher.has_queue:
        check_memory(config)
    config.folder.mkdir(parents=True, exist_ok=True)
    check_documents(config, Path(config.data or data_folder(item, workspace)), progress=progress)
    shown = {**config.shown(), "baseline": blocks_baseline(config, blocks)}
    if blocks:
        shown["methods"] = [
            _label(method, block["variant"]) for block in blocks for method in block["methods"]
        ]
    about = {"settings": shown, "command": command or config.command(), "title": ""}
    (results,) = execute([experiment], workspace, announce, launcher=launcher, about=about)
    results.content |= shown_of_runs(experiment, workspace)
    derive(results, blocks_baseline(config, blocks))
    comparison = Comparison(results, config.folder)
    comparison.save(config.folder)
    return comparison


def blocks_baseline(config: CompareConfig, blocks: Sequence[dict[str, Any]] | None) -> str:
    """Label with which others are compared: the baseline, in a sweep its first variant."""
    method = config.baseline_method
    return f"{method} ({blocks[0]['variant']})" if blocks and blocks[0].get("variant") else method


def shown_of_runs(experiment: Experiment, workspace: Workspace) -> dict[str, Any]:
    """Loss curves of the first seed's trainings at equal steps, and samples of their text."""
    from dape.lab.kinds.language import evaluations_of

    training: list[dict[str, Any]] = []
    samples: dict[str, dict[str, str]] = {}
    items = make_plan(experiment, workspace).items
    for item in (item for item in items if item.seed == items[0].seed):
        content = evaluations_of(item, workspace)
        if content is None:
            continue
        label = _label(item.method, item.variant)
        kept = content["training"]
        training.append({"label": label, **{name: kept.get(name, []) for name in ("curve", "validation")}})
        if sample := content.get("sample"):
            samples.setdefault(sample["prompt"], {})[label] = sample["text"]
    return {"training": training, "samples": samples}


def check_documents(config: CompareConfig, folder: Path, *, progress: bool) -> None:
    """Pack the text, and raise before anything is trained if no document is as long as the longest evaluation."""
    data = prepare(
        config.corpus,
        folder,
        tokenizer=config.tokenizer,
        validation=config.held_out(),
        field=config.field,
        progress=progress,
    )
    same_targets(
        data.validation, max(config.length_list), config.num_last, config.windows, context=config.context
    )


def compare(
    methods: str | Iterable[str] | None = None,
    *,
    corpus: str | Path | None = None,
    seeds: int | str | Iterable[int] = 0,
    lengths: str | Iterable[int] | None = None,
    preset: str = "tiny",
    show: bool = False,
    **options: Any,
) -> Comparison:
    """Train methods under the same conditions and evaluate each beyond its training length; returns a `Comparison`.

    methods: names, such as ["rope", "kerple", "dape1x3-kerple"]; five usual ones by default.
    corpus:  a file, a folder, a glob, hf:NAME, or "stdlib"; by default that of packed `data`, else "stdlib".
    seeds:   every method is trained once per seed. lengths: 1, 2, 4, 8 and 16 times the training length by default.
    preset:  the size of the model and its recipe. show: print a line for every run.
    options: any other of `dape compare`: steps, train_length, jobs, out, equal_time, windows …

    With jobs=1 the runs are trained in this process. Finished runs in the folder `out` (runs/compare) are kept.
    """
    changes: dict[str, Any] = {"seeds": _listed(seeds), **options}
    changes |= {} if corpus is None else {"corpus": str(corpus)}
    changes |= {} if methods is None else {"methods": _listed(methods)}
    changes |= {} if lengths is None else {"lengths": _listed(lengths)}
    changes |= {"out": str(options["out"])} if "out" in options else {}
    config = by_recipe(preset, **changes)
    # torch is already loaded here, which is most of the cost of a worker process.
    here = config.jobs == 1 and config.launcher == "local"
    if not show:
        return run_comparison(config, in_process=here)
    from rich.console import Console

    from dape.lab.display import display
    from dape.lab.execute import summary_of

    with display(Console(highlight=False), at_once=config.jobs, summary=summary_of) as announce:
        return run_comparison(config, announce, progress=True, in_process=here)


def _listed(values: Any) -> str:
    return (
        values
        if isinstance(values, str)
        else ",".join(map(str, values))
        if isinstance(values, Iterable)
        else str(values)
    )


def load_comparison(folder: str | Path) -> Comparison:
    """Load the comparison in a folder, or in its results.json."""
    path = Path(folder)
    path = path / "results.json" if path.is_dir() else path
    return Comparison(load_results(path), path.parent)


def merge(parts: Sequence[Comparison], names: Sequence[str] | None = None) -> Comparison:
    """Merge several comparisons into one; names: labels of the parts, added to the variant of a shared method."""
    first = parts[0].results
    content: dict[str, Any] = {**first.content, "runs": [], "rows": [], "failures": []}
    content |= {"documents": {}, "targets": {}}
    seen = [{(run["method"], run.get("variant") or "") for run in part.results["runs"]} for part in parts]
    methods: list[str] = []
    renamed: list[dict[str, str]] = []
    for index, part in enumerate(parts):
        renamed.append({})
        others = set().union(*(known for other, known in enumerate(seen) if other != index))
        offset = len(content["runs"])
        for run in part.results["runs"]:
            name, variant = run["method"], run.get("variant") or ""
            if (name, variant) in others and names is not None:
                variant = ", ".join(filter(None, (variant, names[index])))
            content["runs"].append({**run, "variant": variant})
            methods.append(_label(name, variant))
            renamed[-1][_label(name, run.get("variant") or "")] = methods[-1]
        # Results of earlier versions do not say what their target tokens are, and are paired with no others.
        same = all(
            content["targets"].setdefault(corpus, part.results.get("targets", {}).get(corpus, index))
            == part.results.get("targets", {}).get(corpus, index)
            for corpus in part.results["documents"]
        )
        for corpus, ids in part.results["documents"].items():
            content["documents"].setdefault(corpus, ids)
        for row in part.results["rows"]:
            own = row if same else {name: row[name] for name in row if name not in ("windows", "tokens")}
            if row.get("against") in renamed[-1]:
                own = {**own, "against": renamed[-1][row["against"]]}
            content["rows"].append({**own, "run": row["run"] + offset})
        content["failures"] += part.results["failures"]
    commands = dict.fromkeys(part.results.get("command", "") for part in parts)
    shared = {**first.settings, "methods": list(dict.fromkeys(methods))}
    seeds = sorted({run["seed"] for run in content["runs"]})
    # The first part's baseline, by its label in the merged results.
    shared["baseline"] = renamed[0].get(first.settings.get("baseline", ""), methods[0])
    content |= {"command": "\n".join(commands), "settings": {**shared, "seeds": seeds}}
    results = Results(content)
    derive(results, shared["baseline"])
    return Comparison(results)
