"""Rules by name: each takes an experiment and a claim's arguments, and returns the evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dape.reproduce.evidence import Evidence
from dape.reproduce.folders import Folder
from dape.reproduce.paper import Paper
from dape.reproduce.rules import best, language, maps, tasks, timing


@dataclass(frozen=True)
class Rule:
    """decide: evidence from an experiment's records; says: what holds, in a few words."""

    decide: Callable[..., Evidence]
    says: str


RULES: dict[str, Rule] = {
    "lower": Rule(language.lower, "the loss is lower than the others'"),
    "near": Rule(language.near, "perplexities differ by no more than a factor"),
    "falls": Rule(language.falls, "the loss falls from the training length on"),
    "rises": Rule(language.rises, "the loss rises from the training length on"),
    "at_most": Rule(language.at_most, "perplexity is at most a number"),
    "ordered": Rule(language.ordered, "each method is better than the one before"),
    "some_lower": Rule(best.some_lower, "some of the methods is better"),
    "gain_grows": Rule(language.gain_grows, "the advantage grows with the length"),
    "best_is_not_largest": Rule(best.best_is_not_largest, "the last of the methods is not the best"),
    "best_varies": Rule(best.best_varies, "the best method differs from setting to setting"),
    "best_train_length": Rule(best.best_train_length, "each length is read best by the model trained at it"),
    "faster_steps": Rule(language.faster_steps, "a training step takes less time"),
    "matches_paper": Rule(language.matches_paper, "perplexities are the paper's"),
    "accuracy_higher": Rule(tasks.accuracy_higher, "accuracy is higher"),
    "accuracy_at_least": Rule(tasks.accuracy_at_least, "accuracy is at least a number"),
    "accuracy_at_most": Rule(tasks.accuracy_at_most, "accuracy is at most a number"),
    "best_varies_by_task": Rule(tasks.best_varies_by_task, "the best method differs from task to task"),
    "best_is_among": Rule(tasks.best_is_among, "the best method is one of some"),
    "slower": Rule(timing.slower, "a step takes longer"),
    "slower_when_longer": Rule(timing.slower_when_longer, "a step takes longer at a greater length"),
    "overhead_falls": Rule(timing.overhead_falls, "the relative cost falls with the model's size"),
    "sink_higher": Rule(maps.sink_higher, "more weight goes to the first token"),
}


def decide(name: str, folder: Folder, paper: Paper, arguments: dict[str, Any]) -> Evidence:
    """The evidence of the rule of that name."""
    return RULES[name].decide(folder, paper, **arguments)
