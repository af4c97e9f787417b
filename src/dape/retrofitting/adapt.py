"""`adapt`: retrofit a pretrained model, tune it, and compare it with the best use of the base's own window.

A flat curve alone shows nothing: an input cut to the base's window has one for free. So the result always holds the
base cut to its window, how much the base uses its context at all, and, with `control`, the base trained on for as long.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import multiprocessing
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from dape.data import TokenData, Tokens, open_data, prepare
from dape.evaluation.by_length import KEY_GAIN, context_lengths, losses_of_windows
from dape.evaluation.evaluator import evaluating
from dape.evaluation.metrics import target_checksums
from dape.evaluation.table import ALL, make_table, write_table
from dape.evaluation.windows import Windows, same_targets
from dape.files import check_output, read_json, replacing, write_atomically
from dape.hub import pretrained
from dape.methods import parse_layers
from dape.models import DapeForCausalLM
from dape.models.export import export
from dape.retrofitting.attach import added_parameters, is_retrofitted, own_length, retrofit, set_trainable
from dape.retrofitting.attach import parse_plan as parse_method
from dape.retrofitting.check import check_causal
from dape.retrofitting.positions import rotary_modules
from dape.retrofitting.replace_method import replace_method
from dape.retrofitting.report import BASE, KEY, TRAINED_ON, UNTRAINED, Report
from dape.retrofitting.settings import SINKS, AdaptSettings
from dape.retrofitting.tuning import Tuning
from dape.settings import SettingError
from dape.training.checkpoint import check_same_run
from dape.training.config import FitResult, TrainingStopped
from dape.training.loop import fit

# First tokens that "sinks" keeps of an input that it cuts.
NUM_SINKS = 4
WEIGHTS, RESULTS, FIGURE, RECORD = "model", "results.csv.gz", "perplexity.svg", "retrofit.json"
LOSSES = "losses.npz"


@dataclass
class Adapted:
    """A retrofitted model (that of the first seed), and the losses of base and arms on the same target tokens.

    window: tokens that the base was made for. results: of each training, by arm and seed.
    """

    model: PreTrainedModel
    window: int
    table: pd.DataFrame
    results: dict[tuple[str, int], FitResult] = field(default_factory=dict)
    folder: Path | None = None

    @cached_property
    def report(self) -> Report:
        return Report(self.table)

    @property
    def added(self) -> int:
        """Number of parameters that the base does not have."""
        return sum(value.numel() for value in added_parameters(self.model))


def adapt(
    model: PreTrainedModel,
    method: str | None = None,
    texts: str | TokenData = "python",
    *,
    tokenizer: str | None = None,
    window: int | None = None,
    out: str | Path | None = None,
    progress: bool = False,
    settings: AdaptSettings | None = None,
    **options: Any,
) -> Adapted:
    """Retrofit a model, tune it on texts, and return it with its losses beside those of its base.

    model:     any causal language model that `dape.retrofit` takes, or one of ours. It is left unchanged.
    texts:     a corpus as for `dape data prepare`, or packed token data or its folder.
    tokenizer: folder or name of the model's tokenizer; by default that of the model.
    window:    tokens that the model was made for; by default what its configuration says.
    out:       folder of checkpoints, the model and the results; the same call resumes there. None: nothing is kept.
    options:   fields of `AdaptSettings`, such as steps=300, learning_rate=1e-3, seeds=3, control=True.

    The model needs text with a past: a base whose loss does not fall with its context has nothing to gain from more.
    """
    settings = settings or AdaptSettings(method=method, **options)
    if isinstance(texts, str) and (Path(texts) / "manifest.json").exists():
        texts = open_data(texts)
    corpus = str(texts.manifest["recipe"]["corpus"]) if isinstance(texts, TokenData) else texts
    if is_retrofitted(model):
        raise ValueError("the model is already retrofitted: pass its base")
    check_causal(model)
    window = window or own_length(model)
    if window is None:
        raise ValueError("the model's configuration has no training length: pass window=")
    if window < 8:
        raise ValueError(f"window={window}: at least 8 tokens are needed to measure the use of context")
    own = isinstance(model, DapeForCausalLM)
    rotates = "rope" in model.config.method if own else bool(rotary_modules(model))
    settings = settings.resolved(window, rotates=rotates)
    method = cast(str, settings.method)
    lengths, last = settings.length_list(window), settings.num_last(window)
    if last > min(window // 4, *lengths):
        raise SettingError("last", last, f" is more than the shortest length {min(window // 4, *lengths)}")
    untrained = settings.untrained_list(window, own=own)
    for name in (method, *untrained):
        if name != SINKS:
            parse_layers(name) if own else parse_method(name, model)
    about = {"base": model.config._name_or_path, "texts": str(getattr(texts, "folder", texts))}
    with contextlib.ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dape-adapt-")))
        else:
            folder = Path(out)
            _check_same(folder, settings, about)
        if isinstance(texts, TokenData):
            data = texts
        else:
            source = tokenizer or model.config._name_or_path
            if not source:
                raise ValueError("the model names no tokenizer: pass tokenizer=, or packed token data")
            data = prepare(texts, folder / "data", tokenizer=source, seed=settings.seed, progress=progress)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / RECORD).exists():
            record = {**about, "settings": asdict(settings)}
            write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")
        measured = Measured(
            data.validation, same_targets(data.validation, max(lengths), last, settings.windows), last
        )
        base = measured.losses(model, [*context_lengths(window), *lengths], kept=folder / LOSSES)
        measured.key = base[window // 2] - base[window] > KEY_GAIN
        seeds = [settings.seed + number for number in range(settings.seeds)]
        for seed in seeds:
            measured.add(BASE, seed, base)
        for name in untrained:
            if name == SINKS:
                cut = WithSinks(measured.windows.ends, measured.windows.documents, window)
                losses = measured.losses(model, lengths, windows=cut)
            else:
                losses = measured.losses(_with_method(model, name, settings).eval(), lengths)
            measured.add(name + UNTRAINED, seeds[0], losses)
        arms = [
            _Arm(*arm) for arm in itertools.product(seeds, (True, False)) if settings.control or not arm[1]
        ]
        train = _Trainings(model, data.train.ids, settings, window, folder)
        if settings.jobs > 1:
            # Each in a process of its own; below, they are found trained.
            jobs = min(settings.jobs, len(arms))
            threads = max(1, torch.get_num_threads() // jobs)
            with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (threads,)) as pool:
                for arm, stopped in zip(arms, pool.map(train.work, arms), strict=True):
                    if stopped:
                        raise TrainingStopped(f"{arm.title}: {stopped}")
        adapted = Adapted(model, window, make_table())
        for arm in arms:
            result, new = train(arm, progress=progress)
            adapted.results[arm.title, arm.seed] = result.complete()
            at = [window] if arm.control else lengths
            losses = measured.losses(new, at, kept=folder / arm.folder / LOSSES)
            measured.add(TRAINED_ON if arm.control else method, arm.seed, losses)
            if arm == _Arm(seeds[0], False):
                adapted.model = new
        rows = pd.concat(measured.rows, ignore_index=True)
        adapted.table = make_table(rows.assign(corpus=corpus, train_length=window).to_dict("records"))
        if out is not None:
            adapted.folder = folder
            _save(adapted, tokenizer or model.config._name_or_path)
    return adapted


class Measured:
    """Losses of the same targets under all arms, as rows of the table of results.

    key: the key tokens among the targets [windows, last].
    """

    def __init__(self, tokens: Tokens, windows: Windows, last: int) -> None:
        self.tokens, self.windows, self.last = tokens, windows, last
        self.key = np.zeros((len(windows), last), bool)
        self.rows: list[pd.DataFrame] = []

    def losses(
        self,
        model: nn.Module,
        lengths: Iterable[int],
        *,
        windows: Windows | None = None,
        kept: Path | None = None,
    ) -> dict[int, np.ndarray]:
        """Losses of the targets [windows, last] at each length.

        windows: others with the same targets. kept: a file of losses that are known for the same targets.
        """
        known: dict[int, np.ndarray] = {}
        if kept is not None and kept.exists():
            with np.load(kept) as file:
                if file["last"] == self.last and np.array_equal(file["ends"], self.windows.ends):
                    known = {int(name): file[name] for name in file.files if name.isdecimal()}
        lengths = sorted(set(lengths))
        missing = [n for n in lengths if n not in known]
        if missing:
            with evaluating(model) as evaluator:
                for n in missing:
                    known[n] = losses_of_windows(
                        evaluator, self.tokens, windows or self.windows, n, self.last, None
                    )
            if kept is not None:
                arrays: dict[str, Any] = {str(n): known[n] for n in known}
                with replacing(kept) as temporary:
                    np.savez(temporary, last=self.last, ends=self.windows.ends, **arrays)
        return {n: known[n] for n in lengths}

    def add(self, method: str, seed: int, losses: dict[int, np.ndarray]) -> None:
        """Add the rows of one arm: by length, document and slice."""
        about = {"run": f"{method}, seed {seed}", "method": method, "seed": seed, "metric": "loss"}
        checksums = target_checksums(self.tokens, self.windows, self.last)
        self.rows.append(checksums.assign(**{**about, "metric": "targets"}))
        for length, values in losses.items():
            for name, chosen in ((ALL, np.ones_like(self.key)), (KEY, self.key)):
                sums = pd.DataFrame(
                    {
                        "document": self.windows.documents,
                        "sum": np.where(chosen, values, 0.0).sum(1, dtype=np.float64),
                        "count": chosen.sum(1),
                    }
                )
                sums = sums.groupby("document", as_index=False).sum()
                self.rows.append(sums.assign(length=length, slice=name, **about))


@dataclass(frozen=True)
class WithSinks(Windows):
    """Windows whose longer inputs are the first tokens, then the last ones (Xiao et al. 2023), read as one input."""

    window: int

    def ids(self, tokens: Tokens, length: int, chosen: slice = slice(None)) -> np.ndarray:
        ids = super().ids(tokens, length, chosen)
        if length <= self.window:
            return ids
        return np.concatenate([ids[:, :NUM_SINKS], ids[:, NUM_SINKS - self.window - 1 :]], 1)


class _Arm(NamedTuple):
    """A training: the base trained on, or the retrofit."""

    seed: int
    control: bool

    @property
    def title(self) -> str:
        return TRAINED_ON if self.control else "retrofit"

    @property
    def folder(self) -> str:
        return f"arms/{'control' if self.control else 'retrofit'}-seed{self.seed}"


@dataclass(frozen=True)
class _Trainings:
    """What all trainings of a retrofit share; `settings` are resolved."""

    model: PreTrainedModel
    ids: np.ndarray
    settings: AdaptSettings
    window: int
    folder: Path

    def __call__(self, arm: _Arm, *, progress: bool = False) -> tuple[FitResult, PreTrainedModel]:
        """Train an arm to its end, or as far as it is stopped; one that is trained is loaded."""
        torch.manual_seed(arm.seed)
        settings = self.settings
        length, batch_size = cast(int, settings.train_length), cast(int, settings.batch_size)
        if arm.control:
            settings, new = settings.for_control(), copy.deepcopy(self.model)
            length, batch_size = self.window, max(1, batch_size * length // self.window)
        else:
            new = _with_method(self.model, cast(str, settings.method), settings)
        task = Tuning(
            new,
            self.ids,
            train_length=length,
            batch_size=batch_size,
            seed=arm.seed,
            added_rate=settings.added_rate,
            teacher=self.model if settings.distill or settings.match_steps else None,
            distill=settings.distill,
            match_steps=settings.match_steps,
            skip_length=settings.skip_length,
        )
        folder = self.folder / arm.folder
        return fit(task, replace(settings, seed=arm.seed), folder, progress=progress), new.eval()

    def work(self, arm: _Arm) -> str:
        """Train an arm in a worker; what stopped it, if it did not come to its end."""
        return self(arm)[0].stopped_early or ""


def _with_method(model: PreTrainedModel, method: str, settings: AdaptSettings) -> PreTrainedModel:
    """A copy of the model with another method, untrained."""
    new: PreTrainedModel
    if isinstance(model, DapeForCausalLM):
        new = replace_method(model, method, width=settings.width)
    else:
        new = retrofit(copy.deepcopy(model), method, width=settings.width)
    set_trainable(new, settings.trains)
    return new


def _check_same(folder: Path, settings: AdaptSettings, about: dict[str, str]) -> None:
    """Raise if the folder holds another retrofit, or cannot be written."""
    check_output(folder, folder=True)
    path = folder / RECORD
    if not path.exists():
        return
    known = read_json(path)
    check_same_run(folder, known["settings"], settings)
    if (before := {name: known[name] for name in about}) != about:
        raise ValueError(f"{folder} holds a retrofit of {before}, not of {about}: pass another folder")


def _save(adapted: Adapted, base: str) -> None:
    """Write the model with its tokenizer, the losses as a table, the sentences and the figure."""
    assert adapted.folder is not None
    try:
        source, how = pretrained(base)
        tokenizer = AutoTokenizer.from_pretrained(source, **how) if base else None
    except (OSError, ValueError):
        tokenizer = None
    export(adapted.model, adapted.folder / WEIGHTS, tokenizer=tokenizer)
    write_table(adapted.table, adapted.folder / RESULTS)
    with replacing(adapted.folder / FIGURE) as temporary:
        adapted.report.figure().savefig(temporary)
    record = read_json(adapted.folder / RECORD)
    record |= {
        "result": adapted.report.sentences(),
        "parameters added": adapted.added,
        "training": {f"{arm}, seed {seed}": asdict(r) for (arm, seed), r in adapted.results.items()},
    }
    write_atomically(adapted.folder / RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
