"""Runs: a training and its evaluation as one frozen object, with an identity and a method that executes it.

    runs = [Run(TrainConfig(method=m, seed=s, steps=500), lengths=(64, 256)) for m in ("rope", "kerple") for s in (0, 1)]

An experiment is a list of runs (`dape.lab.experiment.run_experiment`). Another kind of run is a frozen dataclass derived
from `Job`; worker processes find it by its module and name.
"""

from __future__ import annotations

import abc
import hashlib
import importlib
import json
import os
import re
import shutil
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, Self

import pandas as pd
import torch

from dape.data import Tokens
from dape.devices import find_device
from dape.evaluation.by_length import default_last
from dape.evaluation.metrics import METRICS, measure
from dape.evaluation.recall import DEFAULT_NGRAM, recall_bounds, targets_by_recall
from dape.evaluation.table import ALL, join, make_table, read_table, write_table
from dape.evaluation.windows import Context, Windows, same_targets
from dape.files import parse_text, write_atomically
from dape.methods import canonical, parse_layers
from dape.positions import POSITIONS, randomized_positions
from dape.positions.rope import RoPE
from dape.settings import check_choice, default_of, fixed, revive
from dape.training import Run as TrainedRun
from dape.training import TrainConfig, load_run, train

# Lengths of an evaluation by default, as multiples of the training length.
MULTIPLES = (1, 2, 4, 8, 16)
# Tokens of generated text per model for the page.
SAMPLE_TOKENS = 120


@dataclass(frozen=True, kw_only=True)
class Job(abc.ABC):
    """A run of an experiment, on this machine or a cluster.

    label:  name in the table in place of the method's.
    corpus: name of the text in the table, and in place of its path in the identity.
    """

    label: str = ""
    corpus: str = ""

    @property
    @abc.abstractmethod
    def about(self) -> dict[str, object]:
        """The columns method, seed, corpus and train_length of its rows."""

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """Steps of its training, for the display."""

    @property
    def distributed(self) -> bool:
        """Whether its worker is started by torchrun."""
        return False

    @property
    @abc.abstractmethod
    def training(self) -> str:
        """Folder name of the training; runs that differ by their evaluation alone share it."""

    @property
    @abc.abstractmethod
    def id(self) -> str:
        """Identity of training and evaluation: `run` in the table."""

    @abc.abstractmethod
    def missing(self, table: pd.DataFrame) -> list[int]:
        """Lengths that the rows of this run do not have yet."""

    @abc.abstractmethod
    def work(self, folder: Path) -> None:
        """Train and evaluate what is missing under `folder`; rows go to `rows(folder)`, saved as they come."""

    def rows(self, folder: Path) -> Path:
        return folder / "evaluations" / f"{self.id}.csv.gz"

    def done(self, folder: Path) -> pd.DataFrame:
        """Rows of this run so far."""
        path = self.rows(folder)
        return read_table(path) if path.exists() else make_table()

    def add_rows(self, folder: Path, rows: pd.DataFrame) -> None:
        """Save further rows, with the columns of the run."""
        rows = make_table(rows.assign(run=self.id, **self.about).to_dict("records"))
        write_table(join([self.done(folder), rows]), self.rows(folder))

    @property
    def title(self) -> str:
        """Name on the display."""
        return f"{self.about['method']}, seed {self.about['seed']}"


def spec_of(job: Job) -> str:
    """The job as JSON, for a worker process."""
    return json.dumps({"kind": f"{type(job).__module__}:{type(job).__qualname__}", **asdict(job)}, indent=1)


def job_of(spec: str) -> Job:
    """The job of a spec."""
    content = parse_text(spec)
    module, _, name = content.pop("kind").partition(":")
    kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and issubclass(kind, Job)):
        raise ValueError(f"{module}:{name} is not a kind of run")
    return revive(kind, content)


def digest(value: object) -> str:
    """Short hash of JSON data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=list).encode()).hexdigest()[:8]


def changed(settings: Any, names: typing.Iterable[str]) -> dict[str, object]:
    """Those settings that differ from their defaults: an option added later changes no identity."""
    usual = {member.name: default_of(member) for member in fields(settings)}
    values = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value != usual[name]}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How a trained model is evaluated, other than at which lengths.

    longest: input for which every window must have room; context: see `dape.evaluation.windows`.
    rope_scaling: RoPE stretched by input length / training length; randomized_positions: positions drawn anew for
    every input, below this number.
    """

    last: int | None = None
    windows: int = 128
    longest: int | None = None
    context: Context = "document"
    rope_scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    randomized_positions: int | None = None


@dataclass(frozen=True)
class Run(Job):
    """A language model: its training, and its evaluation by length on the same target tokens.

    lengths: tokens of input; by default 1, 2, 4, 8 and 16 times the training length.
    """

    config: TrainConfig
    lengths: tuple[int, ...] = ()
    evaluation: Evaluation = Evaluation()
    metrics: tuple[str, ...] = ("loss",)
    sample: bool = False

    def __post_init__(self) -> None:
        config, how = self.config, self.evaluation
        lengths = tuple(sorted(self.lengths)) or tuple(n * config.train_length for n in MULTIPLES)
        longest, last = how.longest or max(lengths), how.last or default_last(lengths)
        if not last <= lengths[0] <= lengths[-1] <= longest:
            shown = ", ".join(map(str, lengths))
            raise ValueError(f"lengths {shown} must lie between last={last} and longest={longest}")
        for name in self.metrics:
            check_choice("metric", name, METRICS)
        layers = parse_layers(config.method)
        if how.rope_scaling != "none" and not all(
            issubclass(POSITIONS[one.position], RoPE) for one in layers
        ):
            raise ValueError(f"{config.method} has no RoPE that could be scaled at the evaluation")
        if how.randomized_positions is not None and how.randomized_positions < lengths[-1]:
            raise ValueError(
                f"randomized_positions={how.randomized_positions} at the evaluation, but inputs have {lengths[-1]} tokens"
            )
        for name, value in {
            "config": replace(config, method=canonical(config.method)),
            "lengths": lengths,
            "evaluation": replace(how, last=last, longest=longest),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def about(self) -> dict[str, object]:
        config = self.config
        return {
            "method": self.label or config.method,
            "seed": config.seed,
            "corpus": self.corpus or corpus_name(config.corpus),
            "train_length": config.train_length,
        }

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def distributed(self) -> bool:
        return self.config.distributed != "none"

    def _words(self, *more: object) -> str:
        config = self.config
        own = changed(config, fixed(config)) | ({"corpus": self.corpus} if self.corpus else {})
        words = [str(self.about["corpus"]), config.method, f"{config.train_length}x{config.batch_size}"]
        words += [f"{config.steps}steps", f"seed{config.seed}", digest([own, *more])]
        return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words)

    @cached_property
    def training(self) -> str:
        return self._words()

    @cached_property
    def id(self) -> str:
        names = [member.name for member in fields(Evaluation)]
        return self._words(changed(self.evaluation, names))

    def missing(self, table: pd.DataFrame) -> list[int]:
        """Lengths without rows of every metric."""
        rows = table[(table["run"] == self.id) & (table["slice"] == ALL)]
        known = set(zip(rows["length"], rows["metric"], strict=True))
        return [n for n in self.lengths if any((n, name) not in known for name in self.metrics)]

    def with_steps(self, steps: int) -> Self:
        """The same run with another number of steps, and the same share of warm-up."""
        if steps == self.steps:
            return self
        warmup = max(1, round(self.config.warmup_steps * steps / self.steps))
        return replace(self, config=replace(self.config, steps=steps, warmup_steps=warmup))

    def work(self, folder: Path) -> None:
        run = self.trained(folder)
        if int(os.environ.get("RANK", "0")):
            return
        # Checkpoints have three times the size of the model, and there are many models.
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        self.evaluate(run, folder)
        if self.sample and not (run.folder / "sample.json").exists():
            write_atomically(run.folder / "sample.json", json.dumps(sample_of(run)))

    def trained(self, folder: Path) -> TrainedRun:
        """The fully trained run; its packed text is shared by runs on the same one."""
        out = folder / "runs" / self.training
        if (out / "model").is_dir():
            return load_run(out)
        run = train(replace(self.config, out=str(out), data=self.data(folder)), progress=False)
        assert run.result is not None
        run.result.complete()
        return run

    def data(self, folder: Path) -> str:
        """Folder of the packed text."""
        # `resolved` puts it next to the run.
        data = replace(self.config, out=str(folder / "run")).resolved().data
        assert data is not None
        return data

    def evaluate(self, run: TrainedRun, folder: Path) -> None:
        done = self.done(folder)
        missing, how = self.missing(done), self.evaluation
        if done.empty:
            self.add_rows(folder, about_training(run))
        validation, device = run.data().validation, find_device(run.config.device)
        assert how.last and how.longest
        windows = self.targets(validation)
        bounds = recall_bounds(sorted({*self.lengths, self.config.train_length}), how.longest)
        bounds = [bound for bound in bounds if bound <= how.longest]
        ngram = min(DEFAULT_NGRAM, bounds[-1])
        slices = targets_by_recall(validation, windows, bounds, how.last, ngram=ngram)
        model, loaded = None, None
        for length in missing:
            options = self.position_options(length)
            if model is None or options != loaded:
                model, loaded = run.model(**options), options
                torch.nn.Module.to(model, device)
            for rows in measure(
                model, validation, windows, [length], last=how.last, metrics=self.metrics, slices=slices,
                positions=self.draw(length),
            ):  # fmt: skip
                self.add_rows(folder, rows)

    def targets(self, tokens: Tokens) -> Windows:
        """The windows of the evaluation; raises if no document has room for the longest input."""
        how = self.evaluation
        assert how.last and how.longest
        return same_targets(tokens, how.longest, how.last, how.windows, context=how.context)

    def position_options(self, length: int) -> dict[str, Any]:
        """Options of the position encoding for inputs of `length` tokens."""
        how = self.evaluation
        if how.rope_scaling == "none":
            return {}
        original = {"original_length": self.config.train_length} if how.rope_scaling == "yarn" else {}
        return {
            "scaling": how.rope_scaling,
            "factor": max(1.0, length / self.config.train_length),
            **original,
        }

    def draw(self, length: int) -> typing.Callable[[int], torch.Tensor] | None:
        """Function that draws the positions of an input, the same ones in every run; None for 0, 1, 2, …"""
        maximum = self.evaluation.randomized_positions
        if maximum is None:
            return None
        generator = torch.Generator().manual_seed(length)
        return lambda num_tokens: randomized_positions(num_tokens, maximum, generator=generator)


def corpus_name(corpus: str) -> str:
    """Short name of a text: the last part of its path that has no wildcard."""
    words = [part for part in Path(corpus).parts if not set(part) & set("*?[")]
    return re.sub(r"[^A-Za-z0-9.]+", "-", words[-1] if words else "text").strip("-.") or "text"


def about_training(run: TrainedRun) -> pd.DataFrame:
    """Rows of the training: steps, seconds, the mean loss of the last 50 steps, parameters."""
    metrics = run.metrics()
    times = [0.0, *(record["seconds"] for record in metrics)]
    # The median is robust against pauses and a busy machine.
    step = median(after - before for before, after in pairwise(times))
    values = {
        "steps": metrics[-1]["step"],
        "step_seconds": step,
        "train_seconds": step * metrics[-1]["step"],
        "train_loss": fmean(record["loss"] for record in metrics[-50:]),
        "parameters": sum(parameter.numel() for parameter in run.model().parameters()),
    }
    return pd.DataFrame([{"metric": name, "sum": value} for name, value in values.items()])


def sample_of(run: TrainedRun) -> dict[str, str]:
    """The beginning of a held-out document, and what the model writes after it."""
    from dape.generation import generate_text

    data = run.data()
    beginning = data.validation.document(0)[: max(8, run.config.train_length // 2)].tolist()
    prompt = data.tokenizer.decode(beginning)
    model = run.model()
    torch.nn.Module.to(model, find_device(run.config.device))
    text = (
        generate_text(model, data.tokenizer, prompt, tokens=SAMPLE_TOKENS, seed=0) if prompt.strip() else ""
    )
    return {"prompt": prompt, "text": text}


def curve_of(run: TrainedRun) -> Iterator[tuple[float, float, float | None]]:
    """Step, training loss and held-out loss, if any, of at most some 200 steps."""
    metrics = run.metrics()
    every = max(1, len(metrics) // 200)
    for index, record in enumerate(metrics):
        if index % every == 0 or "validation_loss" in record:
            yield record["step"], record["loss"], record.get("validation_loss")
