"""`adapt`: retrofit a pretrained model, tune it, and compare it with the best use of the base's own window.

A flat curve alone shows nothing: an input cut to the base's window has one for free. So the result always holds the
base cut to its window, how much the base uses its context at all, and, with `control`, the base trained on for as long.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from dape.data import TokenData, Tokens, prepare
from dape.evaluation.by_length import WindowLosses, losses_of_windows
from dape.evaluation.evaluator import evaluating
from dape.evaluation.statistics import clustered_mean, perplexity
from dape.evaluation.windows import Context, Windows, same_targets
from dape.files import check_output, read_json, replacing, write_atomically
from dape.hub import hub_options
from dape.methods import parse_layers, split_outside_brackets
from dape.models import DapeForCausalLM
from dape.models.export import export
from dape.positions import PositionEncoding
from dape.retrofitting.attach import Trains, is_retrofitted, retrofit
from dape.retrofitting.attach import parse_plan as parse_method
from dape.retrofitting.rates import ADDED_RATE
from dape.retrofitting.replace_method import replace_method
from dape.retrofitting.tuning import Tuning, sample
from dape.scores import ScoreProcessor
from dape.settings import SettingError, setting, split_numbers
from dape.training.checkpoint import check_same_run
from dape.training.config import LoopSettings
from dape.training.loop import FitResult, fit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Share of sampled text held out from training for the table.
HELD_OUT = 0.1
# A target is a key token if the later half of the base's window lowers its loss by more than this many nats.
KEY_GAIN = 0.5
BASE, TRAINED_ON, RETROFIT = "base", "base trained on", "retrofit"
WEIGHTS, LOSSES, FIGURE, RECORD = "model", "losses.csv", "perplexity.svg", "retrofit.json"


@dataclass(frozen=True, kw_only=True)
class AdaptSettings(LoopSettings):
    """How a model is retrofitted, tuned and evaluated."""

    method: str = setting(
        "dape1x3-kerple", help="Score processor and position encoding; a processor alone keeps the positions."
    )
    steps: int = setting(300, help="Optimizer steps in all.", low=1, high=10**9)
    learning_rate: float = setting(
        1e-3, help="Highest learning rate of the base's own parameters.", above=0, high=1000
    )
    final_learning_rate: float | None = setting(  # type: ignore[assignment]  # derived where it is not given
        None,
        help="Learning rate of the last step; by default 1e-4, or the highest if less.",
        low=0,
        high=1000,
    )
    warmup_steps: int | None = setting(  # type: ignore[assignment]  # as above
        None, help="Steps of linear warm-up; by default 6 % of the steps.", low=0, high=10**9
    )
    weight_decay: float = setting(0.01, help="Decay of the base's weight matrices.", low=0, high=1000)
    added_rate: float = setting(
        ADDED_RATE, help="Learning-rate multiplier of the added parameters.", above=0, high=1e6
    )
    trains: Trains = setting(
        "all", help="Trainable parameters: all, those of attention layers, or added ones."
    )
    width: int = setting(32, help="Hidden channels of the score processor.", low=1, high=2**16)
    train_length: int | None = setting(
        None, help="Tokens of a training window; by default the model's own length.", low=2, high=2**24
    )
    batch_size: int = setting(8, help="Windows in a step.", low=1, high=2**24)
    distill: float = setting(
        0.0,
        help="Share of distillation in the loss: the divergence from the base's predictions.",
        low=0,
        high=1,
    )
    predicted_share: float = setting(
        1.0,
        help="Share of a window's positions whose next token is predicted, drawn anew in each step.",
        above=0,
        high=1,
    )
    match_steps: int = setting(
        0,
        help="Number of initial steps that fit each attention layer to the output of the base's.",
        low=0,
        high=10**9,
    )
    control: bool = setting(
        False,
        help="Also train the base itself for as many steps, and cut its input: what more training alone brings.",
    )
    untrained: str | None = setting(
        None,
        help="Methods to compare with without training, separated by commas, such as rope[scaling=yarn,factor=8]; rope-scalings "
        "stands for position interpolation, NTK, dynamic NTK, YaRN and, in our own models, a window of keys.",
        fixes_run=False,
    )
    sample_tokens: int = setting(
        200_000, help="Tokens to sample if the text is the model's own.", low=1, high=10**12
    )
    temperature: float = setting(0.8, help="Temperature of that sampling.", above=0, high=1e6)
    lengths: str | None = setting(
        None,
        help="Tokens of input in the table, by commas; by default 1, 2, 4 and 8 times the model's own length.",
        listed=int,
        low=1,
        high=2**24,
        fixes_run=False,
    )
    last: int | None = setting(
        None,
        help="Tokens predicted at the end of each window of the table; by default a quarter of the model's own "
        "length, at most 64.",
        low=1,
        high=2**24,
        fixes_run=False,
    )
    windows: int = setting(32, help="Windows of the table, at most.", low=1, high=10**9, fixes_run=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.match_steps > self.steps:
            raise SettingError("match_steps", self.match_steps, f" exceeds steps={self.steps}")

    def untrained_list(self, window: int, *, own: bool) -> list[str]:
        """Methods that the base's weights are read with as they are. own: the base is one of our models."""
        if self.untrained is None:
            return []
        names = split_outside_brackets(self.untrained, ",")
        factor = f"factor={max(self.length_list(window)) / window:g}"
        known = [f"rope[scaling={kind},{factor}]" for kind in ("linear", "ntk")]
        known += [f"rope[scaling={kind},{factor},original_length={window}]" for kind in ("dynamic", "yarn")]
        # A retrofit of another's model keeps that model's windows.
        known += [f"rope[window={window}]"] if own else []
        return [name for given in names for name in (known if given == "rope-scalings" else [given])]

    def length_list(self, window: int) -> list[int]:
        """Lengths of the table, the window among them."""
        if self.lengths is None:
            return [window * times for times in (1, 2, 4, 8)]
        return sorted({window, *split_numbers("lengths", self.lengths)})

    def num_last(self, window: int) -> int:
        return min(64, max(1, window // 4)) if self.last is None else self.last


@dataclass
class Adapted:
    """A retrofitted model, and its losses beside those of its base, all on the same target tokens.

    window: tokens that the base was made for. losses: by arm ("base", "base trained on", "retrofit") and length.
    """

    model: PreTrainedModel
    method: str
    window: int
    losses: dict[str, WindowLosses]
    results: dict[str, FitResult] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def lengths(self) -> list[int]:
        return sorted(self.losses[RETROFIT].losses)

    @property
    def added(self) -> int:
        """Number of parameters that the base does not have."""
        new = (m for m in self.model.modules() if isinstance(m, PositionEncoding | ScoreProcessor))
        return sum(value.numel() for value in {p for module in new for p in module.parameters()})

    @cached_property
    def key_tokens(self) -> np.ndarray:
        """Targets [n, last] whose loss under the base falls by KEY_GAIN or more from half of its window to all of it."""
        base = self.losses[BASE].losses
        return base[self.window // 2] - base[self.window] > KEY_GAIN

    def gain(self, length: int, *, over: str = BASE, keys: bool = False) -> tuple[float, float]:
        """Loss of an arm cut to the window minus that of the retrofit at `length`, and its standard error over documents.

        keys: over key tokens alone.
        """
        windows = self.losses[RETROFIT].windows
        difference = self.losses[over].losses[self.window] - self.losses[RETROFIT].losses[length]
        chosen = self.key_tokens if keys else np.ones(difference.shape, bool)
        sums, counts = np.where(chosen, difference, 0.0).sum(1, dtype=np.float64), chosen.sum(1)
        return clustered_mean(sums, counts, windows.documents) if counts.any() else (math.nan, math.nan)

    def uses_context(self) -> tuple[float, float]:
        """Loss of the base with half of its window minus its loss with all of it, and the standard error."""
        base = self.losses[BASE]
        difference = (base.losses[self.window // 2] - base.losses[self.window]).mean(1, dtype=np.float64)
        return clustered_mean(difference, np.ones(len(difference)), base.windows.documents)

    def sentences(self) -> list[str]:
        """What the numbers say: the base's use of its context, and the gain over the base cut to its window."""
        base = self.losses[BASE].losses
        parts = {n: base[n].mean(dtype=np.float64) for n in (self.window // 4, self.window // 2, self.window)}
        trail = ", ".join(f"{loss:.3f} with {n}" for n, loss in parts.items())
        used, error = self.uses_context()
        said = [f"The base's loss is {trail} tokens of input."]
        if not used > 2 * error:
            said.append(
                f"It makes no measurable use of the later half of its window ({used:+.3f} ± {error:.3f}): on this text a "
                "longer input has little to give, and a flat curve would show nothing."
            )
        longest = self.lengths[-1]
        arm = TRAINED_ON if TRAINED_ON in self.losses else BASE
        gain, error = self.gain(longest, over=arm)
        best = (
            f"the {arm} for as many steps, cut to {self.window}"
            if arm != BASE
            else f"the base cut to {self.window}"
        )
        if abs(gain) > 2 * error:
            word = "below" if gain > 0 else "above"
            said.append(
                f"At {longest} tokens the retrofit's loss is {abs(gain):.3f} ± {error:.3f} {word} that of {best} "
                f"({100 * math.expm1(-gain):+.0f} % perplexity); one seed, errors over documents."
            )
        else:
            said.append(
                f"At {longest} tokens the retrofit and {best} are not apart ({-gain:+.3f} ± {error:.3f}; one seed)."
            )
        if arm == BASE:
            said.append("How much of this is the training itself, a run with --control shows.")
        return said

    @property
    def frame(self) -> pd.DataFrame:
        """The losses as rows of the table of results: sums and counts by arm, length, document and slice."""
        import pandas as pd

        rows = []
        for arm, measured in self.losses.items():
            for length, losses in measured.losses.items():
                for document in np.unique(measured.windows.documents):
                    of = (measured.windows.documents == document)[:, None]
                    for name, chosen in (("all", np.ones_like(self.key_tokens)), ("key", self.key_tokens)):
                        mask = of & chosen
                        rows.append(
                            {
                                "run": arm,
                                "method": {RETROFIT: self.method}.get(
                                    arm, "base" if arm in (BASE, TRAINED_ON) else arm
                                ),
                                "train_length": self.window,
                                "length": length,
                                "document": int(document),
                                "slice": name,
                                "metric": "loss",
                                "sum": float(losses[mask].sum(dtype=np.float64)),
                                "count": int(mask.sum()),
                            }
                        )
        return pd.DataFrame(rows)

    def rows(self) -> list[tuple[str, list[str]]]:
        """The table's rows as text: a label, and a cell for each length."""
        keys = self.key_tokens.mean()
        rows = [
            (BASE, [_ppl(self.losses[BASE].losses[n]) for n in self.lengths]),
            (
                f"base, cut to {self.window}",
                [_ppl(self.losses[BASE].losses[self.window])] * len(self.lengths),
            ),
        ]
        if TRAINED_ON in self.losses:
            own = _ppl(self.losses[TRAINED_ON].losses[self.window])
            rows.append((f"{TRAINED_ON}, cut to {self.window}", [own] * len(self.lengths)))
        for arm in self.losses:
            if arm not in (BASE, TRAINED_ON, RETROFIT):
                rows.append((f"{arm}, untrained", [_ppl(self.losses[arm].losses[n]) for n in self.lengths]))
        rows.append(
            (f"retrofit ({self.method})", [_ppl(self.losses[RETROFIT].losses[n]) for n in self.lengths])
        )
        over = TRAINED_ON if TRAINED_ON in self.losses else BASE
        rows.append((f"loss − {over}, cut", [_change(self.gain(n, over=over)) for n in self.lengths]))
        if self.key_tokens.any():
            label = f"… on key tokens ({100 * keys:.0f} %)"
            rows.append((label, [_change(self.gain(n, over=over, keys=True)) for n in self.lengths]))
        return rows

    def table(self) -> Any:
        """The rows as a rich table of perplexities, and paired differences of the loss."""
        from rich.table import Table

        drawn = Table("perplexity at", *(str(n) for n in self.lengths), title=None)
        for column in drawn.columns[1:]:
            column.justify = "right"
        for label, cells in self.rows():
            drawn.add_row(label, *cells, style="bold" if label.startswith(RETROFIT) else "")
        return drawn

    def figure(self) -> Figure:
        """Perplexity by length: the base, the base cut to its window, and the retrofit."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for label, arm in (("base", BASE), (f"retrofit ({self.method})", RETROFIT)):
            axes.plot(
                self.lengths,
                [np.exp(self.losses[arm].losses[n].mean()) for n in self.lengths],
                marker="o",
                label=label,
            )
        for arm, label in ((BASE, BASE), (TRAINED_ON, TRAINED_ON)):
            if arm in self.losses:
                value = np.exp(self.losses[arm].losses[self.window].mean())
                axes.axhline(
                    value,
                    linestyle=":" if arm == BASE else "--",
                    color="gray",
                    label=f"{label}, cut to {self.window}",
                )
        axes.set(xscale="log", yscale="log", xlabel="tokens of input", ylabel="perplexity")
        axes.set_xticks(self.lengths, map(str, self.lengths), minor=False)
        axes.minorticks_off()
        axes.legend(frameon=False)
        return figure


def _ppl(losses: np.ndarray) -> str:
    return f"{perplexity(float(losses.mean(dtype=np.float64))):.2f}"


def _change(gain: tuple[float, float]) -> str:
    value, error = gain
    return f"{-value:+.2f} ± {error:.2f}" if math.isfinite(error) else f"{-value:+.2f}"


def adapt(
    model: PreTrainedModel,
    method: str = "dape1x3-kerple",
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
    texts:     a corpus as for `dape data prepare`, packed token data, or "self": text sampled from the model.
    tokenizer: folder or name of the model's tokenizer; by default that of the model.
    window:    tokens that the model was made for; by default what its configuration says.
    out:       folder of checkpoints, the model and the results; the same call resumes there. None: nothing is kept.
    options:   fields of `AdaptSettings`, such as steps=300, learning_rate=1e-3, match_steps=100, control=True.

    The model needs text with a past: a base whose loss does not fall with its context has nothing to gain from more.
    """
    settings = settings or AdaptSettings(method=method, **options)
    if is_retrofitted(model):
        raise ValueError("the model is already retrofitted: give its base")
    window = window or own_length(model)
    if window is None:
        raise ValueError("the model's configuration names no training length: give window=")
    if window < 8:
        raise ValueError(f"window={window}: at least 8 tokens are needed to measure the use of context")
    lengths, last = settings.length_list(window), settings.num_last(window)
    if last > min(window // 4, *lengths):
        raise SettingError("last", last, f" is more than the shortest length {min(window // 4, *lengths)}")
    own = isinstance(model, DapeForCausalLM)
    untrained = settings.untrained_list(window, own=own)
    for name in (settings.method, *untrained):
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
        chosen = same_targets(held_out, max(lengths), last, settings.windows, context=context)

        def measure(subject: nn.Module, at: Iterable[int], kept: Path | None = None) -> WindowLosses:
            return _measured(subject, held_out, chosen, sorted(set(at)), last, kept)

        at = [window // 4, window // 2, window, *lengths]
        adapted = Adapted(model, settings.method, window, {BASE: measure(model, at, folder / "base.npz")})
        if settings.control:
            adapted.results[TRAINED_ON], again = _trained_on(model, ids, settings, window, folder, progress)
            adapted.losses[TRAINED_ON] = measure(again, [window])
            del again
        for name in untrained:
            adapted.losses[name] = measure(_with_method(model, name, settings).eval(), lengths)
        torch.manual_seed(settings.seed)
        new = _with_method(model, settings.method, settings)
        task = Tuning(
            new,
            ids,
            train_length=settings.train_length or window,
            batch_size=settings.batch_size,
            seed=settings.seed,
            added_rate=settings.added_rate,
            teacher=model if settings.distill or settings.match_steps else None,
            distill=settings.distill,
            predicted_share=settings.predicted_share,
            match_steps=settings.match_steps,
            teacher_length=window,
        )
        adapted.results[RETROFIT] = fit(task, settings, folder, progress=progress).complete()
        adapted.model = new.eval()
        adapted.losses[RETROFIT] = measure(new, lengths)
        if out is not None:
            adapted.folder = folder
            _save(adapted, tokenizer or model.config._name_or_path)
    return adapted


def own_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model was made for, if its configuration says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _with_method(model: PreTrainedModel, method: str, settings: AdaptSettings) -> PreTrainedModel:
    """A copy of the model with another method, untrained."""
    if isinstance(model, DapeForCausalLM):
        return replace_method(model, method, width=settings.width)
    return retrofit(copy.deepcopy(model), method, width=settings.width, trains=settings.trains)


def _trained_on(
    model: PreTrainedModel,
    ids: np.ndarray,
    settings: AdaptSettings,
    window: int,
    folder: Path,
    progress: bool,
) -> tuple[FitResult, PreTrainedModel]:
    """The base after as many steps on as many tokens of its own window, unchanged in method."""
    again = copy.deepcopy(model)
    tokens = settings.batch_size * (settings.train_length or window)
    task = Tuning(again, ids, train_length=window, batch_size=max(1, tokens // window), seed=settings.seed)
    result = fit(task, replace(settings, match_steps=0, distill=0.0), folder / "base", progress=progress)
    return result.complete(), again.eval()


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
            raise ValueError(
                "the model does not say where its tokenizer is: give tokenizer=, or packed token data"
            )
        data = prepare(texts, folder / "data", tokenizer=source, seed=settings.seed, progress=progress)
        return data.train.ids, data.validation, "document"
    # Beyond its own length the base samples no usable text.
    length = min(settings.train_length or window, window)
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


def _measured(
    model: nn.Module, tokens: Tokens, windows: Windows, lengths: Sequence[int], last: int, kept: Path | None
) -> WindowLosses:
    """Losses of the windows at each length; kept: a file of those that are known for the same targets."""
    known: dict[int, np.ndarray] = {}
    if kept is not None and kept.exists():
        with np.load(kept) as file:
            if file["last"] == last and np.array_equal(file["ends"], windows.ends):
                known = {int(name): file[name] for name in file.files if name.isdecimal()}
    missing = [n for n in lengths if n not in known]
    if missing:
        with evaluating(model) as evaluator:
            known |= {n: losses_of_windows(evaluator, tokens, windows, n, last, None) for n in missing}
        if kept is not None:
            arrays: dict[str, Any] = {str(n): known[n] for n in known}
            with replacing(kept) as temporary:
                np.savez(temporary, last=last, ends=windows.ends, **arrays)
    return WindowLosses(windows, last, {n: known[n] for n in lengths})


def _check_same(folder: Path, settings: AdaptSettings, about: dict[str, str]) -> None:
    """Raise if the folder holds another retrofit, or cannot be written."""
    check_output(folder, folder=True)
    path = folder / RECORD
    if not path.exists():
        return
    known = read_json(path)
    check_same_run(known["settings"], settings)
    if (before := {name: known[name] for name in about}) != about:
        raise ValueError(f"{folder} holds a retrofit of {before}, now {about} is given: give another folder")


def _save(adapted: Adapted, base: str) -> None:
    """Write the model with its tokenizer, the losses as a table, the sentences and the figure."""
    assert adapted.folder is not None
    try:
        tokenizer = AutoTokenizer.from_pretrained(base, **hub_options(base)) if base else None
    except (OSError, ValueError):
        tokenizer = None
    export(adapted.model, adapted.folder / WEIGHTS, tokenizer=tokenizer)
    with replacing(adapted.folder / LOSSES) as temporary:
        adapted.frame.to_csv(temporary, index=False)
    with replacing(adapted.folder / FIGURE) as temporary:
        adapted.figure().savefig(temporary)
    record = read_json(adapted.folder / RECORD)
    record |= {
        "result": [*adapted.sentences()],
        "parameters added": adapted.added,
        "training": {arm: asdict(result) for arm, result in adapted.results.items()},
    }
    write_atomically(adapted.folder / RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
