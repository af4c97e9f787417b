"""`dape bench eval`: time and peak memory of evaluating a preset by length."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from dape.bench import report
from dape.cli.parsing import parse
from dape.data import Tokens
from dape.evaluate import evaluate_by_length
from dape.models import DapeForCausalLM, preset
from dape.settings import setting

COLUMNS: list[report.Column] = [
    ("method", "method", ""),
    ("length", "length", "d"),
    ("windows", "windows", "d"),
    ("seconds", "seconds", ".1f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("weights GB", "weights_gb", ".2f"),
    ("peak GB", "peak_gb", ".2f"),
]


@dataclass(frozen=True)
class Options:
    """Evaluate a model with random weights on random tokens; the peak is that of the whole process so far."""

    preset: str = setting("125m", help="tiny, 125m, 350m, 2.7b or 6.7b.")
    method: str = setting("dape1x3-kerple", help="Method of the model; `dape methods` lists them.")
    lengths: str = setting(
        "512,8192",
        help="Tokens of input, separated by commas, in rising order (a peak never falls).",
        listed=int,
        low=1,
        high=2**24,
    )
    windows: int = setting(
        16,
        help="Windows of each length; memory depends on those in one forward pass.",
        low=1,
        high=10**9,
    )
    last: int = setting(256, help="Tokens predicted at the end of each window.", low=1, high=2**24)
    threads: int = setting(0, help="Threads of PyTorch; 0 for its default.", low=0, high=4096)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = setting(
        None, help="Write one record per length.", writes="file"
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape bench eval")
    records = run(options)
    report.print_table(f"evaluating {options.preset}, last {options.last} tokens", COLUMNS, records)
    if options.json is not None:
        report.write_json(options.json, records)
    return 0


def run(options: Options) -> list[report.Record]:
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = DapeForCausalLM(preset(options.preset, options.method))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 1e9
    return [measure(model, int(length), options, weights) for length in options.lengths.split(",")]


def measure(model: DapeForCausalLM, length: int, options: Options, weights: float) -> report.Record:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, model.config.vocab_size, length + 1) for _ in range(options.windows)]
    start = time.perf_counter()
    evaluate_by_length(
        model, Tokens.of(documents), [length], last=min(options.last, length), windows=options.windows
    )
    seconds = time.perf_counter() - start
    return {
        "method": options.method,
        "length": length,
        "windows": options.windows,
        "seconds": seconds,
        "tokens_per_second": options.windows * length / seconds,
        "weights_gb": weights,
        "peak_gb": peak_bytes() / 1e9,
    }


def peak_bytes() -> int:
    """Peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
