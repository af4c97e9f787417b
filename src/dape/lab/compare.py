"""Comparison of methods: a grid of methods × seeds on one text, executed or resumed, with tables, figures and a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from dape.evaluation.by_length import default_last
from dape.evaluation.metrics import METRICS
from dape.evaluation.windows import EvaluationSettings
from dape.files import read_json
from dape.lab.comparison import FILES, STEP, TIME, VIEWS, About, Comparison, Failure
from dape.lab.environment import environment
from dape.lab.equal_time import at_equal_time
from dape.lab.experiment import Announce, Outcome, RunnerSettings, make_launcher, run_experiment, silent
from dape.lab.runs import MULTIPLES, Evaluation, Run, curve_of
from dape.methods import canonical, parse_option, split_outside_brackets
from dape.settings import (
    SEED,
    SettingError,
    check_choice,
    free_names,
    option_name,
    rule_of,
    setting,
    split_names,
    split_numbers,
)
from dape.training import TrainConfig, load_run, recipe
from dape.training.config import check_memory, checked
from dape.training.run import check_options, prepare_data
from dape.training.trackers import find_trackers


def split_methods(text: str) -> list[str]:
    """Canonical names of methods, separated by commas outside brackets."""
    return [canonical(name.strip()) for name in split_outside_brackets(text, ",") if name.strip()]


def check_methods(text: str) -> None:
    """Raise ValueError unless all are methods without repetition."""
    names = split_methods(text)
    if not names:
        raise ValueError("pass at least one method")
    if len(set(names)) < len(names):
        raise ValueError("contains a duplicate")


def check_metrics(text: str) -> None:
    """Raise ValueError unless all are metrics, the loss among them."""
    for name in split_names(text):
        check_choice("metric", name, METRICS)
    if "loss" not in split_names(text):
        raise ValueError("the loss is always one of them")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings of a comparison, other than those of a training and of an evaluation."""

    methods: str = setting(
        "rope,alibi,kerple,dape-kerple,dape1x3-kerple",
        help="Methods, separated by commas; `dape methods` lists them. Options in brackets: rope[scaling=yarn,factor=8].",
        test=check_methods,
    )
    seeds: str = setting(
        "0", help="Seeds, separated by commas; every method is trained once per seed.", listed=int, **SEED
    )
    baseline: str | None = setting(
        None,
        help="Method with which the others are compared, token by token; by default kerple if present, else the first.",
        test=check_methods,
    )
    metrics: str = setting(
        "loss",
        help=f"Metrics of the evaluation, separated by commas: {', '.join(METRICS)}.",
        test=check_metrics,
    )
    equal_time: bool = setting(
        True,
        help="Also train every method for the time of the fastest, with a schedule of the resulting number of steps.",
    )
    over: tuple[str, ...] = setting(
        (), help="Option of training to vary, as NAME=VALUE,VALUE …; several are combined."
    )
    config: str | None = setting(
        None,
        help="A TOML, YAML or JSON file of the options of `dape train`; the command line takes precedence.",
    )


# Order of the fields in --help: those above, an evaluation's, the runner's, a training's.
@dataclass(frozen=True, kw_only=True)
class CompareConfig(TrainConfig, RunnerSettings, EvaluationSettings, Asked):
    """All settings of `dape compare`: those of the comparison, and those of a training, shared by all methods."""

    out: str | None = setting(
        "runs/compare",
        help="Folder for runs, results and report; finished runs are kept.",
        writes="folder",
        fixes_run=False,
    )
    method: str = setting("kerple", help="", hidden=True)
    seed: int = setting(0, help="", hidden=True, **SEED)
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

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Values of the options to vary."""
        found: dict[str, list[Any]] = {}
        for text in self.over:
            option, _, values = text.partition("=")
            name = option.replace("-", "_")
            if not values:
                raise ValueError(f'--over "{text}" is not of the form name=value,value')
            check_axis(name)
            parsed = (parse_option(f"{name}={value}") for value in values.split(","))
            found[name] = [checked({name: value})[name] for _, value in parsed]
        return found

    def runs(self) -> list[Run]:
        """A run for every seed and method, and in a sweep for every combination of the options' values."""
        own = {field.name: getattr(self, field.name) for field in fields(TrainConfig)}
        config, over = TrainConfig(**{**own, "out": None}), self.axes
        return [
            Run(
                changed_config(config, method=method, seed=seed, **dict(zip(over, values, strict=True))),
                lengths=tuple(self.length_list),
                evaluation=Evaluation(last=self.num_last, windows=self.windows, context=self.context),
                metrics=tuple(split_names(self.metrics)),
                label=variant(method, dict(zip(over, values, strict=True))),
                sample=seed == self.seed_list[0],
            )
            for seed in self.seed_list
            for values in product(*over.values())
            for method in self.method_list
        ]

    def shown(self) -> dict[str, Any]:
        """Settings for the page: those that differ from their defaults, after the main ones."""
        usual = recipe(self.preset, CompareConfig, steps=self.steps)
        main: dict[str, Any] = {"methods": self.methods, "seeds": self.seeds, "corpus": self.corpus}
        main |= {
            name: getattr(self, name) for name in ("train_length", "batch_size", "steps", "learning_rate")
        }
        main |= {"windows": self.windows, "lengths": self.length_list, "last": self.num_last}
        hidden = {"method", "seed", "out", "data", "config", "over", *main}
        rest = [field.name for field in fields(self) if field.name not in hidden]
        changed = [name for name in rest if getattr(self, name) != getattr(usual, name)]
        return main | {name: getattr(self, name) for name in changed} | self.axes

    def command(self) -> str:
        """The command of this comparison, with every option that differs from the recipe."""
        usual = recipe(self.preset, CompareConfig, steps=self.steps)
        words = ["dape", "sweep" if self.over else "compare", "--steps", str(self.steps)]
        words += ["--preset", self.preset] if self.preset != CompareConfig.preset else []
        for field in fields(self):
            value = getattr(self, field.name)
            # Those that are not options are in the file of `config`.
            if not rule_of(field).hidden and value != getattr(usual, field.name) and field.name != "steps":
                words += option(option_name(field.name), value)
        return shlex.join(words)


def option(name: str, value: Any) -> list[str]:
    """An option as arguments of a command."""
    if isinstance(value, bool):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    return [name, *map(str, value if isinstance(value, tuple) else (value,))]


# Settings whose default depends on another one.
DERIVED = {"warmup_steps": "steps", "final_learning_rate": "learning_rate"}


def changed_config(config: TrainConfig, **changes: Any) -> TrainConfig:
    """The settings with changes; a default that was derived from one that changes is derived again."""
    usual = replace(config, warmup_steps=None, final_learning_rate=None)  # type: ignore[arg-type]  # None: derived
    stale: dict[str, Any] = {
        name: None
        for name, source in DERIVED.items()
        if source in changes and getattr(config, name) == getattr(usual, name)
    }
    return replace(config, **{**stale, **changes})


def variant(method: str, options: Mapping[str, Any]) -> str:
    """Name of a method with options of a sweep; empty without any."""
    return ", ".join([method, *(f"{name} {value}" for name, value in options.items())]) if options else ""


def run_comparison(
    config: CompareConfig, announce: Announce = silent, *, progress: bool = False, in_process: bool = False
) -> Comparison:
    """Execute or resume the comparison, and write its files.

    in_process: one run after the other in this process, without workers.
    """
    runs, timed = config.runs(), config.equal_time and not config.over
    check_comparison(config)
    runs = [replace(run, config=replace(run.config, data=run.data(config.folder))) for run in runs]
    for run in {run.config.data: run for run in runs}.values():
        # Raises before anything is trained if no document is as long as the longest evaluation.
        run.targets(prepare_data(run.config, progress=progress).validation)
    options: dict[str, Any] = {"jobs": config.jobs, "launcher": config.launcher, "in_process": in_process}

    def execute(runs: Sequence[Run], view: str) -> Outcome:
        results, title = config.folder / FILES[view], VIEWS[view] if timed else ""
        return run_experiment(runs, config.folder, results=results, announce=announce, title=title, **options)

    outcomes = {STEP: execute(runs, STEP)}
    if timed:
        # A run that cannot be trained has no pace, and does not affect the others.
        failed = {job.id for job, _ in outcomes[STEP].failures}
        members = [run for run in runs if run.id not in failed]
        if len({run.config.method for run in members}) > 1:
            equal = at_equal_time(members, config.folder, jobs=config.jobs)
            outcomes[TIME] = execute([replace(run, sample=False) for run in equal], TIME)
    baseline = next(run for run in runs if run.config.method == config.baseline_method)
    about = About(
        tuple(dict.fromkeys(str(run.about["method"]) for run in runs)),
        str(baseline.about["method"]),
        config.command(),
        config.shown(),
        environment(config.jobs),
        tuple(
            Failure(job.title, error, view)
            for view, outcome in outcomes.items()
            for job, error in outcome.failures
        ),
        *shown_of(runs, config.folder),
    )
    comparison = Comparison({view: outcome.table for view, outcome in outcomes.items()}, about, config.folder)
    comparison.save(config.folder)
    return comparison


def check_comparison(config: CompareConfig) -> None:
    """Raise before any work for settings that cannot be trained or evaluated."""
    find_trackers(config.track)
    # A method whose sizes do not fit does not stop the comparison of the others; an option that does not fit does.
    options = config.position_options or config.score_options
    check_options(config, [name for name in config.method_list if options or "[" in name])
    if not make_launcher(config.launcher, config.folder).has_queue:
        check_memory(config)


def shown_of(
    runs: Sequence[Run], folder: Path
) -> tuple[dict[str, list[tuple[float, float, float | None]]], dict[str, dict[str, str]]]:
    """Loss curves of the first seed's runs, and samples of their text by prompt."""
    curves: dict[str, list[tuple[float, float, float | None]]] = {}
    samples: dict[str, dict[str, str]] = {}
    for run in runs:
        path, label = folder / "runs" / run.training, str(run.about["method"])
        if not run.sample or not (path / "model").is_dir():
            continue
        curves[label] = list(curve_of(load_run(path)))
        if (path / "sample.json").exists():
            sample = read_json(path / "sample.json")
            samples.setdefault(sample["prompt"], {})[label] = sample["text"]
    return curves, samples


def check_axis(name: str) -> None:
    """Raise for an option by which the runs of a sweep cannot differ."""
    instead = {
        "method": "give --methods A,B",
        "seed": "give --seeds 0,1",
        "train_length": "run `dape compare` for each and `dape merge` the folders",
        **dict.fromkeys(
            ("corpus", "validation", "field", "data", "out"), "a sweep uses one text and one folder"
        ),
    }
    if name in instead:
        raise ValueError(f"--over {name}: {instead[name]}")
    if name in free_names(TrainConfig):
        raise ValueError(
            f"--over {name}: it does not change what is trained, only how; `dape bench` times such options"
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
    corpus:  "python", "stdlib", a file, a folder, a glob, or hf:NAME; by default that of packed `data`, else "python".
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
    config = recipe(preset, CompareConfig, **changes)
    # torch is already loaded here, which is most of the cost of a worker process.
    here = config.jobs == 1 and config.launcher == "local"
    if not show:
        return run_comparison(config, in_process=here)
    from rich.console import Console

    from dape.lab.display import display

    with display(Console(highlight=False)) as announce:
        return run_comparison(config, announce, progress=True, in_process=here)


def _listed(values: Any) -> str:
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return ",".join(map(str, values)) if several else str(values)
