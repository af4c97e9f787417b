"""Language models: the loss of every window at every length, for each training of a grid."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dape.evaluation.statistics import perplexity
from dape.files import read_json
from dape.lab.environment import united
from dape.lab.evaluations import (
    EvalOverrides,
    add_sample,
    checked_overrides,
    evaluate,
    lacks_recall,
    loss_rows,
    slice_rows,
)
from dape.lab.experiments import Corpus, Workspace
from dape.lab.kinds import Kind, Plan, equal_time_labels
from dape.lab.records import STEP, TIME
from dape.lab.runner import Job
from dape.methods import LAYERS, parse_layers
from dape.settings import free_names
from dape.training import Run, TrainConfig, load_run, train
from dape.training.config import checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dape.lab.folders import Folder
    from dape.lab.paper import Paper
    from dape.lab.tables import Table

# Settings of the text and its held-out part, which belong to the corpus, not to the training.
LOCATION_FIELDS = {"corpus", "validation", "field", "data", "out"}
# Options that an item's name spells out.
TOLD = ("preset", "num_layers", "hidden_size", "score_width", "score_options", "position_options")
USUAL = asdict(TrainConfig())
# Options of a training that the grid sets, and the keys of a block that name them.
GRID_AXES = {"method": "methods", "train_length": "train_lengths", "seed": "seeds"}
# Settings whose default depends on another one.
DERIVED = {"warmup_steps": "steps", "final_learning_rate": "learning_rate"}
# Tokens of generated text per model in a comparison's report.
SAMPLE_TOKENS = 120


@dataclass(frozen=True)
class LanguageRun:
    """One training of a grid, and the lengths at which it is evaluated.

    variant:    "" or the name of the grid's block.
    train:      fields of TrainConfig other than those of the text.
    lengths:    tokens of input at the evaluation; evaluation: last, windows, and room, the longest input that
                every window must allow, which determines the windows.
    others:     JSON keys of further evaluations of the same training.
    recall:     whether evaluations of an earlier version, which lack the recall slices, are repeated.
    wave:       scheduling priority: indices of its seed, training length and corpus in the experiment's lists.
    """

    corpus: Corpus
    variant: str
    view: str
    train: dict[str, Any]
    lengths: tuple[int, ...]
    evaluation: dict[str, Any]
    wave: tuple[int, ...] = ()
    overrides: EvalOverrides = field(default_factory=EvalOverrides)
    others: tuple[str, ...] = ()
    recall: bool = False

    @property
    def keys(self) -> list[str]:
        """JSON keys of its evaluations, one per length, and those of the others."""
        return [*(self.overrides.key(length) for length in self.lengths), *self.others]

    @property
    def method(self) -> str:
        return self.train["method"]

    @property
    def seed(self) -> int:
        return self.train["seed"]

    @property
    def train_length(self) -> int:
        return self.train["train_length"]

    @property
    def steps(self) -> int:
        return self.train["steps"]

    @cached_property
    def id(self) -> str:
        """Readable identifier of a training, the same in all experiments and for any location of its text.

        Only options that differ from the default are included: an option added later changes no name.
        """
        own = {
            name: value
            for name, value in asdict(TrainConfig(**self.train)).items()
            if name not in free_names(TrainConfig) | LOCATION_FIELDS and value != USUAL[name]
        }
        text = json.dumps([self.corpus.identity, own], sort_keys=True, default=list)
        words = [self.corpus.name, self.method, *(f"{name}-{own[name]}" for name in TOLD if name in own)]
        words += [f"{self.train_length}x{self.train['batch_size']}", f"{self.steps}steps", f"seed{self.seed}"]
        slug = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words)
        return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def label(self) -> str:
        """Display name."""
        variant = f" ({self.variant})" if self.variant else ""
        view = f", {self.view}" if self.view != STEP else ""
        text = f"{self.corpus.name}, " if not self.corpus.given else ""
        length = f", length {self.train_length}" if not self.corpus.given else ""
        return f"{text}{self.method}{variant}{length}, seed {self.seed}{view}"

    def for_steps(self, steps: int) -> LanguageRun:
        """The same run in the equal-time view: with `steps` steps, and the same share of warm-up."""
        if steps == self.steps:
            return replace(self, view=TIME)
        warmup = max(1, round(self.train["warmup_steps"] * steps / self.steps))
        return replace(self, view=TIME, train={**self.train, "steps": steps, "warmup_steps": warmup})


def make_run(
    plan: Plan,
    block: dict[str, Any],
    method: str,
    corpus: Corpus,
    length: int,
    seed: int,
    wave: tuple[int, ...],
) -> LanguageRun:
    settings, name = plan.settings, plan.experiment.name
    if own := [key for key in GRID_AXES if key in block.get("train", {})]:
        raise ValueError(
            f"{name}: train sets {own[0]}, which the grid sets: name it by {GRID_AXES[own[0]]} of the block"
        )
    train = {**without_derived(settings["train"], block.get("train", {})), **block.get("train", {})}
    if "tokens_per_step" in block:
        train["batch_size"] = max(1, block["tokens_per_step"] // length)
    train |= {
        "method": LAYERS.join(layer.name for layer in parse_layers(method)),
        "train_length": length,
        "seed": seed,
    }
    train = checked(train)
    if unknown := LOCATION_FIELDS & set(train):
        raise ValueError(f"{name}: {', '.join(unknown)} is said by the corpus, not by the experiment")
    config = TrainConfig(**train)
    train |= {derived: getattr(config, derived) for derived in DERIVED if derived in settings["train"]}
    lengths = lengths_of({**settings, **block}, length)
    evaluation: dict[str, Any] = {
        key: settings[key] for key in ("last", "windows", "room", "context") if key in settings
    }
    if lengths and not evaluation["last"] <= lengths[0] <= lengths[-1] <= evaluation["room"]:
        raise ValueError(
            f"{name}: lengths {', '.join(map(str, lengths))} must lie between last="
            f"{evaluation['last']} and room={evaluation['room']}"
        )
    try:
        overrides = checked_overrides(block.get("at_evaluation", {}), method, lengths)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    item = LanguageRun(corpus, block.get("variant", ""), STEP, train, lengths, evaluation, wave, overrides)
    return replace(item, recall=is_among(item, settings.get("recall")))


def without_derived(train: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The settings without defaults that were derived from one that changes."""
    asked = {name: value for name, value in train.items() if name not in DERIVED}
    usual = TrainConfig(**checked(asked))
    stale = {
        name
        for name, source in DERIVED.items()
        if source in changes and name not in changes and train.get(name) == getattr(usual, name)
    }
    return {name: value for name, value in train.items() if name not in stale}


def is_among(item: LanguageRun, asked: dict[str, list[Any]] | None) -> bool:
    """Whether a setting such as equal_time, which may list methods, corpora, train_lengths and seeds, includes the item."""
    if asked is None or item.variant:
        return False
    own = {"methods": item.method, "train_lengths": item.train_length, "corpora": item.corpus.name}
    own |= {"seeds": item.seed}
    return all(value in asked.get(name, [value]) for name, value in own.items())


def lengths_of(settings: dict[str, Any], train_length: int) -> tuple[int, ...]:
    """Lengths of the evaluation, as given or as multiples of the training length; none for maps."""
    if "lengths" in settings:
        return tuple(sorted(settings["lengths"]))
    return tuple(multiple * train_length for multiple in sorted(settings.get("multiples", [])))


def corpus_of(workspace: Workspace, name: str) -> Corpus:
    if name not in workspace.corpora:
        known = ", ".join(workspace.corpora)
        raise ValueError(f'there is no corpus "{name}" in papers/corpora.toml: it has {known}')
    return workspace.corpora[name]


def targets_of(content: dict[str, Any], item: LanguageRun) -> str:
    """Digest of the target tokens of an evaluation: losses are paired only where it is equal."""
    targets = [
        content["training"]["text"],
        item.train.get("tokenizer", "bytes"),
        content["evaluation"].get("last"),
        content["evaluation"].get("context", "document"),
        content["documents"],
        content["ends"],
    ]
    return hashlib.sha256(json.dumps(targets).encode()).hexdigest()[:16]


class Language(Kind):
    """Trainings of language models, evaluated by length on the same target tokens."""

    scale_keys = frozenset(
        [
            "corpora",
            "train_lengths",
            "seeds",
            "multiples",
            "lengths",
            "windows",
            "last",
            "room",
            "context",
            "equal_time",
            "recall",
            "train",
            "grid",
            "also",
            "note",
        ]
    )

    def items(self, plan: Plan) -> list[LanguageRun]:
        """Trainings, the most informative first: by seed, length, corpus, method."""
        settings, scale = plan.settings, plan.workspace.scale
        seeds, lengths, corpora = (
            plan.experiment.values(name, scale) for name in ("seeds", "train_lengths", "corpora")
        )
        items = [
            make_run(plan, block, method, corpus_of(plan.workspace, corpus), length, seed, (i, j, k))
            for i, seed in enumerate(seeds)
            for j, length in enumerate(lengths)
            for k, corpus in enumerate(corpora)
            for block in plan.experiment.blocks(scale)
            if length in block.get("train_lengths", settings["train_lengths"])
            and corpus in block.get("corpora", settings["corpora"])
            and seed in block.get("seeds", settings["seeds"])
            for method in block["methods"]
        ]
        seen: dict[tuple[str, EvalOverrides], LanguageRun] = {}
        for item in items:
            other = seen.setdefault((item.id, item.overrides), item)
            if other is not item:
                raise ValueError(
                    f"{plan.experiment.name} names a training twice at scale {scale}: {other.label} and {item.label} "
                    f"differ by nothing that changes the trained model"
                )
        return items

    def timed(self, plan: Plan) -> list[list[LanguageRun]]:
        groups: dict[tuple[Any, ...], list[LanguageRun]] = {}
        for item in plan.items:
            if is_among(item, plan.settings.get("equal_time")):
                groups.setdefault((item.corpus.name, item.train_length, item.seed), []).append(item)
        return [group for group in groups.values() if len(group) > 1]

    def unite(self, one: LanguageRun, other: LanguageRun) -> LanguageRun:
        if one.evaluation and other.evaluation and one.evaluation != other.evaluation:
            raise ValueError(f"{other.label} is evaluated on other windows in another experiment")
        if other.overrides == one.overrides:
            lengths, others = tuple(sorted({*one.lengths, *other.lengths})), one.others
        else:
            lengths, others = one.lengths, tuple(sorted({*one.others, *other.keys}))
        evaluation = one.evaluation or other.evaluation
        wave = min(one.wave, other.wave)
        recall = one.recall or other.recall
        return replace(one, lengths=lengths, others=others, evaluation=evaluation, wave=wave, recall=recall)

    def is_done(self, plan: Plan, item: LanguageRun) -> bool:
        content = evaluations_of(item, plan.workspace)
        if content is None:
            return False
        # Without lengths, the model itself is required.
        model = plan.workspace.work / "runs" / item.id / "model"
        if not item.lengths:
            return model.is_dir()
        return has_lengths(content, item) and not (item.recall and lacks_recall(content, item.keys))

    def job(self, plan: Plan, item: LanguageRun, *, must_exist: bool = True) -> Job:
        workspace = plan.workspace
        text_options = item.corpus.locate(workspace.texts, workspace.work / "corpora", must_exist=must_exist)
        text_options = {"data": str(data_folder(item, workspace)), **text_options}
        config = {**item.train, **text_options, "out": str(workspace.work / "runs" / item.id)}
        evaluation = {**item.evaluation, "lengths": item.keys, "recall": item.recall}
        # The user's own comparisons also show text.
        sample = {"sample": SAMPLE_TOKENS} if item.corpus.given and item.view == STEP else {}
        return Job(
            item.id,
            item.label,
            "language",
            {"train": config, "evaluation": evaluation, **sample},
            workspace.work,
            workspace.evaluations / f"{item.id}.json",
            item.steps,
            distributed=config.get("distributed", "none") != "none",
        )

    def work(self, spec: dict[str, Any]) -> None:
        """Train if not yet trained, and evaluate missing lengths."""
        run = trained(TrainConfig(**spec["train"]))
        if int(os.environ.get("RANK", "0")):
            return
        # Checkpoints have three times the size of the model, and there are many models.
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        evaluate(run, spec["evaluation"], Path(spec["result"]), spec["jobs"])
        if spec.get("sample"):
            add_sample(run, Path(spec["result"]), spec["sample"])

    def summary(self, job: Job) -> str:
        content = read_json(job.result)
        said = [f"training loss {content['training']['loss']:.3f}"]
        means = {key: float(np.mean(losses)) for key, losses in content["windows"].items()}
        keys = [key for key in map(str, job.spec["evaluation"]["lengths"]) if key in means]
        if keys:
            shown = dict.fromkeys((keys[0], keys[-1]))
            said.append("perplexity " + ", ".join(f"{perplexity(means[key]):.2f} at {key}" for key in shown))
        return "; ".join(said)

    def collect(self, plan: Plan) -> dict[str, Any]:
        """Rows of trained and evaluated items; the others are listed as missing."""
        missing = [label for group in plan.timed for label in equal_time_labels(group)]
        seconds, environments = {}, []
        runs: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        texts: dict[str, str] = {}
        documents: dict[str, list[int]] = {}
        targets: dict[str, str] = {}
        slices: dict[str, str] = {}
        for item in plan.items:
            content = evaluations_of(item, plan.workspace)
            if content is None or not has_lengths(content, item):
                missing.append(item.label)
                continue
            seconds[item.id] = without_pauses(content["training"])
            environments.append(content["environment"])
            texts[item.corpus.name] = content["training"]["text"]
            documents.setdefault(item.corpus.name, content["documents"])
            digest = targets_of(content, item)
            paired = targets.setdefault(item.corpus.name, digest) == digest
            keys = {length: item.overrides.key(length) for length in item.lengths}
            item_rows = loss_rows(content, keys, paired=paired)
            if recall := content.get("recall"):
                same = slices.setdefault(item.corpus.name, recall["digest"]) == recall["digest"]
                item_rows += slice_rows(recall, keys, item.train_length, paired=paired and same)
            rows += [{"run": len(runs), **row} for row in item_rows]
            runs.append(run_of(item, content["training"]))
        return {
            **({"environment": united(environments)} if environments else {}),
            "seconds": round(sum(seconds.values()), 1),
            "missing": missing,
            "failures": list(plan.failures.values()),
            "texts": texts,
            "documents": documents,
            "targets": targets,
            "runs": runs,
            "rows": rows,
        }

    def tables(self, folder: Folder, paper: Paper) -> list[Table]:
        from dape.lab.kinds.panels import tables

        return tables(folder, paper)

    def figure(self, folder: Folder, paper: Paper) -> Figure | None:
        from dape.lab.kinds.panels import figure

        return figure(folder, paper)


def data_folder(item: LanguageRun, workspace: Workspace) -> Path:
    """Folder of the packed tokens, shared by trainings on the same text."""
    tokenizer = str(item.train.get("tokenizer", "bytes")).replace(":", "-").replace("/", "-")
    name = f"{item.corpus.name}-{tokenizer}"
    if item.corpus.given:
        text = json.dumps([item.corpus.identity, tokenizer])
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return workspace.work / "data" / name


def evaluations_of(item: LanguageRun, workspace: Workspace) -> dict[str, Any] | None:
    """Evaluations of the item so far; None if there are none."""
    path = workspace.evaluations / f"{item.id}.json"
    return read_json(path) if path.exists() else None


def has_lengths(content: dict[str, Any], item: LanguageRun) -> bool:
    """Whether the evaluations are on the item's windows, at all of its lengths."""
    return content["evaluation"] == item.evaluation and set(item.keys) <= set(content["windows"])


def trained(config: TrainConfig) -> Run:
    """The fully trained run."""
    assert config.out is not None
    if (Path(config.out) / "model").is_dir():
        return load_run(config.out)
    run = train(config, progress=False)
    assert run.result is not None
    run.result.complete()
    return run


def run_of(item: LanguageRun, training: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": item.method,
        "variant": item.variant,
        "seed": item.seed,
        "corpus": item.corpus.name,
        "train_length": item.train_length,
        "view": item.view,
        "steps": item.steps,
        "batch_size": item.train["batch_size"],
        "train_seconds": round(without_pauses(training), 1),
        "seconds_per_step": float(f"{training['seconds_per_step']:.4g}"),
        "train_loss": round(training["loss"], 4),
        "parameters": training["parameters"],
    }


def without_pauses(training: dict[str, Any]) -> float:
    """Time of all steps by the median of a step: pauses and a busy machine do not count."""
    return training["seconds_per_step"] * training["steps"]
