"""Evaluation of a model on the suite: examples that fill a length, and whether greedy decoding gives the answer."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from dape.evaluation.evaluator import evaluating
from dape.evaluation.probes import NOISE, PROBES, Example

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
            losses, likeliest = evaluator.read(np.array([prompt + answer], np.int64), len(answer))
            answers.append(
                Answer(len(prompt) + len(answer), tuple(map(float, losses[0])), bool(likeliest[0].all()))
            )
    return TaskResult.of(task, length, answers)


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
