"""The first cases of the fuzzer (`make fuzz`), which need milliseconds each, and that it finds what is wrong."""

import contextlib

import fuzz
import pytest
import torch

from dape.ops.score_attention import cpu
from dape.positions.kerple import Kerple

CASES = {"op": 400, "model": 300, "encoder": 100, "retrofit": 150, "command": 8, "merge": 8}


@pytest.mark.parametrize("kind", CASES)
def test_the_first_cases_differ_in_nothing(kind):
    refused = 0
    for number in range(CASES[kind]):
        try:
            draw, wrong = fuzz.run(kind, number)
        except fuzz.Refused:
            refused += 1
            continue
        assert not wrong, (number, wrong, draw.made)
    # Calls of the op are drawn so that every one is valid; some methods and caches exclude each other.
    assert refused <= (0 if kind == "op" else CASES[kind] / 3)


def failed(kind: str) -> bool:
    for number in range(CASES[kind]):
        with contextlib.suppress(fuzz.Refused):
            if fuzz.run(kind, number)[1]:
                return True
    return False


def test_a_small_error_in_a_backend_is_found(monkeypatch):
    attend = cpu.attend
    monkeypatch.setattr(cpu, "attend", lambda problem: attend(problem) + 0.01 * (problem.v.mean() > 0))
    assert failed("op")


def test_a_bias_that_counts_padding_is_found(monkeypatch):
    bias = Kerple.bias

    def counting_padding(self, q, k, positions, **options):
        return bias(self, q, k, positions, **options) if positions.visible.first is None else None

    monkeypatch.setattr(Kerple, "bias", counting_padding)
    monkeypatch.setattr(fuzz, "PROCESSORS", [""])
    monkeypatch.setattr(fuzz, "POSITIONS", {"kerple": Kerple})
    assert failed("model")


def test_a_sentence_of_python_is_found(monkeypatch):
    monkeypatch.setattr("dape.lab.comparison.read_about", lambda path, methods: path["methods"])
    assert failed("merge")


def test_a_case_is_drawn_from_its_number_alone():
    one = fuzz.run("op", 3)[0].made
    torch.manual_seed(1)
    assert one == fuzz.run("op", 3)[0].made != fuzz.run("op", 4)[0].made
