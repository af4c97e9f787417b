"""Sizes: the guide's table of parameter counts is what the models have, counted on the meta device."""

import re
from pathlib import Path

import pytest
import torch

from dape.models import PRESETS, DapeForCausalLM, preset

PAGE = Path(__file__).parents[2] / "docs" / "hugging_face.md"


def count(name: str, method: str) -> int:
    with torch.device("meta"):
        model = DapeForCausalLM(preset(name, method))
    return sum(parameter.numel() for parameter in model.parameters())


def documented() -> dict[str, tuple[int, int]]:
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (int(kerple.replace(",", "")), int(dape.replace(",", ""))) for name, kerple, dape in rows}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    assert documented().keys() == set(PRESETS)
    assert (count(name, "kerple"), count(name, "dape1x3-kerple")) == documented()[name]
