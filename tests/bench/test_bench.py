"""`dape bench`: complete records, right arithmetic, whole files, wrong backends caught. Never a word on speed."""

import importlib
import itertools
import json
import math
import re
import typing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dape.bench import attention, report, timing, train, workload
from dape.bench.workload import BOTH, FORWARD, Sizes, Workload
from dape.cli import main
from dape.ops.score_attention import api, native
from dev import memory, steps

needs_kernel = pytest.mark.skipif(native.PROBLEM is not None, reason="no compiled kernel")

SMALL = ["--heads", "2", "--head-dim", "4", "--width", "3", "--rounds", "2"]
KEYS = {
    "backend", "pass", "length", "batch", "milliseconds", "spread", "ratio_to_sdpa", "speedup_over_listing",
    "skipped", "threads", "torch", "device", "hardware", "dtype", "heads", "head_dim", "width",
    "kernel", "processor", "bias", "clock",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_attention_writes_one_record_a_cell(tmp_path, capsys):
    file = tmp_path / "cells.json"
    arguments = ["--lengths", "5,9,13", "--batch", "2", "--backends", "listing,tiled,reference,sdpa"]
    assert main(["bench", "attention", *SMALL, *arguments, "--json", str(file)]) == 0
    records = json.loads(file.read_text())
    cells = [(r["pass"], r["length"], r["backend"]) for r in records]
    backends = ("listing", "tiled", "reference", "sdpa")
    assert cells == list(itertools.product((FORWARD, BOTH), (5, 9, 13), backends))
    for record in records:
        assert set(record) == KEYS
        assert record["milliseconds"] > 0
        assert record["batch"] == 2
        beside = {r["backend"]: r["milliseconds"] for r in records
                  if (r["pass"], r["length"]) == (record["pass"], record["length"])}  # fmt: skip
        assert math.isclose(record["ratio_to_sdpa"], record["milliseconds"] / beside["sdpa"])
        assert math.isclose(record["speedup_over_listing"], beside["listing"] / record["milliseconds"])
    printed = capsys.readouterr().out
    # Where headings break depends on how wide the numbers are.
    assert re.search(r" ms .*\(IQR\) .*SDPA ", printed)


def test_decoding_of_any_processor_by_either_clock(tmp_path):
    file = tmp_path / "cells.json"
    arguments = ["--lengths", "4,12", "--backends", "tiled,sdpa", "--json", str(file)]
    chosen = ["--processor", "talking", "--bias", "separable", "--clock", "process"]
    assert main(["bench", "decode", *SMALL, *arguments, *chosen]) == 0
    records = json.loads(file.read_text())
    assert [(r["pass"], r["length"], r["backend"]) for r in records] == [
        ("decode", length, backend) for length in (4, 12) for backend in ("tiled", "sdpa")
    ]
    assert {(r["processor"], r["bias"], r["clock"]) for r in records} == {("talking", "separable", "process")}


def test_memory_sees_what_a_pass_allocates_or_says_that_it_cannot(capsys):
    sizes = Sizes(keys=512, queries=512, heads=2, head_dim=4, width=8)
    calls = [(name, BOTH, sizes) for name in ("listing", "tiled", "no such backend")]
    listing, tiled, none = memory.peak_extra_mb(calls, threads=1)
    assert none is None
    said = "no such backend, forward+backward, 512: its memory could not be measured: ValueError: unknown backend"
    assert said in capsys.readouterr().out
    # The listing keeps at least its image, hidden map and scores: 4 + 8 + 8 + 2 numbers a pair.
    assert listing > 512 * 512 * 22 * 4 / 1e6
    assert 0 < tiled < listing


def test_memory_as_records(tmp_path):
    file = tmp_path / "records.json"
    arguments = ["--lengths", "64", "--backends", "tiled", "--json", str(file)]
    assert memory.main([*SMALL, *arguments]) == 0
    records = json.loads(file.read_text())
    assert [(r["backend"], r["pass"], r["length"]) for r in records] == [
        ("tiled", FORWARD, 64),
        ("tiled", BOTH, 64),
    ]
    assert all(r["peak_extra_mb"] >= 0 for r in records)


def test_brackets_of_a_method_are_shown(capsys):
    report.print_table("dape1x3[groups=3,width=24]", [("a[b]", "a", "")], [{"a": "x[y=z]"}])
    # A title is folded to the width of its table.
    printed = "".join(capsys.readouterr().out.split())
    assert "dape1x3[groups=3,width=24]" in printed
    assert "x[y=z]" in printed
    assert "a[b]" in printed


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    calls = [("cpu", BOTH, Sizes(keys=8192, queries=8192)), ("tiled", BOTH, Sizes(keys=4096, queries=4096))]
    cpu, tiled = memory.peak_extra_mb(calls, threads=2)
    # The output and the gradients of q, k and v are 101 and 50 MB.
    assert 101 < cpu <= 125
    assert 50 < tiled <= 400


STEP = ["--length", "8", "--batch", "1", "--rounds", "1", "--methods", "dape1x3-kerple"]


def test_a_training_step_is_a_ratio_to_kerple(tmp_path):
    file = tmp_path / "methods.json"
    assert main(["bench", "train", *STEP, "--steps", "2", "--json", str(file)]) == 0
    records = json.loads(file.read_text())
    assert [r["method"] for r in records] == ["kerple", "dape1x3-kerple"]
    for record in records:
        assert math.isclose(record["ratio_to_kerple"], record["milliseconds"] / records[0]["milliseconds"])
        assert math.isclose(record["tokens_per_second"], 8000 / record["milliseconds"])
        assert (record["device"], record["dtype"]) == ("cpu", "torch.float32")


@pytest.mark.parametrize("last", [[], ["--last", "2", "--num-layers", "1", "--hidden-size", "32"]])
def test_the_loop_and_the_last_rows_are_ratios(last, tmp_path):
    file = tmp_path / "steps.json"
    assert steps.main([*STEP, *last, "--json", str(file)]) == 0
    [record] = json.loads(file.read_text())
    assert record["method"] == "dape1x3-kerple"
    assert record["ratio"] > 0


def wrong_module(factor_out=1.0, factor_grad=1.0):
    """A backend whose output or gradients are off by a factor."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor_out

        @staticmethod
        def backward(ctx, grad):
            return grad * factor_grad

    reference = api.BACKENDS["reference"]
    attend = lambda problem: Scaled.apply(reference.attend(problem))  # noqa: E731 (a name for a line)
    return SimpleNamespace(unsupported=lambda problem: None, attend=attend)


@pytest.mark.parametrize(
    ("module", "what"),
    [(wrong_module(factor_out=1.01), "output"), (wrong_module(factor_grad=1.1), "gradient of q"),
     (wrong_module(factor_out=float("nan")), "output")],
    ids=["output", "gradient", "nan"],
)  # fmt: skip
def test_a_wrong_backend_is_caught_before_anything_is_timed(module, what, monkeypatch, capsys):
    monkeypatch.setitem(api.BACKENDS, "wrong", module)
    monkeypatch.setattr(attention, "interleave", lambda *a: pytest.fail("timed"))
    assert main(["bench", "attention", *SMALL, "--lengths", "9", "--backends", "wrong"]) == 2
    assert f'backend "wrong" is wrong: its {what} is off' in capsys.readouterr().err


def test_a_wrong_model_is_caught(monkeypatch):
    monkeypatch.setitem(api.BACKENDS, "wrong", wrong_module(factor_out=2.0))
    with pytest.raises(ValueError, match='backend "wrong" is wrong in kerple'):
        train.run(train.Options(methods="kerple", length=8, batch=1, backend="wrong"))


def test_what_does_not_fit_in_memory_is_skipped_with_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(attention, "free_memory", lambda device: 10_000)
    sizes = {"lengths": "64", "heads": 1, "head_dim": 1, "width": 2, "rounds": 1}
    options = attention.Options(backends="listing,sdpa", **sizes)
    listing, sdpa = [r for r in attention.run(options) if r["pass"] == FORWARD]
    assert listing["milliseconds"] is None
    assert "needs about" in listing["skipped"]
    assert sdpa["milliseconds"] > 0
    assert sdpa["speedup_over_listing"] is None
    report.show(options.title, attention.COLUMNS, [listing], None)
    assert "listing, forward, 64: skipped: it needs about" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lengths", "5,x"], 'lengths="5,x": expected whole numbers'),
        (["--backends", "fast"], 'unknown backend "fast": choose from listing, '),
        (["--passes", "sideways"], 'unknown pass "sideways"'),
        (["--kernel", "2"], "defined for odd kernels"),
    ],
)
def test_a_mistake_is_a_sentence(arguments, sentence, capsys):
    assert main(["bench", "attention", "--heads", "2", "--head-dim", "4", "--lengths", "5", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_backend_that_cannot_run_is_left_out_or_refused(monkeypatch, capsys):
    cannot = SimpleNamespace(unsupported=lambda problem: "it wants a moon", attend=None)
    monkeypatch.setitem(api.BACKENDS, "lunar", cannot)
    sizes = Sizes(5, 5, heads=2, head_dim=4, width=3)
    where = [], torch.float32, "cpu"
    assert "lunar" not in attention.candidates("all", sizes, *where)
    assert "it wants a moon" in capsys.readouterr().out
    with pytest.raises(ValueError, match="it wants a moon"):
        attention.candidates("lunar", sizes, *where)


def test_every_candidate_computes_the_same_thing():
    sizes = Sizes(keys=20, queries=20, batch=2, heads=2, head_dim=4, width=3, kernel=5)
    for backend in ("listing", "tiled", "reference", "sdpa"):
        workload.compare_with_reference(backend, sizes)
    # The check compares with numbers that are not zero.
    assert all(result.abs().max() > 0 for result in Workload(sizes, torch.float64).results("reference")[:7])


@pytest.mark.parametrize("backend", ["listing", "tiled", "sdpa"])
def test_candidates_are_checked_at_the_length_that_is_timed(backend, monkeypatch):
    """A mistake in the last rows, after a thousand keys, is found."""
    sizes = Sizes(keys=1000, queries=1000, heads=1, head_dim=4, width=3)
    workload.compare_with_reference(backend, sizes)
    attend = Workload.attend

    def wrong(self, name):
        out = attend(self, name)
        return out + 0.1 * (torch.arange(out.shape[2]) > 990)[:, None] if name == backend else out

    monkeypatch.setattr(Workload, "attend", wrong)
    with pytest.raises(ValueError, match=rf'backend "{backend}" is wrong: its output is off by'):
        workload.compare_with_reference(backend, sizes)


@pytest.mark.parametrize("bias", typing.get_args(workload.BIAS))
def test_every_form_of_bias(bias):
    sizes = Sizes(keys=20, queries=20, batch=2, heads=2, head_dim=4, processor="mta", bias=bias)
    workload.compare_with_reference("tiled", sizes)
    workload.compare_with_reference("tiled", replace(sizes, keys=200, queries=150))
    reason = Workload(sizes).unsupported("listing")
    assert (reason is None) == (bias == "distance")


def test_timing_summary():
    assert timing.timing_of([4.0]) == timing.Timing(4.0, 0.0)
    assert timing.timing_of([1.0, 2.0, 3.0, 4.0, 100.0]) == timing.Timing(3.0, 2.0)


@pytest.mark.parametrize(
    "processor", ["plain", "talking", "mta3x5", "dape3x3", "keyconv1x3", "dape1x3[groups=2,width=4]"]
)
def test_every_processor_is_checked_and_timed(processor):
    sizes = {"lengths": "12", "heads": 2, "head_dim": 4, "width": 4, "rounds": 1}
    backends = "listing,tiled,sdpa" + ",sdpa with bias" * (processor == "plain")
    records = attention.run(attention.Options(backends=backends, processor=processor, **sizes))
    names = [record["backend"] for record in records if record["pass"] == FORWARD]
    assert names == [*backends.split(",")]
    assert all(record["milliseconds"] > 0 for record in records)


def test_generation_stands_beside_a_llama_of_the_same_size(tmp_path):
    file = tmp_path / "records.json"
    arguments = ["--tokens", "3", "--length", "5", "--rounds", "1", "--json", str(file)]
    assert main(["bench", "generate", *arguments]) == 0
    records = json.loads(file.read_text())
    assert [r["method"] for r in records] == ["llama", "kerple", "dape1x3-kerple"]
    sizes = [r["parameters"] for r in records]
    assert max(sizes) < 1.02 * min(sizes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["attention", "decode", "generate", "train"])
def test_a_gpu_that_is_missing_is_a_sentence(name, capsys):
    assert main(["bench", name, "--device", "cuda:1"]) == 2
    assert 'device="cuda:1", but torch sees no CUDA device' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention", "decode", "generate", "train"])
def test_tables_are_whole_at_80_columns(name, capsys):
    """Of long names and large numbers."""
    columns = importlib.import_module(f"dape.bench.{name}").COLUMNS
    words = {"pass": "forward+backward", "backend": "reference"}
    record = {}
    for _, key, form in columns:
        number = 1234 if form.endswith("d") else 1234.5
        record[key] = number if form else words.get(key, "dape1x3-kerple")
    report.print_table("a title", columns, [record])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert not any("…" in line for line in lines)
    for _, key, form in columns:
        assert format(record[key], form) in lines[-1]
