"""Evaluation of a model on the suite: examples that fill a length, and whether greedy decoding gives the answer."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from dape.evaluation.evaluator import evaluating
from dape.evaluation.metrics import METRICS
from dape.evaluation.probes import NOISE, PROBES, Example
from dape.evaluation.table import join, make_table, read_table, write_table

Encode = Callable[[str], Sequence[int]]
LARGEST = 1 << 20


def fill(
    task: str, length: int, seed: str, encode: Encode, haystack: tuple[str, ...] = NOISE
) -> tuple[list[int], list[int]] | None:
    """Prompt and answer as tokens: the longest example for the seed that fits into `length`; None if none does."""

    def example_of(size: int) -> tuple[list[int], list[int]]:
        example = PROBES[task].write(_draw(task, seed), size, haystack)
        return _tokens(example, encode)

    def fits(size: int) -> bool:
        prompt, answer = example_of(size)
        return len(prompt) + len(answer) <= length

    if not fits(1):
        return None
    low, high = 1, 2
    while high < LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return example_of(low)


def ask(
    model: nn.Module,
    encode: Encode,
    task: str,
    length: int,
    *,
    examples: int = 32,
    seed: int = 0,
    haystack: tuple[str, ...] = NOISE,
) -> pd.DataFrame:
    """Rows of the examples (as documents): whether the answer is right, and the loss of its tokens; none if no example fits.

    One forward pass, no generation: greedy decoding gives the answer if each of its tokens is the likeliest.
    """
    rows: list[dict[str, object]] = []
    with evaluating(model) as evaluator:
        for number in range(examples):
            filled = fill(task, length, f"{seed}/{length}/{number}", encode, haystack)
            if filled is None:
                return make_table()
            prompt, answer = filled
            measures = [METRICS["loss"], METRICS["accuracy"]]
            [values] = evaluator.values(np.array([prompt + answer], np.int64), len(answer), measures)
            own = {"corpus": task, "length": length, "document": number}
            rows.append({**own, "metric": "accuracy", "sum": float(values[:, 1].all())})
            rows.append({**own, "metric": "loss", "sum": float(values[:, 0].sum()), "count": len(answer)})
    return make_table(rows)


def evaluate_suite(
    model: nn.Module,
    encode: Encode,
    name: str,
    tasks: Sequence[str],
    lengths: Sequence[int],
    path: Path,
    *,
    examples: int = 32,
    seed: int = 0,
    haystack: tuple[str, ...] = NOISE,
    report: Callable[[str], None] = lambda line: None,
) -> pd.DataFrame:
    """Rows of the model's results, the task as their corpus; options: those of `ask`.

    path: table of all results, in which finished ones are found by the model's name and weights.
    """
    weights = (v.detach().cpu().contiguous().flatten().view(torch.uint8) for v in model.state_dict().values())
    text = (sentence.encode() for sentence in (*haystack, f"{examples} {seed}"))
    run = f"{name}-{_digest(itertools.chain((part.numpy().data for part in weights), text))}"
    table = read_table(path) if path.exists() else make_table()
    for task, length in itertools.product(tasks, lengths):
        if len(table.query("run == @run and corpus == @task and length == @length")):
            continue
        rows = ask(model, encode, task, length, examples=examples, seed=seed, haystack=haystack)
        right = rows.loc[rows["metric"] == "accuracy", "sum"]
        report(
            f"{name}: {task} at {length}: {f'{right.mean():.0%}' if len(rows) else 'too short for the task'}"
        )
        table = join([table, rows.assign(run=run, method=name, seed=seed)])
        write_table(table, path)
    return table[table["run"] == run]


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def _draw(task: str, seed: str) -> random.Random:
    digest = hashlib.sha256(f"{task}/{seed}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def _tokens(example: Example, encode: Encode) -> tuple[list[int], list[int]]:
    """Tokens of prompt and answer; the answer's start where the whole text's first differ from the prompt's alone."""
    prompt, whole = list(encode(example.prompt)), list(encode(example.prompt + example.answer))
    shared = next(
        (index for index, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt)
    )
    return whole[:shared], whole[shared:]
