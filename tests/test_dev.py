"""Development tools: stages of the C++ kernel."""

import json

import pytest

from dape.ops.score_attention import native
from dev import stages

needs_kernel = pytest.mark.skipif(native.PROBLEM is not None, reason="no compiled kernel")


@needs_kernel
@pytest.mark.parametrize("build", native.builds())
def test_stages_of_the_kernel(build, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "LEAST_SECONDS", 0.0)
    file = tmp_path / "stages.json"
    sizes = ["--length", "100", "--heads", "3", "--head-dim", "5", "--width", "9", "--rounds", "1"]
    assert stages.main([*sizes, "--build", build, "--json", str(file)]) == 0
    records = json.loads(file.read_text())
    assert {r["stage"] for r in records} == {"all", *(stage for _, stage, _ in stages.STAGES.values())}
    # What is computed, by hand: 3 heads of 5 numbers; 3 → 9 channels by 3 taps (2 in pairs of columns where there are 8).
    macs = {(r["pass"], r["stage"]): r["gmacs"] and r["gmacs"] * r["microseconds"] for r in records}
    assert macs["forward", "dots"] / macs["forward", "expand"] == pytest.approx(3 * 5 / (3 * 9 * 3))
    assert macs["forward", "project"] / macs["forward", "expand"] == pytest.approx(2 / 3)
    assert macs["backward", "keys, values"] == pytest.approx(2 * macs["backward", "q"])
    assert macs["forward", "softmax"] is None
