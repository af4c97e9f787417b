"""Language models: the loss of every window at every length, for each training of a grid."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dape.devices import find_device
from dape.evaluate.by_length import token_losses
from dape.evaluate.recall import DEFAULT_NGRAM, RecallBins, RecallSlices
from dape.evaluate.scoring import scoring
from dape.evaluate.statistics import LengthScore, perplexity
from dape.evaluate.windows import Windows, same_targets
from dape.files import read_json, write_atomically
from dape.lab.environment import environment
from dape.lab.experiments import Corpus, Workspace
from dape.lab.kinds import Kind, Plan
from dape.lab.records import STEP, TIME, digits
from dape.lab.runner import Job
from dape.methods import LAYERS, parse_layers
from dape.positions import POSITIONS, randomized_positions
from dape.positions.rope import SCALINGS, RoPE
from dape.settings import free_names
from dape.training import Run, TrainConfig, TrainingStopped, load_run, train
from dape.training.config import checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dape.lab.folders import Folder
    from dape.lab.paper import Paper
    from dape.lab.tables import Table

# Where the text is and which of it is held out: said by the corpus, not by the training.
LOCATION_FIELDS = {"corpus", "validation", "field", "data", "out"}
# Options that a item's name tells in words.
TOLD = ("preset", "num_layers", "hidden_size", "score_width", "score_options", "position_options")
USUAL = asdict(TrainConfig())
# Slices by recall: hits, hits that inputs of training's length lack, all other tokens.
SLICES = ("hit", "new", "other")
# Tokens of text that a model of a comparison writes for the report.
SAMPLE_TOKENS = 120


@dataclass(frozen=True)
class EvalOverrides:
    """How a trained model is evaluated, where otherwise than it was trained. A block of the grid says so:

    at_evaluation = { rope_scaling = "linear" | "ntk" | "yarn" }   RoPE, stretched by the input's length over training's
    at_evaluation = { randomized_positions = N }                   positions drawn anew for every batch, from N places
    """

    rope_scaling: str = "none"
    randomized_positions: int | None = None

    def key(self, length: int) -> str:
        """What scores at a length are kept under, such as "256" and "256 rope_scaling=ntk"."""
        usual = asdict(EvalOverrides())
        changed = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return f"{length} {','.join(f'{name}={value}' for name, value in changed.items())}".strip()

    def position_options(self, length: int, train_length: int) -> dict[str, Any]:
        """Options of the position encoding for inputs of that length."""
        if self.rope_scaling == "none":
            return {}
        original = {"original_length": train_length} if self.rope_scaling == "yarn" else {}
        return {"scaling": self.rope_scaling, "factor": max(1.0, length / train_length), **original}

    def positions(self, length: int) -> Callable[[int], Tensor] | None:
        """What draws the positions of an input, the same ones in every run; None for 0, 1, 2, …"""
        if self.randomized_positions is None:
            return None
        places, generator = self.randomized_positions, torch.Generator().manual_seed(length)
        return lambda num_tokens: randomized_positions(num_tokens, places, generator=generator)


def parse_key(key: str) -> tuple[int, EvalOverrides]:
    """The length and the overrides that scores are kept under."""
    length, _, name = key.partition(" ")
    options: dict[str, Any] = dict(entry.split("=") for entry in name.split(",") if entry)
    if "randomized_positions" in options:
        options["randomized_positions"] = int(options["randomized_positions"])
    return int(length), EvalOverrides(**options)


def checked_overrides(options: dict[str, Any], method: str, lengths: tuple[int, ...]) -> EvalOverrides:
    """The overrides of a block of the grid; a sentence for one that cannot be."""
    for name in options:
        if name not in asdict(EvalOverrides()):
            raise ValueError(
                f'at_evaluation has no key "{name}": it takes {", ".join(asdict(EvalOverrides()))}'
            )
    overrides = EvalOverrides(**options)
    if overrides.rope_scaling not in SCALINGS:
        raise ValueError(f'rope_scaling="{overrides.rope_scaling}": choose one of {", ".join(SCALINGS)}')
    if "rope_scaling" in options and not all(
        issubclass(POSITIONS[layer.position], RoPE) for layer in parse_layers(method)
    ):
        raise ValueError(f"{method} has no RoPE that could be scaled at the evaluation")
    places = overrides.randomized_positions
    if places is not None and places < max(lengths, default=1):
        raise ValueError(
            f"randomized_positions={places} at the evaluation, but inputs have {max(lengths)} tokens"
        )
    return overrides


@dataclass(frozen=True)
class LanguageRun:
    """One training of a grid, and the lengths at which it is evaluated.

    variant:    "" or what sets the block of the grid apart.
    train:      fields of TrainConfig other than those of where the text is.
    lengths:    tokens of input at the evaluation; evaluation: last, windows, and room, the longest input that
                every window could have, which decides which windows there are.
    others:     keys of the scores that are also wanted of the same training.
    recall:     whether scores of an earlier version, which lack the slices by recall, are evaluated again.
    wave:       scheduling priority: where its seed, training length and corpus stand in the experiment's lists.
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
        """What its scores are kept under, one a length, and those of the others."""
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
        """Readable, and the same for the same training, in whichever experiment and wherever its text is.

        Of the training's options those count that are not the default: an option added later changes no name.
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
        """For people."""
        variant = f" ({self.variant})" if self.variant else ""
        view = f", {self.view}" if self.view != STEP else ""
        text = f"{self.corpus.name}, " if not self.corpus.given else ""
        length = f", length {self.train_length}" if not self.corpus.given else ""
        return f"{text}{self.method}{variant}{length}, seed {self.seed}{view}"

    def for_steps(self, steps: int) -> LanguageRun:
        """The same of the equal-time view: with that many steps, the warm-up the same share of them."""
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
    train = {**settings["train"], **block.get("train", {})}
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
    TrainConfig(**train)
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


def is_among(item: LanguageRun, asked: dict[str, list[Any]] | None) -> bool:
    """Whether a setting such as equal_time, which lists methods, corpora, train_lengths and seeds, or not, names the item."""
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
        """The trainings, the most telling first: by seed, length, corpus, method."""
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
        if len({(item.id, item.variant) for item in items}) < len(items):
            raise ValueError(f"{plan.experiment.name} names a training twice at scale {scale}")
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
        content = scores_of(item, plan.workspace)
        if content is None:
            return False
        # Without lengths it is the model itself that is wanted.
        model = plan.workspace.work / "runs" / item.id / "model"
        if not item.lengths:
            return model.is_dir()
        return has_lengths(content, item) and not (item.recall and lacks_recall(content, item.keys))

    def job(self, plan: Plan, item: LanguageRun, *, must_exist: bool = True) -> Job:
        workspace = plan.workspace
        where = item.corpus.locate(workspace.texts, workspace.work / "corpora", must_exist=must_exist)
        where = {"data": str(data_folder(item, workspace)), **where}
        config = {**item.train, **where, "out": str(workspace.work / "runs" / item.id)}
        evaluation = {**item.evaluation, "lengths": item.keys, "recall": item.recall}
        # The user's own comparisons show text beside numbers.
        sample = {"sample": SAMPLE_TOKENS} if item.corpus.given and item.view == STEP else {}
        return Job(
            item.id,
            item.label,
            "language",
            {"train": config, "evaluation": evaluation, **sample},
            workspace.work,
            workspace.scores / f"{item.id}.json",
            item.steps,
            distributed=config.get("distributed", "none") != "none",
        )

    def work(self, spec: dict[str, Any]) -> None:
        """Train what is not yet trained, evaluate what is missing."""
        run = trained(TrainConfig(**spec["train"]))
        if int(os.environ.get("RANK", "0")):
            return
        # Checkpoints are three times the model, of which there are many.
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        evaluate(run, spec["evaluation"], Path(spec["result"]), spec["jobs"])
        if spec.get("sample"):
            add_sample(run, Path(spec["result"]), spec["sample"])

    def summary(self, job: Job) -> str:
        content = read_json(job.result)
        said = [f"training loss {content['training']['loss']:.3f}"]
        found = {key: float(np.mean(losses)) for key, losses in content["windows"].items()}
        keys = [key for key in map(str, job.spec["evaluation"]["lengths"]) if key in found]
        if keys:
            shown = dict.fromkeys((keys[0], keys[-1]))
            said.append("perplexity " + ", ".join(f"{perplexity(found[key]):.2f} at {key}" for key in shown))
        return "; ".join(said)

    def collect(self, plan: Plan) -> dict[str, Any]:
        """Rows of the items that are trained and evaluated; the rest is named as missing."""
        waiting = [replace(item, view=TIME).label for group in plan.timed for item in group]
        missing, seconds, places = list(waiting), {}, []
        runs: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        texts: dict[str, str] = {}
        documents: dict[str, list[int]] = {}
        targets: dict[str, str] = {}
        for item in plan.items:
            content = scores_of(item, plan.workspace)
            if content is None or not has_lengths(content, item):
                missing.append(item.label)
                continue
            seconds[item.id] = content["training"]["seconds"]
            places.append(content["environment"])
            texts[item.corpus.name] = content["training"]["text"]
            paired = documents.setdefault(item.corpus.name, content["documents"]) == content["documents"]
            found = rows_of(item, content, paired=paired)
            if recall := content.get("recall"):
                same = targets.setdefault(item.corpus.name, recall["digest"]) == recall["digest"]
                found += slice_rows(item, recall, paired=same)
            rows += [{"run": len(runs), **row} for row in found]
            runs.append(run_of(item, content["training"]))
        return {
            **({"environment": united(places)} if places else {}),
            "seconds": round(sum(seconds.values()), 1),
            "missing": missing,
            "failures": list(plan.failures.values()),
            "texts": texts,
            "documents": documents,
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
    """Of the packed tokens, which trainings on the same text share."""
    tokenizer = str(item.train.get("tokenizer", "bytes")).replace(":", "-").replace("/", "-")
    name = f"{item.corpus.name}-{tokenizer}"
    if item.corpus.given:
        text = json.dumps([item.corpus.identity, tokenizer])
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return workspace.work / "data" / name


def scores_of(item: LanguageRun, workspace: Workspace) -> dict[str, Any] | None:
    """What the item was evaluated to so far; None if it was not."""
    path = workspace.scores / f"{item.id}.json"
    return read_json(path) if path.exists() else None


def has_lengths(content: dict[str, Any], item: LanguageRun) -> bool:
    """Whether these scores are of the item's windows, at all of its lengths."""
    return content["evaluation"] == item.evaluation and set(item.keys) <= set(content["windows"])


def trained(config: TrainConfig) -> Run:
    """The run, trained to its end."""
    assert config.out is not None
    if (Path(config.out) / "model").is_dir():
        return load_run(config.out)
    run = train(config, progress=False)
    assert run.result is not None
    if run.result.stopped_early:
        raise TrainingStopped(f"{run.result.stopped_early} after step {run.result.steps} of {config.steps}")
    return run


def evaluate(run: Run, evaluation: dict[str, Any], scores: Path, jobs: int) -> None:
    """Add the lengths that the file of scores lacks, each saved as soon as it is there."""
    content = known_of(run, evaluation, scores, jobs)
    keys = [key for key in map(str, evaluation["lengths"]) if key not in content["windows"]]
    if evaluation.get("recall"):
        keys = lacks_recall(content, list(map(str, evaluation["lengths"])))
    if not keys and scores.exists():
        return
    tokens, last = run.data().validation, evaluation.get("last", 1)
    if keys:
        options = {"context": evaluation["context"]} if "context" in evaluation else {}
        windows = same_targets(tokens, evaluation["room"], last, evaluation["windows"], **options)
        content |= {"documents": windows.documents.tolist(), "ends": windows.ends.tolist()}
        bins = recall_bins(run, windows, keys, evaluation)
        content["recall"] = recall_of(content.get("recall"), bins)
    write_atomically(scores, json.dumps(content))
    device = find_device(run.config.device)
    model, loaded = None, None
    for key in keys:
        length, overrides = parse_key(key)
        changed = overrides.position_options(length, run.config.train_length)
        if model is None or changed != loaded:
            model, loaded = run.model(**changed), changed
            torch.nn.Module.to(model, device)
        with scoring(model, positions=overrides.positions(length)) as scorer:
            losses = token_losses(scorer, tokens, windows, length, last, None)
        means = losses.astype(np.float64).mean(1).tolist()
        content["windows"].setdefault(key, [round(loss, 6) for loss in means])
        content["recall"]["sums"][key] = bins.sums(losses).round(4).tolist()
        write_atomically(scores, json.dumps(content))


def recall_bins(run: Run, windows: Windows, keys: list[str], evaluation: dict[str, Any]) -> RecallBins:
    """Bins whose bounds are the powers of two, so that evaluations at other lengths pair, and whatever lengths are not."""
    room = evaluation["room"]
    bounds = {1 << power for power in range(room.bit_length())} | {parse_key(key)[0] for key in keys}
    bounds |= {room, min(room, run.config.train_length)}
    ngram = min(DEFAULT_NGRAM, room)
    return RecallBins.of(run.data().validation, windows, sorted(bounds), evaluation["last"], ngram=ngram)


def recall_of(before: dict[str, Any] | None, bins: RecallBins) -> dict[str, Any]:
    """What is kept of the slices by recall: those so far, if they are of the same bins."""
    if before is not None and before["digest"] == bins.digest:
        return before
    told = {"ngram": bins.ngram, "bounds": list(bins.bounds), "digest": bins.digest}
    return {**told, "counts": bins.counts.tolist(), "sums": {}}


def lacks_recall(content: dict[str, Any], keys: list[str]) -> list[str]:
    """The scores that were evaluated without slices."""
    return [key for key in keys if key not in content.get("recall", {"sums": ()})["sums"]]


def add_sample(run: Run, scores: Path, tokens: int) -> None:
    """What the model writes after the beginning of a held-out document; once."""
    from dape.generation import generate_text

    content = read_json(scores)
    if "sample" in content:
        return
    data = run.data()
    beginning = data.validation.document(0)[: max(8, run.config.train_length // 2)].tolist()
    prompt = data.tokenizer.decode(beginning)
    model = run.model()
    torch.nn.Module.to(model, find_device(run.config.device))
    text = generate_text(model, data.tokenizer, prompt, tokens=tokens, seed=0) if prompt.strip() else ""
    write_atomically(scores, json.dumps({**content, "sample": {"prompt": prompt, "text": text}}))


def known_of(run: Run, evaluation: dict[str, Any], scores: Path, jobs: int) -> dict[str, Any]:
    """Lengths evaluated before on the same windows, how the training went and where."""
    asked = {name: value for name, value in evaluation.items() if name not in ("lengths", "recall")}
    if scores.exists():
        content = read_json(scores)
        if content["evaluation"] == asked:
            return content
    metrics = run.metrics()
    times = [0.0, *(record["seconds"] for record in metrics)]
    every = max(1, len(metrics) // 200)
    training = {
        "steps": metrics[-1]["step"],
        "seconds": metrics[-1]["seconds"],
        # The median, which the pauses of a busy machine do not move.
        "seconds_per_step": median(after - before for before, after in pairwise(times)),
        "loss": float(np.mean([record["loss"] for record in metrics[-50:]])),
        "curve": [[record["step"], round(record["loss"], 4)] for record in metrics[::every]],
        "validation": [
            [record["step"], round(record["validation_loss"], 4)]
            for record in metrics
            if "validation_loss" in record
        ],
        "parameters": sum(parameter.numel() for parameter in run.model().parameters()),
        "text": run.data().manifest["sources"]["sha256"],
    }
    return {"evaluation": asked, "training": training, "environment": environment(jobs), "windows": {}}


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
        "train_seconds": round(training["seconds"], 1),
        "seconds_per_step": float(f"{training['seconds_per_step']:.4g}"),
        "train_loss": round(training["loss"], 4),
        "parameters": training["parameters"],
    }


def rows_of(item: LanguageRun, content: dict[str, Any], *, paired: bool = True) -> list[dict[str, Any]]:
    """A row of metric loss for each length; without windows if its documents are not those of the others."""
    documents, ends = np.array(content["documents"]), np.array(content["ends"])
    rows = []
    for length in item.lengths:
        windows = np.array(content["windows"][item.overrides.key(length)])
        found = LengthScore.of(length, windows, documents, ends, item.evaluation["last"])
        row = {
            "metric": "loss",
            "eval_length": length,
            "value": digits(found.nll),
            "error": digits(found.nll_se),
        }
        own = [round(loss, 4) for loss in windows.tolist()] if paired else None
        rows.append({**row, "count": len(windows), "windows": own})
    return rows


def slice_rows(item: LanguageRun, recall: dict[str, Any], *, paired: bool) -> list[dict[str, Any]]:
    """Rows of metric loss, and of change from the training length, for the tokens of every slice, summed by document."""
    keys = {length: item.overrides.key(length) for length in item.lengths}
    sums = {length: np.array(recall["sums"][key]) for length, key in keys.items() if key in recall["sums"]}
    base = item.train_length if item.train_length in sums else min(sums, default=0)
    counts = np.array(recall["counts"])
    found = RecallSlices(tuple(recall["bounds"]), base, recall["ngram"], counts, sums, recall["digest"])
    rows = []
    for length in sums:
        for name in SLICES:
            bins = found.bins(name, length)
            tokens = counts[:, bins].sum(1)
            told = {"eval_length": length, "slice": name, "count": int(tokens.sum())}
            told |= {"tokens": tokens.tolist()} if paired else {}
            measured: dict[str, tuple[Callable[..., tuple[float, float]], np.ndarray, str | None]]
            measured = {"loss": (found.loss, sums[length], None)}
            if length != base:
                measured["change"] = (found.change, sums[length] - sums[base], str(base))
            for metric, (mean, by_bin, against) in measured.items() if tokens.any() else ():
                value, error = mean(length, name)
                row = {"metric": metric, **told, "value": digits(value), "error": digits(error)}
                row |= {"against": against} if against else {}
                own = by_bin[:, bins].sum(1).round(3).tolist() if paired else None
                rows.append({**row, "windows": own})
    return rows


def united(environments: list[dict[str, Any]]) -> dict[str, Any]:
    """One that says of each thing what it was, or all that it was where trainings differ."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in environments for name in one):
        values = []
        for one in environments:
            if one.get(name) not in values:
                values.append(one.get(name))
        found[name] = values[0] if len(values) == 1 else values
    return found
