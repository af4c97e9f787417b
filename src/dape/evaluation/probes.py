"""Tasks of the suite: each writes a prompt of a given size and the answer that follows from it.

Generated offline from random words and numbers, after RULER (Hsieh et al. 2024), zoology (Arora et al. 2023),
BABILong (Kuratov et al. 2024), the phone book of Jelassi et al. 2024 and flip-flop languages (Liu et al. 2023).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

WORDS = (
    "apple",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "marble",
    "needle",
    "ocean",
    "pencil",
    "quartz",
    "ribbon",
    "saddle",
    "temple",
    "umbrella",
    "valley",
    "window",
    "yellow",
    "zebra",
    "anchor",
    "basket",
    "copper",
    "dragon",
    "ember",
    "falcon",
    "glacier",
    "harbor",
    "ivory",
    "jungle",
    "lantern",
    "meadow",
    "nectar",
    "orchid",
    "pepper",
    "quiver",
    "rocket",
    "silver",
    "thunder",
    "velvet",
    "walnut",
)
NAMES = ("Mary", "John", "Sandra", "Daniel", "Emily", "Peter", "Laura", "Simon")
ROOMS = ("kitchen", "garden", "office", "bathroom", "hallway", "bedroom")
# Default sentences of the haystack.
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
    "The rain falls on the hills.",
    "A bird sings in the tree.",
    "The road leads to the sea.",
)


class Example(NamedTuple):
    """A prompt and the answer that continues it."""

    prompt: str
    answer: str


class Probe(NamedTuple):
    """A task. write(draw, size, haystack): an example of `size` units; haystack: sentences to hide needles in.

    task: the corresponding generated task of `dape tasks`, on which small models are trained.
    """

    write: Callable[[random.Random, int, tuple[str, ...]], Example]
    asks: str
    task: str


def _number(draw: random.Random, digits: int = 5) -> str:
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def _hidden(draw: random.Random, size: int, haystack: tuple[str, ...], needles: list[str]) -> str:
    """`size` consecutive sentences of the haystack with the needles inserted at random, in order."""
    start = draw.randrange(len(haystack))
    text = [haystack[(start + index) % len(haystack)] for index in range(size)]
    positions = sorted(draw.randrange(size + 1) for _ in needles)
    for position, needle in reversed(list(zip(positions, needles, strict=True))):
        text.insert(position, needle)
    return " ".join(text)


def _needles(keys: int, values: int, asked: int) -> Callable[[random.Random, int, tuple[str, ...]], Example]:
    """Numbers hidden under words; keys: number of words, values: numbers per word, asked: words queried."""

    def write(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
        words = draw.sample(WORDS, keys)
        numbers = {word: [_number(draw) for _ in range(values)] for word in words}
        needles = [f"The number of the {word} is {number}." for word in words for number in numbers[word]]
        order = sorted(range(len(needles)), key=lambda _: draw.random())
        if values > 1:
            # Values queried in the order of the text are inserted in that order.
            order = sorted(order, key=lambda index: index % values)
        text = _hidden(draw, size, haystack, [needles[index] for index in order])
        chosen = draw.sample(words, asked)
        if values > 1:
            question = f"The numbers of the {chosen[0]}, in order, are"
            return Example(f"{text} {question}", " " + ", ".join(numbers[chosen[0]]))
        if asked > 1:
            question = f"The numbers of the {', the '.join(chosen)} are"
            return Example(f"{text} {question}", " " + ", ".join(numbers[word][0] for word in chosen))
        return Example(f"{text} The number of the {chosen[0]} is", f" {numbers[chosen[0]][0]}")

    return write


def _variables(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    names, value = draw.sample("ABCDEFGHIJKLMNPQRSTUVWXYZ", 4), _number(draw)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {later} = VAR {earlier}." for earlier, later in itertools.pairwise(names)]
    return Example(f"{_hidden(draw, size, haystack, lines)} The value of VAR {names[-1]} is", f" {value}")


def _common(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """One word three times as often as each other."""
    words = draw.sample(WORDS, 9)
    said = [words[0]] * (3 * size) + [word for word in words[1:] for _ in range(size)]
    draw.shuffle(said)
    return Example(f"Words: {' '.join(said)}. The most common word is", f" {words[0]}")


def _frequent(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """Counts that fall as 1 / rank."""
    words = draw.sample(WORDS, 8)
    said = [word for rank, word in enumerate(words, 1) for _ in range(max(1, 6 * size // rank))]
    draw.shuffle(said)
    return Example(f"Words: {' '.join(said)}. The most frequent word is", f" {words[0]}")


def _phonebook(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    names = [
        f"{first.capitalize()} {second.capitalize()}"
        for first, second in (draw.sample(WORDS, 2) for _ in range(size + 1))
    ]
    numbers = {name: _number(draw, 6) for name in names}
    chosen = draw.choice(list(numbers))
    lines = [f"{name}: {number}" for name, number in numbers.items()]
    return Example("\n".join(lines) + f"\n\nLook up.\n{chosen}:", f" {numbers[chosen]}")


def _associative(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """Key, value, key, value … with repeated keys: the value of the last one (zoology's MQAR as text)."""
    count = max(2, min(len(WORDS) - 1, size))
    keys = draw.sample(WORDS, count)
    values = {key: str(draw.randrange(10)) for key in keys}
    said = [f"{key} {values[key]}" for key in keys]
    said += [f"{key} {values[key]}" for key in (draw.choice(keys) for _ in range(size))]
    chosen = draw.choice(keys)
    return Example(" ".join(said) + f" {chosen}", f" {values[chosen]}")


def _power_law(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """Pairs, then repeated keys with a power law of the distance from their pair: most repeat soon (zoology)."""
    keys = draw.sample(WORDS, max(2, min(len(WORDS) - 1, size)))
    values = {key: str(draw.randrange(10)) for key in keys}
    near = [1 / (back + 1) ** 0.9 for back in range(len(keys))]
    said = [f"{key} {values[key]}" for key in keys]
    said += [f"{key} {values[key]}" for key in draw.choices(keys[::-1], near, k=size)]
    (chosen,) = draw.choices(keys[::-1], near)
    return Example(" ".join(said) + f" {chosen}", f" {values[chosen]}")


def _facts(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """People go from room to room between the sentences of a book: where is one of them?"""
    room_of: dict[str, str] = {}
    facts = []
    for _ in range(6):
        name, room = draw.choice(NAMES), draw.choice(ROOMS)
        room_of[name] = room
        facts.append(f"{name} went to the {room}.")
    asked = draw.choice(list(room_of))
    return Example(
        f"{_hidden(draw, size, haystack, facts)} Where is {asked}? {asked} is in the", f" {room_of[asked]}"
    )


def _flip_flop(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """write b, ignore b, read b: a read repeats the last write."""
    bit = draw.randrange(2)
    said = [f"write {bit}"]
    for _ in range(size):
        kind, other = draw.choice(("write", "ignore", "ignore", "ignore", "read")), draw.randrange(2)
        bit = other if kind == "write" else bit
        said.append(f"{kind} {bit if kind == 'read' else other}")
    return Example(" ".join(said) + " read", f" {bit}")


def _cups(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """Swaps of five cups (words in S5): where is the ball?"""
    ball = draw.randrange(1, 6)
    said = [f"The ball is under cup {ball}."]
    for _ in range(size):
        first, second = draw.sample(range(1, 6), 2)
        ball = {first: second, second: first}.get(ball, ball)
        said.append(f"Swap cups {first} and {second}.")
    return Example(" ".join(said) + " The ball is under cup", f" {ball}")


def _cup_cycles(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """Three of five cups move around at a time (words in A5): where is the ball?"""
    ball = draw.randrange(1, 6)
    said = [f"The ball is under cup {ball}."]
    for _ in range(size):
        first, second, third = draw.sample(range(1, 6), 3)
        ball = {first: second, second: third, third: first}.get(ball, ball)
        said.append(f"Cup {first} goes to {second}, {second} to {third}, {third} to {first}.")
    return Example(" ".join(said) + " The ball is under cup", f" {ball}")


def _sequence(change: Callable[[list[str]], list[str]], name: str) -> Callable[..., Example]:
    def write(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
        items = [str(draw.randrange(10)) for _ in range(size)]
        return Example(f"{name}: {' '.join(items)} =", " " + " ".join(change(items)))

    return write


def _addition(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    first, second = (draw.randrange(10 ** (size - 1), 10**size) for _ in range(2))
    return Example(
        f"add: {' '.join(str(first))} + {' '.join(str(second))} =", " " + " ".join(str(first + second))
    )


PROBES: dict[str, Probe] = {
    "needle": Probe(_needles(1, 1, 1), "a number hidden in the text under a word", "needles"),
    "needle-keys": Probe(_needles(8, 1, 1), "the same among seven others", "needles"),
    "needle-values": Probe(
        _needles(2, 3, 1), "three numbers hidden under one word, in their order", "needles"
    ),
    "needle-queries": Probe(_needles(8, 1, 3), "three of eight hidden numbers", "needles"),
    "variables": Probe(_variables, "a value through a chain of four assignments", "variables"),
    "common-word": Probe(_common, "the word that occurs three times as often as the others", "common_symbol"),
    "frequent-word": Probe(
        _frequent, "the most frequent of words whose counts fall as 1 / rank", "frequent_symbol"
    ),
    "phonebook": Probe(_phonebook, "the number of a name in a list", "phonebook"),
    "associative-recall": Probe(_associative, "the value that was paired with a key", "recall_many_keys"),
    "recall-power-law": Probe(_power_law, "the same, with mostly recent keys", "recall_power_law"),
    "facts": Probe(_facts, "the last room of a person, stated between the sentences of a book", "facts"),
    "flip-flop": Probe(_flip_flop, "the bit that was written last", "flip_flop"),
    "cups": Probe(_cups, "a ball through swaps of five cups", "s5_words"),
    "cup-cycles": Probe(_cup_cycles, "a ball through moves of three of five cups", "a5_words"),
    "copy": Probe(_sequence(list, "copy"), "a sequence repeated", "copy"),
    "reverse": Probe(_sequence(lambda items: items[::-1], "reverse"), "a sequence backwards", "reverse"),
    "sort": Probe(_sequence(sorted, "sort"), "a sequence in order", "sort"),
    "addition": Probe(_addition, "the sum of two numbers, digit by digit", "addition"),
}
# Our tasks by the names that RULER (Hsieh et al. 2024) gives to their kind; the wording of its prompts is another.
RULER = {
    "niah_single_1": "needle",
    "niah_multikey_1": "needle-keys",
    "niah_multivalue": "needle-values",
    "niah_multiquery": "needle-queries",
    "ruler_vt": "variables",
    "ruler_cwe": "common-word",
    "ruler_fwe": "frequent-word",
}
# The generated tasks that train small models for the suite.
TRAINED = tuple(dict.fromkeys(probe.task for probe in PROBES.values()))
