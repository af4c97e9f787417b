"""Every task: draws and labels, bounds, seeds, what a perfect and a constant answerer score."""

import doctest
import hashlib

import numpy as np
import pytest

from dape.tasks import IGNORED, TASKS, ChomskyTask, build_task, generator_for
from dape.tasks.base import TerminatedTask
from dape.tasks.recall import AssociativeRecall
from dape.tasks.registry import MODULES

CHE = [name for name in TASKS if issubclass(TASKS[name], ChomskyTask)]

# Options other than the defaults that each decoder task is also tried with.
VARIANTS = [
    *((name, {}) for name in TASKS),
    ("associative_recall", {"keys": 5, "values": 3, "pairs": 4, "queries": 7}),
    ("associative_recall", {"keys": 200, "values": 2, "queries": 3}),
    ("associative_recall", {"gap": 3}),
    ("associative_recall", {"keys": 8, "queries": 5, "pairs": 2, "gap": 1}),
    ("copy", {"symbols": 2}),
    ("induction", {"symbols": 2}),
    ("passkey", {"digits": 1, "filler": 1}),
    ("block_search", {"letters": 6, "block": 3, "question": 3, "answer": "last"}),
    ("block_search", {"answer": "all", "block": 8}),
    ("counting", {"variables": 5, "limit": 2, "passes": 0.0}),
    ("associative_recall", {"keys": 64, "values": 4, "pairs": 6, "power": 0.1}),
    ("associative_recall", {"keys": 40, "queries": 9, "pairs": 3, "gap": 2, "power": 2.0}),
    ("mqar", {"pairs": 8}),
    ("needles", {"keys": 2, "values": 3}),
    ("needles", {"keys": 5, "values": 2, "asked": 3, "names": 5, "filler": 1}),
    ("phonebook", {"names": 12, "digits": 1}),
    ("variables", {"chains": 1, "steps": 1, "names": 1}),
    ("variables", {"chains": 3, "steps": 4}),
    ("facts", {"people": 1, "events": 2}),
    ("common_symbol", {"shown": 2, "symbols": 2}),
    ("frequent_symbol", {"shown": 9}),
    ("flip_flop", {"ignores": 0.0}),
    ("sort", {"symbols": 2}),
    ("reverse", {"symbols": 40}),
]


def lengths_of(task, lengths):
    """Those of the lengths that the task has inputs of."""
    longest = 3 * task.keys if isinstance(task, AssociativeRecall) and task.pairs is None else 10**6
    return [length for length in lengths if task.minimum_length <= length <= longest]


def digest(name: str) -> str:
    """A fingerprint of what the variants of a task draw, and of its labels."""
    found = hashlib.sha256()
    for options in (options for task, options in VARIANTS if task == name):
        task = build_task(name, **options)
        for length in lengths_of(task, (1, 2, 3, 4, 9, 24, 25, 40, 97)):
            for part in task.sample(8, length, generator_for(7, length)):
                found.update(str(part.shape).encode() + np.ascontiguousarray(part, dtype="<i8").tobytes())
    return found.hexdigest()[:8]


# Recorded when vectorised samplers, which have gone, computed the same labels as the solvers.
RECORDED = {
    "even_pairs": "f70a43d5", "modular_arithmetic": "221bea68", "parity_check": "e176837f",
    "cycle_navigation": "d1da9792", "stack_manipulation": "4f41985f", "reverse_string": "d125a3cd",
    "modular_arithmetic_brackets": "c4919049", "solve_equation": "1635d77b", "duplicate_string": "d98500cb",
    "missing_duplicate_string": "3aa86eec", "odds_first": "c81977de", "bucket_sort": "f4594342",
    "binary_addition": "af282541", "binary_multiplication": "09d9fed8", "compute_sqrt": "14cc59df",
    "associative_recall": "9e3e4190", "recall_many_keys": "05c6d298", "recall_power_law": "3e79bcb5",
    "mqar": "914f91a5", "induction": "9d872fc3", "passkey": "6a5e2e5c", "copy": "823fbad2",
    "reverse": "bbbbf812", "sort": "19cb3d54", "addition": "930e5790", "block_search": "3276ab91",
    "counting": "5a882032", "needles": "aac6286c", "phonebook": "0415df03", "variables": "42689c07",
    "facts": "8b2cd30c", "common_symbol": "76075b04", "frequent_symbol": "5fbe0985", "flip_flop": "7c7f9d78",
    "s5_words": "8c886b1d", "a5_words": "4f131b94",
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_draws_and_labels_are_those_that_independent_code_agreed_on(name):
    assert digest(name) == RECORDED[name]


@pytest.mark.parametrize("name", TASKS)
def test_inputs_of_500_tokens(name):
    task = build_task(name, **({"pairs": 20} if name == "associative_recall" else {}))
    inputs, outputs = task.sample(4, 500, generator_for(0))
    assert 494 < inputs.shape[1] <= 500
    assert (outputs != IGNORED).any(axis=1).all()


@pytest.mark.parametrize("module", MODULES)
def test_documented_examples(module):
    result = doctest.testmod(module)
    assert result.attempted >= 2
    assert not result.failed


@pytest.mark.parametrize(("pairs", "length"), [(4, 64), (8, 128), (16, 256), (64, 512)])
def test_mqar_has_zoologys_sizes(pairs, length):
    task = build_task("mqar", pairs=pairs)
    assert task.vocab_size == 8192
    assert task.protocol.train_lengths == (length,)
    assert task.protocol.test_lengths[0] == length
    inputs, outputs = task.sample(2, length, generator_for(0))
    # Pairs first, and each of them is queried once.
    assert (inputs[:, : 2 * pairs : 2] < 4095).all()
    assert ((outputs != IGNORED).sum(1) == pairs).all()
    assert (outputs[:, : 2 * pairs] == IGNORED).all()


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_bounds(name, options):
    task = build_task(name, **options)
    for length in lengths_of(task, (1, 2, 3, 11, 40, 96)):
        examples = task.examples(32, length, generator_for(length))
        asked = examples.labels != IGNORED
        assert examples.ids.shape == examples.labels.shape == examples.counted.shape
        assert examples.ids.min() >= 0
        assert examples.ids.max() < task.vocab_size
        assert examples.labels[asked].min() >= 0
        assert examples.labels[asked].max() < task.num_labels
        assert not (examples.counted & ~asked).any()
        assert examples.counted.any(axis=1).all()


@pytest.mark.parametrize("name", CHE)
def test_models_read_the_input_and_then_empty_tokens(name):
    task = build_task(name)
    inputs, outputs = task.sample(8, 12, generator_for(3))
    examples = task.examples(8, 12, generator_for(3))
    width = inputs.shape[1]
    assert (examples.ids[:, :width] == inputs).all()
    assert (examples.ids[:, width:] == task.input_size).all()
    assert (examples.labels[:, :width] == IGNORED).all()
    assert (examples.labels[:, width:] == outputs).all()


@pytest.mark.parametrize("name", ["stack_manipulation", "binary_addition", "binary_multiplication"])
def test_nothing_counts_after_the_termination_token(name):
    task = build_task(name)
    _, outputs = task.sample(64, 20, generator_for(5))
    for row, counted in zip(outputs.tolist(), task.counted(outputs).tolist(), strict=True):
        end = row.index(2)
        assert counted == [True] * (end + 1) + [False] * (len(row) - end - 1)
        assert not any(row[end + 1 :])


@pytest.mark.parametrize("name", TASKS)
def test_an_oracle_scores_everything_and_a_constant_the_stated_accuracy(name):
    task = build_task(name)
    examples = task.examples(2000, 90, generator_for(11))
    assert examples.accuracy(examples.labels) == 1
    labels = range(task.num_labels)
    constant = max(examples.accuracy(np.full_like(examples.labels, label)) for label in labels)
    # The best of several constants on 2000 inputs: five standard errors of an independent label.
    error = 5 * np.sqrt(task.constant_accuracy * (1 - task.constant_accuracy) / 2000)
    assert constant == pytest.approx(task.constant_accuracy, abs=error)
    possible = np.unique(examples.labels[examples.counted])
    # The termination token is right once in an output: a guesser had better not say it.
    possible = possible[possible != 2] if isinstance(task, TerminatedTask) else possible
    guesses = generator_for(12).choice(possible, examples.labels.shape)
    assert examples.accuracy(guesses) == pytest.approx(task.random_accuracy, abs=error)


@pytest.mark.parametrize("name", [name for name in CHE if name != "modular_arithmetic_brackets"])
def test_labels_are_balanced_at_long_lengths(name):
    task = build_task(name)
    examples = task.examples(4000, 41, generator_for(21))
    labels = examples.labels[examples.counted]
    labels = labels[labels < 2] if task.output_size == 3 else labels
    shares = np.bincount(labels) / len(labels)
    # Terminated numbers end with a one, square roots begin with one more often than not.
    assert shares == pytest.approx(np.full(len(shares), 1 / len(shares)), abs=0.04)


def test_distributions_of_the_original():
    generator = generator_for(31)
    lengths = [row.index(2) for row in build_task("binary_addition").sample(4000, 12, generator)[0].tolist()]
    assert set(lengths) == set(range(1, 11))
    assert np.bincount(lengths)[1:] / 4000 == pytest.approx(np.full(10, 0.1), abs=0.025)
    stacks = build_task("stack_manipulation").sample(4000, 12, generator)[0]
    depth = (stacks < 2).sum(axis=1)
    assert np.bincount(depth)[1:] / 4000 == pytest.approx(np.full(11, 1 / 11), abs=0.025)
    hidden = build_task("missing_duplicate_string").sample(4000, 11, generator)[0]
    assert (hidden[:, -1] == 3).all()
    assert np.bincount((hidden == 2).argmax(axis=1)) / 4000 == pytest.approx(np.full(10, 0.1), abs=0.025)
    assert build_task("modular_arithmetic").sample(2, 10, generator)[0].shape == (2, 9)
    assert build_task("binary_addition").sample(4, 1, generator)[1].tolist() == [[0, 2]] * 4
    assert build_task("missing_duplicate_string").sample(1, 1, generator)[0].tolist() == [[1]]
    assert build_task("solve_equation").sample(1, 2, generator)[0].tolist() == [[0, 0]]
    brackets = build_task("modular_arithmetic_brackets")
    assert {tuple(row[:1] + row[2:]) for row in brackets.sample(50, 3, generator)[0].tolist()} == {(8, 9)}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("parity", {}, 'unknown task "parity"; did you mean parity_check'),
        ("parity_check", {"keys": 3}, '"parity_check" has no option "keys"; it has none'),
        ("associative_recall", {"key": 3}, "it has keys, values, pairs, queries, gap"),
        ("associative_recall", {"keys": 0}, "keys=0 must be at least 1"),
        ("associative_recall", {"gap": -1}, "gap=-1 must be at least 0"),
        ("block_search", {"block": 26}, "block=26 out of letters=26"),
        ("block_search", {"answer": "middle"}, "choose one of first, last, all"),
        ("counting", {"passes": 1.0}, "passes=1.0"),
        ("passkey", {"digits": 0}, "digits=0"),
        ("passkey", {"filler": "abc"}, 'option filler="abc" of "passkey": expected a whole number'),
        ("associative_recall", {"pairs": 2.5}, "option pairs=2.5 of .*: expected a whole number"),
        ("counting", {"passes": "many"}, 'option passes="many" of .*: expected a number'),
        ("copy", {"symbols": 0}, "symbols=0"),
        ("induction", {"symbols": 1}, "symbols=1"),
        ("associative_recall", {"power": 0.0}, "power=0.0 must be above 0"),
        ("needles", {"asked": 5}, "asked=5 of keys=4 out of names=16"),
        ("phonebook", {"digits": 0}, "digits=0"),
        ("variables", {"steps": 7}, "chains=2 of steps=7 need 14 names, not names=12"),
        ("facts", {"events": 0}, "events=0"),
        ("common_symbol", {"shown": 1}, "shown=1"),
        ("flip_flop", {"ignores": 1}, "ignores=1"),
    ],
)
def test_wrong_names_and_options_get_a_sentence(name, options, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        build_task(name, **options)


@pytest.mark.parametrize("name", TASKS)
def test_wrong_lengths_get_a_sentence(name):
    task = build_task(name)
    with pytest.raises(ValueError, match=f"the shortest has {task.minimum_length} tokens"):
        task.sample(2, task.minimum_length - 1, generator_for(0))
    with pytest.raises(ValueError, match="batch=0"):
        task.sample(0, 24, generator_for(0))
    for gap, longest in ((0, 96), (2, 160)):
        with pytest.raises(ValueError, match=f"lengths up to {longest}"):
            build_task("associative_recall", gap=gap).sample(1, longest + 5, generator_for(0))


@pytest.mark.parametrize(("power", "low", "high"), [(1.0, 0.1, 0.15), (0.1, 0.4, 0.6)])
def test_with_a_power_most_queries_come_soon_after_the_pairs(power, low, high):
    task = build_task("recall_power_law", power=power)
    _, outputs = task.sample(1000, 192, generator_for(0))
    after = np.nonzero(outputs != IGNORED)[1] - 2 * task.pairs
    # Of 176 places the first 22: an eighth where they are drawn evenly.
    assert low < (after < 22).mean() < high


@pytest.mark.parametrize("length", [15, 16, 40])
def test_a_gap_stands_after_every_pair(length):
    task = build_task("associative_recall", pairs=3, queries=3, gap=2)
    filler = task.vocab_size - 1
    for row in task.sample(50, length, generator_for(length))[0].tolist():
        values = [place for place, token in enumerate(row) if task.keys <= token < filler]
        assert len(values) == 3
        assert all(row[place + 1 : place + 3] == [filler, filler] for place in values)
