"""The suite's questions: their answers follow from them, they fill a length, and the same seed asks the same."""

import math
import random
import re
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dape.data import ByteTokenizer
from dape.evaluation.probes import NOISE
from dape.evaluation.suite import PROBES, ask, fill
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
    for task in [f"niah_{kind}_{n}" for kind in ("single", "multikey") for n in (1, 2, 3)]:
        prompt, answer = example(task, seed)
        name = re.search(r"The number of the (\S+) is$", prompt)[1]
        assert re.findall(rf"The number of the {name} is (\S+)\.", prompt) == [answer.strip()]
        number = str(uuid.UUID(answer.strip())) if task.endswith("_3") else str(int(answer))
        assert answer == f" {number}"
    for task in ("niah_multivalue", "niah_multiquery"):
        prompt, answer = example(task, seed)
        names = re.search(r"In this order, the numbers of the (.*) are$", prompt)[1].split(", the ")
        said = [re.findall(rf"The number of the {name} is (\d+)\.", prompt) for name in names]
        assert ", ".join(value for values in said for value in values) == answer.strip()
        assert answer.count(",") == 3
    prompt, answer = example("ruler_vt", seed)
    known = {}
    for name, source in re.findall(r"VAR (\w) = (?:VAR )?(\w+)\.", prompt):
        known[name] = known.get(source, source)
    assert {*known.values()} == {re.search(r"with the value (\d+) are$", prompt)[1]}
    assert ", ".join(known) == answer.strip()
    for task, first in (("ruler_cwe", 10), ("ruler_fwe", 3)):
        prompt, answer = example(task, seed)
        counts = Counter(prompt.split(". ")[0].removeprefix("Words: ").split()).most_common(first + 1)
        assert counts[first - 1][1] > counts[first][1]
        words = [word for word, _ in counts[:first]]
        assert answer.split() == (sorted(words) if task == "ruler_cwe" else words)
    prompt, answer = example("phonebook", seed)
    numbers = dict(line.split(": ") for line in prompt.split("\n\n")[0].splitlines())
    assert numbers[prompt.splitlines()[-1].removesuffix(":")] == answer.strip()
    for task in ("associative-recall", "recall-power-law"):
        prompt, answer = example(task, seed)
        *pairs, key = prompt.split()
        assert dict(zip(pairs[::2], pairs[1::2], strict=True))[key] == answer.strip()
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
    terms = prompt.split("add: ")[1].removesuffix(" =").replace(" ", "").split("+")
    assert str(sum(map(int, terms))) == answer.replace(" ", "")
    for task, change in (("copy", list), ("reverse", lambda x: x[::-1]), ("sort", sorted)):
        prompt, answer = example(task, seed)
        assert change(prompt.split(": ")[1].removesuffix(" =").split()) == answer.split()


class World:
    """Reads sentences of a story one by one: who is where, who holds what, and where things have been."""

    def __init__(self, text):
        self.rooms, self.holder, self.gifts, self.ways = {}, {}, [], {}
        for sentence in re.findall(r"[^.\n]+\.", text):
            if found := re.fullmatch(r"\s*(\w+) went to the (\w+)\.", sentence):
                person, room = found.groups()
                for name in (person, *(thing for thing, by in self.holder.items() if by == person)):
                    self.rooms.setdefault(name, []).append(room)
            elif found := re.fullmatch(r"\s*(\w+) took the (\w+) there\.", sentence):
                person, thing = found.groups()
                assert thing not in self.holder
                self.holder[thing] = person
                here = self.rooms.get(person, ["?"])[-1]
                assert self.rooms.setdefault(thing, [here])[-1] == here or here == "?"
            elif found := re.fullmatch(r"\s*(\w+) left the (\w+) there\.", sentence):
                assert self.holder.pop(found[2]) == found[1]
            elif found := re.fullmatch(r"\s*(\w+) gave the (\w+) to (\w+)\.", sentence):
                assert self.holder[found[2]] == found[1]
                self.holder[found[2]] = found[3]
                self.gifts.append(found.groups())
            elif found := re.fullmatch(r"\s*The (\w+) is (\w+) of the (\w+)\.", sentence):
                self.ways[found.groups()] = True

    def answer(self, question):
        if found := re.fullmatch(r"Where is (?:the )?(\w+)\?", question):
            return self.rooms[found[1]][-1]
        if found := re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question):
            rooms = self.rooms[found[1]]
            return rooms[rooms.index(found[2]) - 1]
        if found := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
            return next(room for room, *rest in self.ways if rest == [*found.groups()])
        if found := re.fullmatch(r"What is the (\w+) (\w+) of\?", question):
            return next(room for *rest, room in self.ways if rest == [*found.groups()])
        words = {*re.findall(r"\w+", question)}
        gift = next(gift for gift in reversed(self.gifts) if len(words & {*gift}) == 2)
        asked = {"Who": 0, "What": 1, "To": 2}[question.split()[0]]
        return gift[asked]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("task", [task for task in PROBES if task.startswith("babilong")])
def test_stories_have_their_answer(task, seed):
    """BABILong's layout: facts in order between other sentences, the question after them, an answer of one word."""
    prompt, answer = example(task, seed, size=9)
    story, question = prompt.removesuffix(" Answer:").split("\n")
    assert World(story).answer(question) == answer.strip()
    assert " " not in answer.strip()
    assert sum(sentence in story for sentence in NOISE) >= 8


def test_every_probe_has_a_task_that_trains_small_models_for_it():
    for probe in PROBES.values():
        task = build_task(probe.task)
        assert task.model == "decoder"
        assert max(task.protocol.train_lengths) == min(task.protocol.test_lengths)
        assert max(task.protocol.test_lengths) >= 7 * max(task.protocol.train_lengths)


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
    rows = ask(AlwaysOne(), ENCODE, "flip-flop", 100, examples=20)
    sums = rows.groupby("metric")[["sum", "count"]].sum()
    accuracy, loss = sums["sum"] / sums["count"]
    answers = [fill("flip-flop", 100, f"0/100/{number}", ENCODE)[1] for number in range(20)]
    expected = sum(bytes(answer) == b" 1" for answer in answers) / 20
    assert 0 < expected < 1
    assert accuracy == expected
    # One of 256 tokens has logit 1, the others 0.
    right, wrong = math.log(math.e + 255) - 1, math.log(math.e + 255)
    assert loss == pytest.approx((right + expected * right + (1 - expected) * wrong) / 2, rel=1e-5)
    assert ask(AlwaysOne(), ENCODE, "niah_single_1", 8, examples=2).empty
