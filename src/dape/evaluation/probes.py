"""Tasks of the suite: each writes a prompt of a given size and the answer that follows from it.

Generated offline from random words and numbers, after RULER (Hsieh et al. 2024), zoology (Arora et al. 2023),
BABILong (Kuratov et al. 2024), the phone book of Jelassi et al. 2024 and flip-flop languages (Liu et al. 2023).
"""

from __future__ import annotations

import itertools
import random
import string
import uuid
from collections.abc import Callable
from typing import NamedTuple

WORDS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket",
    "kettle", "ladder", "marble", "needle", "ocean", "pencil", "quartz", "ribbon", "saddle", "temple",
    "umbrella", "valley", "window", "yellow", "zebra", "anchor", "basket", "copper", "dragon", "ember",
    "falcon", "glacier", "harbor", "ivory", "jungle", "lantern", "meadow", "nectar", "orchid", "pepper",
    "quiver", "rocket", "silver", "thunder", "velvet", "walnut",
)  # fmt: skip
NAMES = ("Mary", "John", "Sandra", "Daniel", "Emily", "Peter", "Laura", "Simon")
ROOMS = ("kitchen", "garden", "office", "bathroom", "hallway", "bedroom")
THINGS = ("apple", "football", "milk")
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


def _code(draw: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _words(draw: random.Random, count: int) -> list[str]:
    """Different words; compounds of two or three if many are needed."""
    parts = 1 if count <= len(WORDS) // 2 else 2 if count <= len(WORDS) ** 2 // 4 else 3
    found: dict[str, None] = {}
    while len(found) < count:
        found["-".join(draw.sample(WORDS, parts))] = None
    return list(found)


def _needles(
    keys: int = 1, values: int = 1, asked: int = 1, *, among: str = "text", code: str = ""
) -> Callable[[random.Random, int, tuple[str, ...]], Example]:
    """Values hidden under keys, as RULER has them.

    keys: number of keys. values: numbers under each. asked: keys queried. among: "noise", the "text" of the user, or
    other "needles". code: "values" or "both" if these are UUIDs instead of numbers, and words.
    """

    def write(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
        count = keys if among != "needles" else max(2, size)
        names = [_code(draw) for _ in range(count)] if code == "both" else _words(draw, count)
        hidden = {name: [_code(draw) if code else _number(draw, 7) for _ in range(values)] for name in names}
        needles = [f"The number of the {name} is {value}." for name in names for value in hidden[name]]
        if among == "needles":
            text = " ".join(needles)
        else:
            text = _hidden(draw, size, NOISE if among == "noise" else haystack, needles)
        chosen = draw.sample(names, asked)
        answer = " " + ", ".join(value for name in chosen for value in hidden[name])
        if values == asked == 1:
            return Example(f"{text} The number of the {chosen[0]} is", answer)
        return Example(f"{text} In this order, the numbers of the {', the '.join(chosen)} are", answer)

    return write


def _variables(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """A chain of five variables, each set to the one before: all with its value, in their order."""
    names, value = draw.sample("ABCDEFGHIJKLMNPQRSTUVWXYZ", 5), _number(draw)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {later} = VAR {earlier}." for earlier, later in itertools.pairwise(names)]
    text = _hidden(draw, size, NOISE, lines)
    return Example(f"{text} In their order, the variables with the value {value} are", f" {', '.join(names)}")


def _common(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """Ten words six times each among others that occur once."""
    often = draw.sample(WORDS, 10)
    said = often * 6 + [word for word in _words(draw, size + 10) if word not in often][:size]
    draw.shuffle(said)
    return Example(
        f"Words: {' '.join(said)}. In alphabetical order, the ten most common words are",
        f" {' '.join(sorted(often))}",
    )


def _frequent(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """Words of random letters whose counts fall as 1 / rank²: the first three."""
    counts = [
        12 * size // rank**2 for rank in itertools.takewhile(lambda r: r**2 <= 12 * size, itertools.count(1))
    ]
    words = ["".join(draw.choices(string.ascii_lowercase, k=6)) for _ in counts]
    said = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    draw.shuffle(said)
    question = "The three most frequent words, the most frequent first, are"
    return Example(f"Words: {' '.join(said)}. {question}", f" {' '.join(words[:3])}")


def _phonebook(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    names = [
        f"{first.capitalize()} {second.capitalize()}"
        for first, second in (draw.sample(WORDS, 2) for _ in range(size + 1))
    ]
    numbers = {name: _number(draw, 6) for name in names}
    chosen = draw.choice(list(numbers))
    lines = [f"{name}: {number}" for name, number in numbers.items()]
    return Example("\n".join(lines) + f"\n\nLook up.\n{chosen}:", f" {numbers[chosen]}")


def _recall(*, power_law: bool) -> Callable[[random.Random, int, tuple[str, ...]], Example]:
    """Key, value, key, value …, then repeated keys: the value of the last one (zoology's MQAR as text).

    power_law: of the distance from a repeated key to its pair, so that most repeat soon.
    """

    def write(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
        keys = draw.sample(WORDS, max(2, min(len(WORDS) - 1, size)))
        values = {key: str(draw.randrange(10)) for key in keys}
        near = [1 / (back + 1) ** 0.9 for back in range(len(keys))]

        def repeated() -> str:
            return draw.choices(keys[::-1], near)[0] if power_law else draw.choice(keys)

        said = [f"{key} {values[key]}" for key in (*keys, *(repeated() for _ in range(size)))]
        chosen = repeated()
        return Example(" ".join(said) + f" {chosen}", f" {values[chosen]}")

    return write


def _walks(draw: random.Random, things: int, facts: int) -> tuple[list[str], dict[str, list[str]]]:
    """Sentences of people who walk, take things and leave them; and the rooms that each of both was in, in order."""
    people, objects = NAMES[:4], THINGS[:things]
    rooms: dict[str, list[str]] = {name: [] for name in (*people, *objects)}
    holder: dict[str, str] = {}
    said: list[str] = []
    while len(said) < facts:
        person = draw.choice(people)
        held = [thing for thing in holder if holder[thing] == person]
        here = rooms[person][-1:]
        near = [thing for thing in objects if thing not in holder and rooms[thing][-1:] in ([], here)]
        if not here or not (near or held) or draw.random() < 0.6:
            room = draw.choice([room for room in ROOMS if [room] != here])
            said.append(f"{person} went to the {room}.")
            for moved in (person, *held):
                rooms[moved].append(room)
        elif near and (not held or draw.random() < 0.7):
            thing = draw.choice(near)
            holder[thing] = person
            said.append(f"{person} took the {thing} there.")
            rooms[thing] = rooms[thing] or list(here)
        else:
            thing = draw.choice(held)
            del holder[thing]
            said.append(f"{person} left the {thing} there.")
    return said, rooms


def _person(draw: random.Random) -> tuple[list[str], str, str]:
    said, rooms = _walks(draw, 0, 6)
    name = draw.choice([name for name in rooms if rooms[name]])
    return said, f"Where is {name}?", rooms[name][-1]


def _thing(draw: random.Random) -> tuple[list[str], str, str]:
    while True:
        said, rooms = _walks(draw, 3, 12)
        if moved := [thing for thing in THINGS if len(rooms[thing]) > 1]:
            thing = draw.choice(moved)
            return said, f"Where is the {thing}?", rooms[thing][-1]


def _earlier(draw: random.Random) -> tuple[list[str], str, str]:
    while True:
        said, rooms = _walks(draw, 3, 16)
        if moved := [t for t in THINGS if len(rooms[t]) > 2 and rooms[t].count(rooms[t][-1]) == 1]:
            thing = draw.choice(moved)
            return said, f"Where was the {thing} before the {rooms[thing][-1]}?", rooms[thing][-2]


def _directions(draw: random.Random) -> tuple[list[str], str, str]:
    first, middle, last = draw.sample(ROOMS, 3)
    one, other = draw.sample(("north", "south", "east", "west"), 2)
    said = [f"The {first} is {one} of the {middle}.", f"The {last} is {other} of the {middle}."]
    room, way = draw.choice(((first, one), (last, other)))
    asked = draw.choice(
        ((f"What is {way} of the {middle}?", room), (f"What is the {room} {way} of?", middle))
    )
    return said, *asked


def _gifts(draw: random.Random) -> tuple[list[str], str, str]:
    said: list[str] = []
    holder: dict[str, str] = {}
    gift = None
    while len(said) < 8 or gift is None:
        person, thing = draw.choice(NAMES), draw.choice(THINGS)
        if draw.random() < 0.3:
            said.append(f"{person} went to the {draw.choice(ROOMS)}.")
        elif thing not in holder:
            holder[thing] = person
            said.append(f"{person} took the {thing} there.")
        elif person != holder[thing]:
            gift = holder[thing], thing, person
            holder[thing] = person
            said.append(f"{gift[0]} gave the {thing} to {person}.")
    giver, thing, taker = gift
    questions = {
        f"Who last gave the {thing} to {taker}?": giver,
        f"What did {giver} last give to {taker}?": thing,
        f"To whom did {giver} last give the {thing}?": taker,
    }
    return said, *draw.choice(list(questions.items()))


def _book(story: Callable[[random.Random], tuple[list[str], str, str]]) -> Callable[..., Example]:
    """The facts of a story in their order between the sentences of a book; then a question and its answer, one word."""

    def write(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
        facts, question, answer = story(draw)
        return Example(f"{_hidden(draw, size, haystack, facts)}\n{question} Answer:", f" {answer}")

    return write


def _flip_flop(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
    """write b, ignore b, read b: a read repeats the last write."""
    bit = draw.randrange(2)
    said = [f"write {bit}"]
    for _ in range(size):
        kind, other = draw.choice(("write", "ignore", "ignore", "ignore", "read")), draw.randrange(2)
        bit = other if kind == "write" else bit
        said.append(f"{kind} {bit if kind == 'read' else other}")
    return Example(" ".join(said) + " read", f" {bit}")


def _cups(words: str, moved: int) -> Callable[[random.Random, int, tuple[str, ...]], Example]:
    """Some of five cups change places in a cycle (two: words in S5, three: words in A5): where is the ball?"""

    def write(draw: random.Random, size: int, haystack: tuple[str, ...]) -> Example:
        ball = draw.randrange(1, 6)
        said = [f"The ball is under cup {ball}."]
        for _ in range(size):
            cups = draw.sample(range(1, 6), moved)
            ball = dict(zip(cups, cups[1:] + cups[:1], strict=True)).get(ball, ball)
            said.append(words.format(*cups))
        return Example(" ".join(said) + " The ball is under cup", f" {ball}")

    return write


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
    "niah_single_1": Probe(_needles(among="noise"), "needles"),
    "niah_single_2": Probe(_needles(), "needles"),
    "niah_single_3": Probe(_needles(code="values"), "needles"),
    "niah_multikey_1": Probe(_needles(4), "needles"),
    "niah_multikey_2": Probe(_needles(among="needles"), "needles"),
    "niah_multikey_3": Probe(_needles(among="needles", code="both"), "needles"),
    "niah_multivalue": Probe(_needles(values=4), "needles"),
    "niah_multiquery": Probe(_needles(4, asked=4), "needles"),
    "ruler_vt": Probe(_variables, "variables"),
    "ruler_cwe": Probe(_common, "common_symbol"),
    "ruler_fwe": Probe(_frequent, "frequent_symbol"),
    "babilong_qa1": Probe(_book(_person), "facts"),
    "babilong_qa2": Probe(_book(_thing), "facts"),
    "babilong_qa3": Probe(_book(_earlier), "facts"),
    "babilong_qa4": Probe(_book(_directions), "facts"),
    "babilong_qa5": Probe(_book(_gifts), "facts"),
    "phonebook": Probe(_phonebook, "phonebook"),
    "associative-recall": Probe(_recall(power_law=False), "recall_many_keys"),
    "recall-power-law": Probe(_recall(power_law=True), "recall_power_law"),
    "flip-flop": Probe(_flip_flop, "flip_flop"),
    "cups": Probe(_cups("Swap cups {} and {}.", 2), "s5_words"),
    "cup-cycles": Probe(_cups("Cup {0} goes to {1}, {1} to {2}, {2} to {0}.", 3), "a5_words"),
    "copy": Probe(_sequence(list, "copy"), "copy"),
    "reverse": Probe(_sequence(lambda items: items[::-1], "reverse"), "reverse"),
    "sort": Probe(_sequence(sorted, "sort"), "sort"),
    "addition": Probe(_addition, "addition"),
}
# Tasks by benchmark. Their names, kinds and counts are those of RULER (Hsieh et al. 2024) and BABILong (Kuratov et al.
# 2024); the prompts are our own words.
GROUPS = {
    "all": tuple(PROBES),
    "ruler": tuple(name for name in PROBES if name.startswith(("niah_", "ruler_"))),
    "babilong": tuple(name for name in PROBES if name.startswith("babilong_")),
}
# The generated tasks that train small models for the suite.
TRAINED = tuple(dict.fromkeys(probe.task for probe in PROBES.values()))
