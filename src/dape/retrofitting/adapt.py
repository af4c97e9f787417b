"""`adapt`: retrofit a pretrained model, tune it, and compare it with the best use of the base's own window.

A flat curve alone shows nothing: an input cut to the base's window has one for free. So the result always holds the
base cut to its window, how much the base uses its context at all, and, with `control`, the base trained on for as long.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from dape.data import TokenData, Tokens, open_data, prepare
from dape.evaluation.by_length import KEY_GAIN, context_lengths
from dape.evaluation.evaluator import evaluating
from dape.evaluation.metrics import target_checksums
from dape.evaluation.table import ALL, make_table, write_table
from dape.evaluation.windows import Context, Windows, same_targets
from dape.files import check_output, read_json, replacing, write_atomically
from dape.hub import hub_options
from dape.methods import parse_layers
from dape.models import DapeForCausalLM
from dape.models.export import export
from dape.positions import PositionEncoding
from dape.retrofitting.attach import is_retrofitted, retrofit
from dape.retrofitting.attach import parse_plan as parse_method
from dape.retrofitting.positions import rotary_modules
from dape.retrofitting.replace_method import replace_method
from dape.retrofitting.report import BASE, KEY, TRAINED_ON, UNTRAINED, Report
from dape.retrofitting.settings import SINKS, AdaptSettings
from dape.retrofitting.tuning import Tuning, sample
from dape.scores import ScoreProcessor
from dape.settings import SettingError
from dape.training.checkpoint import check_same_run
from dape.training.config import FitResult, TrainingStopped
from dape.training.loop import fit

# Share of sampled text held out from training for the table.
HELD_OUT = 0.1
# First tokens that "sinks" keeps of an input that it cuts.
NUM_SINKS = 4
WEIGHTS, RESULTS, FIGURE, RECORD = "model", "results.csv.gz", "perplexity.svg", "retrofit.json"


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
        new = (m for m in self.model.modules() if isinstance(m, PositionEncoding | ScoreProcessor))
        return sum(value.numel() for value in {p for module in new for p in module.parameters()})


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
    texts:     a corpus as for `dape data prepare`, packed token data or its folder, or "self": text that the model samples.
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
    window = window or own_length(model)
    if window is None:
        raise ValueError("the model's configuration has no training length: pass window=")
    if window < 8:
        raise ValueError(f"window={window}: at least 8 tokens are needed to measure the use of context")
    own = isinstance(model, DapeForCausalLM)
    rotates = "rope" in model.config.method if own else bool(rotary_modules(model))
    settings = settings.resolved(window, rotates=rotates)
    assert (
        settings.method is not None and settings.train_length is not None and settings.batch_size is not None
    )
    lengths, last = settings.length_list(window), settings.num_last(window)
    if last > min(window // 4, *lengths):
        raise SettingError("last", last, f" is more than the shortest length {min(window // 4, *lengths)}")
    untrained = settings.untrained_list(window, own=own)
    for name in (settings.method, *untrained):
        if name != SINKS:
            parse_layers(name) if own else parse_method(name, model)
    about = {"base": model.config._name_or_path, "texts": str(getattr(texts, "folder", texts))}
    with contextlib.ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dape-adapt-")))
        else:
            folder = Path(out)
            _check_same(folder, settings, about)
        ids, held_out, context = _text(
            texts, model, tokenizer, folder, settings, window, max(lengths), progress
        )
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / RECORD).exists():
            record = {**about, "settings": asdict(settings)}
            write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")
        measured = Measured(
            held_out, same_targets(held_out, max(lengths), last, settings.windows, context=context), last
        )
        base = measured.losses(model, [*context_lengths(window), *lengths], kept=folder / "base.npz")
        measured.key = base[window // 2] - base[window] > KEY_GAIN
        seeds = [settings.seed + number for number in range(settings.seeds)]
        for seed in seeds:
            measured.add(BASE, seed, base)
        for name in untrained:
            if name == SINKS:
                measured.add(name + UNTRAINED, seeds[0], measured.losses(model, lengths, window=window))
            else:
                read = _with_method(model, name, settings).eval()
                measured.add(name + UNTRAINED, seeds[0], measured.losses(read, lengths))
        arms = [
            _Arm(*arm) for arm in itertools.product(seeds, (True, False)) if settings.control or not arm[1]
        ]
        train = partial(_train, model, ids, settings, window, folder)
        if settings.jobs > 1:
            # Each in a process of its own; below, they are found trained.
            with _pool(min(settings.jobs, len(arms))) as pool:
                for arm, stopped in zip(arms, pool.map(partial(_work, train), arms), strict=True):
                    if stopped:
                        raise TrainingStopped(f"{arm.title}: {stopped}")
        adapted = Adapted(model, window, make_table())
        for arm in arms:
            result, new = train(arm, progress=progress)
            adapted.results[arm.title, arm.seed] = result.complete()
            at = [window] if arm.control else lengths
            measured.add(TRAINED_ON if arm.control else settings.method, arm.seed, measured.losses(new, at))
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
        window: int | None = None,
        kept: Path | None = None,
    ) -> dict[int, np.ndarray]:
        """Losses of the targets [windows, last] at each length.

        window: inputs are cut to so many tokens, the first four among them (sinks).
        kept: a file of those that are known for the same targets.
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
                for length in missing:
                    size = evaluator.batch_size(window or length, self.last)
                    parts = []
                    for start in range(0, len(self.windows), size):
                        ids = self.windows.ids(self.tokens, length, slice(start, start + size))
                        parts.append(
                            evaluator.losses(ids if window is None else with_sinks(ids, window), self.last)
                        )
                    known[length] = np.concatenate(parts)
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


def with_sinks(ids: np.ndarray, window: int) -> np.ndarray:
    """Ids [n, window + 1]: the first tokens of longer inputs, then the last ones (Xiao et al. 2023), read as one input."""
    if ids.shape[1] <= window + 1:
        return ids
    return np.concatenate([ids[:, :NUM_SINKS], ids[:, NUM_SINKS - window - 1 :]], 1)


class _Arm(NamedTuple):
    """A training: the base trained on, or the retrofit."""

    seed: int
    control: bool

    @property
    def title(self) -> str:
        return TRAINED_ON if self.control else "retrofit"


def _train(
    model: PreTrainedModel,
    ids: np.ndarray,
    settings: AdaptSettings,
    window: int,
    folder: Path,
    arm: _Arm,
    *,
    progress: bool = False,
) -> tuple[FitResult, PreTrainedModel]:
    """Train an arm to its end, or as far as it is stopped; one that is trained is loaded."""
    assert (
        settings.method is not None and settings.train_length is not None and settings.batch_size is not None
    )
    torch.manual_seed(arm.seed)
    method, length, batch_size = settings.method, settings.train_length, settings.batch_size
    if arm.control:
        settings, new = settings.for_control(), copy.deepcopy(model)
        length, batch_size = window, max(1, batch_size * length // window)
    else:
        new = _with_method(model, method, settings)
    task = Tuning(
        new,
        ids,
        train_length=length,
        batch_size=batch_size,
        seed=arm.seed,
        added_rate=settings.added_rate,
        teacher=model if settings.distill or settings.match_steps else None,
        distill=settings.distill,
        predicted_share=settings.predicted_share,
        match_steps=settings.match_steps,
        teacher_length=window,
    )
    place = folder / "arms" / f"{'control' if arm.control else 'retrofit'}-seed{arm.seed}"
    result = fit(task, replace(settings, seed=arm.seed), place, progress=progress)
    return result, new.eval()


def _pool(jobs: int) -> Any:
    """Worker processes that share the cores."""
    threads = max(1, torch.get_num_threads() // jobs)
    return multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (threads,))


def _work(train: Callable[[_Arm], tuple[FitResult, Any]], arm: _Arm) -> str:
    """Train an arm in a worker; what stopped it, if it did not come to its end."""
    return train(arm)[0].stopped_early or ""


def own_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model was made for, if its configuration says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _with_method(model: PreTrainedModel, method: str, settings: AdaptSettings) -> PreTrainedModel:
    """A copy of the model with another method, untrained."""
    if isinstance(model, DapeForCausalLM):
        return replace_method(model, method, width=settings.width)
    return retrofit(copy.deepcopy(model), method, width=settings.width, trains=settings.trains)


def _text(
    texts: str | TokenData,
    model: PreTrainedModel,
    tokenizer: str | None,
    folder: Path,
    settings: AdaptSettings,
    window: int,
    longest: int,
    progress: bool,
) -> tuple[np.ndarray, Tokens, Context]:
    """Token ids to train on, held-out documents, and whether their context may run across documents."""
    if isinstance(texts, TokenData):
        return texts.train.ids, texts.validation, "document"
    if texts != "self":
        source = tokenizer or model.config._name_or_path
        if not source:
            raise ValueError("the model does not name its tokenizer: pass tokenizer=, or packed token data")
        data = prepare(texts, folder / "data", tokenizer=source, seed=settings.seed, progress=progress)
        return data.train.ids, data.validation, "document"
    # Beyond its own length the base samples no usable text.
    length = window
    rows = -(-settings.sample_tokens // length)
    kept, needed = max(1, round(rows * HELD_OUT)), -(-(longest + 1) // length)
    if kept < needed:
        raise SettingError(
            "sample_tokens",
            settings.sample_tokens,
            f" leaves {kept * length} tokens for the table, whose longest input needs {longest + 1}: sample "
            f"{math.ceil((needed + 1) / HELD_OUT) * length}, or give shorter lengths",
        )
    path = folder / "samples.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        ids = sample(
            model,
            rows,
            length,
            temperature=settings.temperature,
            seed=settings.seed,
            progress=(lambda done: print(f"sampled {done} of {rows} windows", file=sys.stderr))
            if progress
            else None,
        )
        with replacing(path) as temporary:
            np.save(temporary, ids)
    documents = np.load(path)
    return documents[kept:].reshape(-1), Tokens.of(list(documents[:kept])), "stream"


def _check_same(folder: Path, settings: AdaptSettings, about: dict[str, str]) -> None:
    """Raise if the folder holds another retrofit, or cannot be written."""
    check_output(folder, folder=True)
    path = folder / RECORD
    if not path.exists():
        return
    known = read_json(path)
    check_same_run(folder, known["settings"], settings)
    if (before := {name: known[name] for name in about}) != about:
        raise ValueError(
            f"{folder} holds a retrofit of {before}, now {about} was requested: pass another folder"
        )


def _save(adapted: Adapted, base: str) -> None:
    """Write the model with its tokenizer, the losses as a table, the sentences and the figure."""
    assert adapted.folder is not None
    try:
        tokenizer = AutoTokenizer.from_pretrained(base, **hub_options(base)) if base else None
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
