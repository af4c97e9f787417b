"""Cells: each point of an experiment's grid is one training, known by what it computes, whoever asks for it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from dape.methods import parse_method
from dape.reproduce.corpora import NamedCorpus
from dape.reproduce.experiment import Experiment
from dape.reproduce.reading import Reading, checked_reading
from dape.settings import free_names
from dape.training import TrainConfig
from dape.training.configfile import checked

# Where the text is and which of it is held out: said by the corpus, not by the training.
PLACES = {"corpus", "validation", "field", "data", "out"}
# Options that a cell's name tells in words.
TOLD = ("preset", "num_layers", "hidden_size", "score_width", "score_options", "position_options")
USUAL = asdict(TrainConfig())
STEP, TIME = "equal-step", "equal-time"


@dataclass(frozen=True)
class Cell:
    """One training and the lengths at which it is evaluated.

    corpus:     by its name in papers/corpora.toml; variant: "" or what sets the block of the grid apart.
    train:      fields of TrainConfig other than those of where the text is.
    lengths:    tokens of input at the evaluation; evaluation: last, windows, and room, the longest input that
                every window could have, which decides which windows there are.
    reading:    how the model reads then, where otherwise than in training; others: what else of the same training
                is asked for, as keys of its scores.
    wave:       where its seed, training length and corpus stand in the experiment's lists: what comes first of
                every experiment is trained before what comes second of any.
    """

    corpus: NamedCorpus
    variant: str
    view: str
    train: dict[str, Any]
    lengths: tuple[int, ...]
    evaluation: dict[str, Any]
    wave: tuple[int, ...] = ()
    reading: Reading = field(default_factory=Reading)
    others: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        """What its scores are kept under, one a length, and those of the others."""
        return [*(self.reading.key(length) for length in self.lengths), *self.others]

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
            if name not in free_names(TrainConfig) | PLACES and value != USUAL[name]
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
        return (
            f"{self.corpus.name}, {self.method}{variant}, length {self.train_length}, seed {self.seed}{view}"
        )

    def for_steps(self, steps: int) -> Cell:
        """The same of the equal-time view: with that many steps, the warm-up the same share of them."""
        if steps == self.steps:
            return replace(self, view=TIME)
        warmup = max(1, round(self.train["warmup_steps"] * steps / self.steps))
        return replace(self, view=TIME, train={**self.train, "steps": steps, "warmup_steps": warmup})


def cells_of(experiment: Experiment, scale: str, corpora: dict[str, NamedCorpus]) -> list[Cell]:
    """The trainings of an experiment at a scale, the most telling first: by seed, length, corpus, method."""
    settings = experiment.at(scale)
    cells = [
        replace(
            make_cell(experiment, settings, block, method, corpus_of(corpora, corpus), length, seed),
            wave=(place_of_seed, place_of_length, place_of_corpus),
        )
        for place_of_seed, seed in enumerate(all_of("seeds", experiment, scale))
        for place_of_length, length in enumerate(all_of("train_lengths", experiment, scale))
        for place_of_corpus, corpus in enumerate(all_of("corpora", experiment, scale))
        for block in experiment.blocks(scale)
        if length in block.get("train_lengths", settings["train_lengths"])
        and corpus in block.get("corpora", settings["corpora"])
        and seed in block.get("seeds", settings["seeds"])
        for method in block["methods"]
    ]
    if len({(cell.id, cell.variant) for cell in cells}) < len(cells):
        raise ValueError(f"{experiment.name} names a training twice at scale {scale}")
    return cells


def all_of(name: str, experiment: Experiment, scale: str) -> list[Any]:
    """What a scale gives of seeds, training lengths or corpora, in that order, then what blocks have of their own."""
    own = (value for block in experiment.blocks(scale) for value in block.get(name, []))
    return list(dict.fromkeys([*experiment.at(scale)[name], *own]))


def make_cell(
    experiment: Experiment,
    settings: dict[str, Any],
    block: dict[str, Any],
    method: str,
    corpus: NamedCorpus,
    length: int,
    seed: int,
) -> Cell:
    train = {**settings["train"], **block.get("train", {})}
    if "tokens_per_step" in block:
        train["batch_size"] = max(1, block["tokens_per_step"] // length)
    train |= {"method": parse_method(method).name, "train_length": length, "seed": seed}
    train = checked(train)
    if unknown := PLACES & set(train):
        raise ValueError(
            f"{experiment.name}: {', '.join(unknown)} is said by the corpus, not by the experiment"
        )
    TrainConfig(**train)
    lengths = lengths_of({**settings, **block}, length)
    evaluation: dict[str, Any] = {
        name: settings[name] for name in ("last", "windows", "room") if name in settings
    }
    if lengths and not evaluation["last"] <= lengths[0] <= lengths[-1] <= evaluation["room"]:
        raise ValueError(
            f"{experiment.name}: lengths {', '.join(map(str, lengths))} must lie between last="
            f"{evaluation['last']} and room={evaluation['room']}"
        )
    try:
        reading = checked_reading(block.get("at_evaluation", {}), method, lengths)
    except ValueError as error:
        raise ValueError(f"{experiment.name}: {error}") from error
    return Cell(corpus, block.get("variant", ""), STEP, train, lengths, evaluation, reading=reading)


def lengths_of(settings: dict[str, Any], train_length: int) -> tuple[int, ...]:
    """Lengths of the evaluation, as given or as multiples of the training length; none for maps."""
    if "lengths" in settings:
        return tuple(sorted(settings["lengths"]))
    return tuple(multiple * train_length for multiple in sorted(settings.get("multiples", [])))


def corpus_of(corpora: dict[str, NamedCorpus], name: str) -> NamedCorpus:
    if name not in corpora:
        raise ValueError(f'there is no corpus "{name}" in papers/corpora.toml: it has {", ".join(corpora)}')
    return corpora[name]


def equal_time_cells(experiment: Experiment, scale: str, cells: list[Cell]) -> list[list[Cell]]:
    """The cells that are also compared at equal time, in groups that differ by method alone."""
    asked = experiment.at(scale).get("equal_time")
    if not asked:
        return []
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        here = {"methods": cell.method, "train_lengths": cell.train_length, "corpora": cell.corpus.name}
        here |= {"seeds": cell.seed}
        if cell.variant == "" and all(value in asked.get(name, [value]) for name, value in here.items()):
            groups.setdefault((cell.corpus.name, cell.train_length, cell.seed), []).append(cell)
    return [group for group in groups.values() if len(group) > 1]
