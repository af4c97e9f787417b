"""Development tools: stages of the C++ kernel, and Triton kernels estimated without a GPU."""

import json

import pytest

from dape.bench import report
from dape.ops.score_attention import native
from dev import gpu_estimate, stages

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


def test_the_estimate_without_a_gpu(tmp_path, capsys):
    """The forward kernels of the standard shape: what the issue of speed rests on, and the page that says so."""
    pytest.importorskip("triton")
    page = tmp_path / "page.md"
    page.write_text(f"before {gpu_estimate.MARKER} old {gpu_estimate.MARKER} after")
    options = gpu_estimate.Options(shapes="125m", capabilities="80", backward=False)
    records = gpu_estimate.run(options)
    gpu_estimate.fill_page(page, records)
    total = records[-1]
    assert [x["kernel"] for x in records] == ["scores", "convolve", "attend", "all"]
    assert total["spills"] == 0
    assert total["launches"] == {"2048": 3, "8192": 6}
    # Six times FlashAttention-2's forward pass, 2.39 clocks by the same simulation.
    assert 2.39 < total["clocks"] <= 6 * 2.39
    assert all(x["programs"] >= 108 for x in records[:-1])
    assert 2 * max(x["shared"] for x in records[:-1]) <= 102_400
    # The same page from records on the disk.
    file = tmp_path / "kernels.json"
    report.write_json(file, records)
    text = page.read_text()
    page.write_text(f"before {gpu_estimate.MARKER} old {gpu_estimate.MARKER} after")
    capsys.readouterr()
    assert gpu_estimate.main(["--read", str(file), "--markdown", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "125m, sm_80, forward: 3 at 2,048 and 6 at 8,192 keys, started kernels" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert page.read_text() == text
    assert text.startswith("before")
    assert text.endswith("after")
    assert "| 125m | sm_80 | forward |" in text
    assert "old" not in text


def test_an_unknown_shape_is_a_sentence():
    with pytest.raises(ValueError, match='unknown shape "13b": choose from 125m'):
        gpu_estimate.main(["--shapes", "13b"])
