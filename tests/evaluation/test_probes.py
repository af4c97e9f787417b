"""The suite's questions: their answers follow from them, they fill a length, and the same seed asks the same."""

import math
import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dape.data import ByteTokenizer
from dape.evaluation.probes import NOISE
from dape.evaluation.suite import PROBES, Answer, TaskResult, ask, fill
from dape.tasks import build_task

ENCODE = ByteTokenizer().encode


def example(task, seed, size=6):
    return PROBES[task].write(random.Random(seed), size, NOISE)


@pytest.mark.parametrize("task", PROBES)
def test_examples_fill_a_length_and_repeat(task):
    for length in (700, 1400):
        prompt, answer = fill(task, length, "0/0", ENCODE)
        assert length / 4 < len(prompt) + len(answer) <= length
        assert fill(task, length, "0/0", ENCODE) == (prompt, answer)
        assert fill(task, length, "0/1", ENCODE) != (prompt, answer)
    assert fill(task, 3, "0/0", ENCODE) is None


@pytest.mark.parametrize("seed", range(20))
def test_answers_follow_from_the_prompt(seed):
    """Each answer once more, by other means than those that wrote it."""
    for task in ("needle", "needle-keys"):
        prompt, answer = example(task, seed)
        word = re.search(r"The number of the (\w+) is$", prompt)[1]
        assert re.findall(rf"The number of the {word} is (\d+)\.", prompt) == [answer.strip()]
    prompt, answer = example("needle-values", seed)
    word = re.search(r"The numbers of the (\w+), in order, are$", prompt)[1]
    assert ", ".join(re.findall(rf"The number of the {word} is (\d+)\.", prompt)) == answer.strip()
    prompt, answer = example("needle-queries", seed)
    words = re.search(r"The numbers of the (.*) are$", prompt)[1].split(", the ")
    said = dict(re.findall(r"The number of the (\w+) is (\d+)\.", prompt))
    assert ", ".join(said[word] for word in words) == answer.strip()
    prompt, answer = example("variables", seed)
    known = {}
    for name, source in re.findall(r"VAR (\w) = (?:VAR )?(\w+)\.", prompt):
        known[name] = known.get(source, source)
    assert known[prompt.removesuffix(" is")[-1]] == answer.strip()
    for task in ("common-word", "frequent-word"):
        prompt, answer = example(task, seed)
        assert (
            Counter(prompt.split(". ")[0].removeprefix("Words: ").split()).most_common(1)[0][0]
            == answer.strip()
        )
    prompt, answer = example("phonebook", seed)
    assert (
        dict(line.split(": ") for line in prompt.split("\n\n")[0].splitlines())[
            prompt.splitlines()[-1].removesuffix(":")
        ]
        == answer.strip()
    )
    for task in ("associative-recall", "recall-power-law"):
        prompt, answer = example(task, seed)
        *pairs, key = prompt.split()
        assert dict(zip(pairs[::2], pairs[1::2], strict=True))[key] == answer.strip()
    prompt, answer = example("facts", seed)
    name = re.search(r"Where is (\w+)\?", prompt)[1]
    assert re.findall(rf"{name} went to the (\w+)\.", prompt)[-1] == answer.strip()
    prompt, answer = example("flip-flop", seed)
    assert re.findall(r"write (\d)", prompt)[-1] == answer.strip()
    prompt, answer = example("cups", seed)
    cups = [re.search(r"under cup (\d)\.", prompt)[1] == str(number) for number in range(1, 6)]
    for first, second in re.findall(r"Swap cups (\d) and (\d)", prompt):
        a, b = int(first) - 1, int(second) - 1
        cups[a], cups[b] = cups[b], cups[a]
    assert str(cups.index(True) + 1) == answer.strip()
    prompt, answer = example("cup-cycles", seed)
    ball = re.search(r"under cup (\d)\.", prompt)[1]
    for sentence in prompt.split(".")[1:-1]:
        ball = dict(re.findall(r"(\d) (?:goes )?to (\d)", sentence)).get(ball, ball)
    assert ball == answer.strip()
    prompt, answer = example("addition", seed)
    first, second = (
        int(part.replace(" ", "")) for part in re.search(r"add: (.*) \+ (.*) =", prompt).groups()
    )
    assert str(first + second) == answer.replace(" ", "")
    for task, change in (("copy", list), ("reverse", lambda x: x[::-1]), ("sort", sorted)):
        prompt, answer = example(task, seed)
        assert change(prompt.split(": ")[1].removesuffix(" =").split()) == answer.split()


def test_every_probe_has_a_task_that_trains_small_models_for_it():
    for probe in PROBES.values():
        task = build_task(probe.task)
        assert task.model == "decoder"
        assert max(task.protocol.train_lengths) == min(task.protocol.test_lengths)
        assert max(task.protocol.test_lengths) >= 7 * max(task.protocol.train_lengths)


def test_scores_have_errors_even_where_all_are_right():
    score = TaskResult.of("needle", 64, [Answer(60, (0.1, 0.3), True)] * 8)
    assert score.accuracy == 1
    assert 0 < score.accuracy_se < 0.2
    assert score.nll == pytest.approx(0.2)


class AlwaysOne(nn.Module):
    """Writes " 1" after every word."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=256)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, 256)
        logits[..., ord("1")] = (input_ids == ord(" ")).float()
        logits[..., ord(" ")] = (input_ids != ord(" ")).float()
        return logits


def test_an_answer_counts_if_greedy_decoding_gives_it():
    score = ask(AlwaysOne(), ENCODE, "flip-flop", 100, examples=20)
    answers = [fill("flip-flop", 100, f"0/100/{number}", ENCODE)[1] for number in range(20)]
    expected = sum(bytes(answer) == b" 1" for answer in answers) / 20
    assert 0 < expected < 1
    assert score.accuracy == expected
    # One of 256 tokens has logit 1, the others 0.
    right, wrong = math.log(math.e + 255) - 1, math.log(math.e + 255)
    assert score.nll == pytest.approx((right + expected * right + (1 - expected) * wrong) / 2, rel=1e-5)
    assert ask(AlwaysOne(), ENCODE, "needle", 8, examples=2) is None
