"""Evaluation of a model on the suite: examples that fill a length, and whether greedy decoding gives the answer."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dape.evaluation.evaluator import evaluating
from dape.evaluation.metrics import METRICS
from dape.evaluation.probes import NOISE, PROBES, Example
from dape.files import read_json, write_atomically

Encode = Callable[[str], Sequence[int]]
LARGEST = 1 << 20


@dataclass(frozen=True)
class Answer:
    """Result of one example: tokens of the input, −log p of the answer's tokens, and whether all were the likeliest."""

    num_tokens: int
    losses: tuple[float, ...]
    right: bool


@dataclass(frozen=True)
class TaskResult:
    """Results of a task at a length: share of answers that greedy decoding gives, and mean loss per token, with standard errors."""

    task: str
    length: int
    examples: int
    accuracy: float
    accuracy_se: float
    nll: float
    nll_se: float
    num_tokens: float

    @staticmethod
    def of(task: str, length: int, answers: Sequence[Answer]) -> TaskResult:
        count, right = len(answers), sum(answer.right for answer in answers)
        # After Agresti and Coull: not zero if all or none are right.
        guarded = (right + 2) / (count + 4)
        losses = np.array([np.mean(answer.losses) for answer in answers])
        spread = losses.std(ddof=1) / math.sqrt(count) if count > 1 else math.nan
        return TaskResult(
            task,
            length,
            count,
            right / count,
            math.sqrt(guarded * (1 - guarded) / (count + 4)),
            float(losses.mean()),
            float(spread),
            float(np.mean([answer.num_tokens for answer in answers])),
        )


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
) -> TaskResult | None:
    """Evaluate a task at a length; None if not even the shortest example fits.

    One forward pass, no generation: greedy decoding gives the answer if each of its tokens is the likeliest.
    """
    answers = []
    with evaluating(model) as evaluator:
        for number in range(examples):
            filled = fill(task, length, f"{seed}/{length}/{number}", encode, haystack)
            if filled is None:
                return None
            prompt, answer = filled
            measures = [METRICS["loss"], METRICS["accuracy"]]
            [values] = evaluator.values(np.array([prompt + answer], np.int64), len(answer), measures)
            losses, right = tuple(map(float, values[:, 0])), bool(values[:, 1].all())
            answers.append(Answer(len(prompt) + len(answer), losses, right))
    return TaskResult.of(task, length, answers)


def evaluate_suite(
    model: nn.Module,
    encode: Encode,
    name: str,
    tasks: Sequence[str],
    lengths: Sequence[int],
    path: Path,
    *,
    report: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> dict[tuple[str, int], TaskResult | None]:
    """Results by task and length, None where no example fits; options: those of `ask`.

    path: file of all results, in which finished ones are found by the model's name and weights.
    """
    kept: list[dict[str, Any]] = read_json(path).get("results", []) if path.exists() else []
    weights = (v.detach().cpu().contiguous().flatten().view(torch.uint8) for v in model.state_dict().values())
    about = {"model": name, "model_digest": _digest(part.numpy().data for part in weights), **options}
    about["haystack"] = _digest([sentence.encode() for sentence in options.get("haystack", NOISE)])
    results: dict[tuple[str, int], TaskResult | None] = {}
    for task, length in itertools.product(tasks, lengths):
        known = {**about, "task": task, "length": length}
        record = next((one for one in kept if known.items() <= one.items()), None)
        if record is None:
            result = ask(model, encode, task, length, **options)
            report(
                f"{name}: {task} at {length}: {f'{result.accuracy:.0%}' if result else 'too short for the task'}"
            )
            record = known | (asdict(result) if result else {"accuracy": None})
            kept.append(record)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"results": kept}, indent=1) + "\n")
        values: dict[str, Any] = {member.name: record.get(member.name) for member in fields(TaskResult)}
        results[task, length] = None if record["accuracy"] is None else TaskResult(**values)
    return results


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
