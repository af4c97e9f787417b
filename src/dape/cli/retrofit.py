"""`dape retrofit`: give a pretrained model other positions and scores, and tune it briefly."""

from __future__ import annotations

import json
import math
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import dape
from dape.cli.parsing import parse
from dape.data import Tokens, prepare
from dape.devices import find_device
from dape.evaluate import evaluate_by_length
from dape.evaluate.statistics import LengthLoss, paired_difference
from dape.evaluate.windows import Context
from dape.files import read_json, write_atomically
from dape.models.export import export
from dape.names import hub_options, not_loaded
from dape.retrofitting.attach import Trains, adapter_parameters
from dape.retrofitting.attach import parse as parse_method
from dape.retrofitting.rates import ADDED_RATE
from dape.retrofitting.tuning import Tuning, sample
from dape.settings import SettingError, setting, split_numbers
from dape.training.checkpoint import check_same_run
from dape.training.config import LoopSettings
from dape.training.display import clock
from dape.training.loop import fit

DESCRIPTION = """Give a pretrained model the positions and score processor of a method, and tune it.

  dape retrofit MODEL --method dape1x3-kerple --corpus my_texts/ --out runs/longer
  dape retrofit MODEL --method dape1x3-kerple --corpus self --trains attention --match-steps 200 --distill 1

Training is at the model's own length; the table before and after goes beyond it. The same command resumes an
interrupted one. OUT/model is the retrofitted model, for dape.load_retrofitted and `dape eval hf:OUT/model`."""

RESULTS, SAMPLES = "retrofit.json", "samples.npy"
# Share of sampled text held out from training for the table.
HELD_OUT = 0.1


@dataclass(frozen=True, kw_only=True)
class Options(LoopSettings):
    model: tyro.conf.Positional[str] = setting(help="A folder, or a name on the Hugging Face hub.")
    method: str = setting(
        "dape1x3-kerple", help="Score processor and position encoding; a processor alone keeps the positions."
    )
    corpus: str = setting(
        "self",
        help="Text to train on, as for `dape data prepare`, or self: text sampled from the model.",
    )
    out: str = setting("runs/retrofit", help="Where everything goes.", writes="folder", fixes_run=False)
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
    sample_tokens: int = setting(200_000, help="Tokens to sample for --corpus self.", low=1, high=10**12)
    temperature: float = setting(0.8, help="Temperature of that sampling.", above=0, high=1e6)
    lengths: str | None = setting(
        None,
        help="Tokens of input in the table, by commas; by default 1, 2, 4 and 8 times the training length.",
        listed=int,
        low=1,
        high=2**24,
        fixes_run=False,
    )
    last: int = setting(
        64,
        help="Tokens predicted at the end of each window of the table.",
        low=1,
        high=2**24,
        fixes_run=False,
    )
    windows: int = setting(32, help="Windows of the table, at most.", low=1, high=10**9, fixes_run=False)

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths is not None and self.last > min(split_numbers("lengths", self.lengths)):
            raise SettingError("last", self.last, " is more than the shortest of --lengths")
        if self.match_steps > self.steps:
            raise SettingError("match_steps", self.match_steps, f" is more than --steps {self.steps}")


# Name of the options in tyro's error messages.
Options.__name__ = "dape retrofit"


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape retrofit", description=DESCRIPTION)
    console = Console(width=80, highlight=False, stderr=False)
    base = load_base(options.model, options.device)
    parse_method(options.method, base)
    length = training_length(options, base)
    lengths = (
        [length * n for n in (1, 2, 4, 8)] if options.lengths is None else split_numbers("", options.lengths)
    )
    if options.last > min(lengths):
        raise SettingError("last", options.last, f" is more than the shortest length {min(lengths)}")
    known = saved(options)
    if known:
        check_same_run(known["settings"], options)
    train, held_out, context = text(options, base, length, max(lengths))
    before = known.get("before")
    if before is None or known.get("table") != table_settings(options, lengths):
        before = losses_of(base, held_out, lengths, options, context, "before")
    teacher = load_base(options.model, options.device) if options.distill or options.match_steps else None
    torch.manual_seed(options.seed)
    model = dape.retrofit(base, options.method, width=options.width, trains=options.trains)
    write(options, lengths, before=before)
    task = Tuning(
        model,
        train,
        train_length=length,
        batch_size=options.batch_size,
        seed=options.seed,
        added_rate=options.added_rate,
        teacher=teacher,
        distill=options.distill,
        predicted_share=options.predicted_share,
        match_steps=options.match_steps,
        teacher_length=own_length(base),
    )
    result = fit(task, options, options.folder)
    if result.stopped_early:
        print(
            f"stopped by {result.stopped_early} at step {result.steps} of {options.steps}, saved in {options.folder}: "
            f"the same command continues"
        )
        return (
            128 + signal.Signals[result.stopped_early]
            if result.stopped_early in signal.Signals.__members__
            else 1
        )
    model.eval()
    save(model, options)
    after = losses_of(model, held_out, lengths, options, context, "after")
    added = sum(value.numel() for value in adapter_parameters(model).values())
    write(
        options,
        lengths,
        before=before,
        after=after,
        training={"steps": result.steps, "tokens": result.tokens, "seconds": round(result.seconds, 1)},
        parameters={"all": sum(value.numel() for value in model.parameters()), "added": added},
    )
    console.print(table(options, before, after))
    console.print(
        f"{added:,} parameters added; {result.steps} steps of {length} × {options.batch_size} tokens in "
        f"{clock(result.seconds)}. The model: {options.folder / 'model'}",
        soft_wrap=True,
    )
    return 0


def load_base(name: str, device: str) -> PreTrainedModel:
    """The model in float32, on its device."""
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **hub_options(name))
    except (OSError, ValueError) as error:
        raise ValueError(not_loaded("causal language model", name, error)) from error
    if getattr(model.config, "dape_retrofit", None):
        raise ValueError(f"{name} is already retrofitted: name its base, or train it on with Trainer")
    return model.to(find_device(device)).eval()  # type: ignore[arg-type]  # as in harness.py


def training_length(options: Options, model: PreTrainedModel) -> int:
    length = options.train_length or own_length(model)
    if length is None:
        raise ValueError(f"{options.model} does not say its training length: give --train-length")
    return int(length)


def own_length(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def text(
    options: Options, model: PreTrainedModel, length: int, longest: int
) -> tuple[np.ndarray, Tokens, Context]:
    """Token ids to train on, held-out documents, and whether their context may run across documents."""
    if options.corpus != "self":
        data = prepare(options.corpus, options.folder / "data", tokenizer=options.model, seed=options.seed)
        return data.train.ids, data.validation, "document"
    # Beyond its own length the base samples no usable text.
    length = min(length, own_length(model) or length)
    rows = -(-options.sample_tokens // length)
    kept, needed = max(1, round(rows * HELD_OUT)), -(-(longest + 1) // length)
    if kept < needed:
        raise SettingError(
            "sample_tokens",
            options.sample_tokens,
            f" leaves {kept * length} tokens for the table, whose longest input needs {longest + 1}: sample "
            f"{math.ceil((needed + 1) / HELD_OUT) * length}, or give shorter --lengths",
        )
    path, about = options.folder / SAMPLES, options.folder / "samples.json"
    recipe = {
        "model": options.model,
        "tokens": options.sample_tokens,
        "length": length,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    if about.exists() and read_json(about) != recipe:
        raise ValueError(f"{path} was sampled with other settings: give another --out")
    if not about.exists():
        say = sys.stderr.isatty()
        ids = sample(
            model,
            rows,
            length,
            temperature=options.temperature,
            seed=options.seed,
            progress=lambda done: (
                print(f"\rsampled {done} of {rows} windows", end="", file=sys.stderr) if say else None
            ),
        )
        options.folder.mkdir(parents=True, exist_ok=True)
        np.save(path, ids)
        write_atomically(about, json.dumps(recipe, indent=1))
    documents = np.load(path)
    return documents[kept:].reshape(-1), Tokens.of(list(documents[:kept])), "stream"


def losses_of(
    model: nn.Module, tokens: Tokens, lengths: list[int], options: Options, context: Context, name: str
) -> list[dict[str, Any]]:
    """Loss by length on the same target tokens, with the means of windows for paired differences."""
    print(f"{name}: loss at {', '.join(map(str, lengths))} tokens", file=sys.stderr)
    results = evaluate_by_length(
        model, tokens, lengths, last=options.last, windows=options.windows, context=context
    )
    return [{**_plain(loss), "eval_length": loss.eval_length} for loss in results]


def _plain(loss: LengthLoss) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in asdict(loss).items()
    }


def _length_loss(record: dict[str, Any]) -> LengthLoss:
    arrays = {name: np.asarray(record[name]) for name in ("windows", "documents", "ends")}
    return LengthLoss(**{**record, **arrays})


def table(options: Options, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Table:
    drawn = Table(title=f"{options.model} → {options.method}: loss of the last {options.last} tokens")
    for heading in ("length", "before", "after", "change (paired)", "after, perplexity"):
        drawn.add_column(heading, justify="right")
    for old, new in zip(map(_length_loss, before), map(_length_loss, after), strict=True):
        change, error = paired_difference(new, old)
        drawn.add_row(
            str(new.eval_length),
            f"{old.nll:.3f}",
            f"{new.nll:.3f}",
            f"{change:+.3f} ± {error:.3f}" if math.isfinite(error) else f"{change:+.3f}",
            f"{new.ppl:.2f}",
        )
    return drawn


def save(model: PreTrainedModel, options: Options) -> None:
    """Write OUT/model, with the tokenizer if the base has one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model, **hub_options(options.model))
    except (OSError, ValueError):
        tokenizer = None
    export(model, options.folder / "model", tokenizer=tokenizer)


def saved(options: Options) -> dict[str, Any]:
    path = options.folder / RESULTS
    return read_json(path) if path.exists() else {}


def table_settings(options: Options, lengths: list[int]) -> dict[str, Any]:
    return {
        "model": options.model,
        "corpus": options.corpus,
        "lengths": lengths,
        "last": options.last,
        "windows": options.windows,
        "seed": options.seed,
    }


def write(options: Options, lengths: list[int], **content: Any) -> None:
    record = {"settings": asdict(options), "table": table_settings(options, lengths), **content}
    options.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(options.folder / RESULTS, json.dumps(record, indent=1) + "\n")
