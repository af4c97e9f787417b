"""`dape doctor`: it reports every backend and extra, says why and what to do, and needs torch alone."""

import json
import logging
from types import SimpleNamespace

import pytest
from processes import python

from dape.bench import gpu
from dape.cli import doctor, main
from dape.ops.score_attention import api
from dape.ops.score_attention.triton import selftest


@pytest.fixture
def _quick(monkeypatch):
    """Without the subprocess that tries bfloat16."""
    monkeypatch.setattr(doctor, "cpu_multiplies", lambda *_: True)


@pytest.mark.usefixtures("_quick")
def test_reports_every_backend_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [backend["name"] for backend in findings["backends"]] == list(api.BACKENDS)
    runs = {backend["name"]: backend["runs"] for backend in findings["backends"]}
    assert runs["tiled"]
    assert runs["reference"]
    assert runs["sdpa"]
    for backend in findings["backends"]:
        assert backend["runs"] == (backend["reason"] is None)
    for kernel in findings["kernels"]:
        assert kernel["passes"], kernel
    assert {kernel["backend"] for kernel in findings["kernels"]} >= {"tiled", "sdpa"}
    assert findings["machine"]["threads"] >= 1
    assert findings["versions"]["torch"]


@pytest.mark.usefixtures("_quick")
def test_says_why_a_backend_cannot_run(monkeypatch, capsys):
    cannot = SimpleNamespace(unsupported=lambda problem: "it wants a moon: go there")
    monkeypatch.setitem(api.BACKENDS, "lunar", cannot)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.split()[:1] == ["lunar"]]
    assert line.endswith("cannot run here: it wants a moon: go there")


@pytest.mark.usefixtures("_quick")
def test_the_report_on_a_gpu(monkeypatch, capsys, tmp_path):
    """Without one every call of the self-test fails: the report says why, and the exit code is 1."""
    pytest.importorskip("triton")
    plain = selftest.SUITE["plain, sink"] | {"length": 20, "batch": 1}
    monkeypatch.setattr(selftest, "SUITE", {"plain, sink": plain})
    file = tmp_path / "report.json"
    assert main(["doctor", "--report", str(file)]) == 1
    shown = capsys.readouterr()
    assert "FAIL  plain, sink: a test call failed with RuntimeError: 0 active drivers" in shown.out
    assert "self-test: plain, sink" in shown.err
    report = json.loads(file.read_text())
    assert not report["gpu"]["passes"]
    assert report["gpu"]["self_test"][0]["call"] == "plain, sink"
    assert report["versions"]["torch"]
    monkeypatch.setattr(selftest, "errors", lambda device, **kind: {"out": 1e-4, "q": 2e-3})
    assert main(["doctor", "--gpu"]) == 0
    assert "pass  plain, sink: largest error 2.0e-03, of q" in capsys.readouterr().out


def test_the_report_says_what_is_compiled():
    """A self-test of minutes must not look stuck."""
    lines = []
    logger = logging.getLogger("dape.ops.score_attention.triton.launch")
    with gpu.compiling(lines.append):
        logger.info("compiling %s, once", "attend_kernel")
    logger.info("compiling %s, once", "merge_kernel")
    assert lines == ["  compiling attend_kernel, once"]


def test_the_driver_is_asked_of_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.driver_version() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 570.86.10\necho 570.86.10\n")
    program.chmod(0o755)
    assert gpu.driver_version() == "570.86.10"


@pytest.mark.parametrize(
    ("survives", "works", "advice"),
    [
        (lambda *_: True, True, None),
        (lambda dtype, *settings: bool(settings), False, "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (lambda *_: False, False, "use float32"),
    ],
    ids=["works", "works with the variable", "does not work"],
)  # fmt: skip
def test_advice_on_bfloat16(monkeypatch, survives, works, advice):
    monkeypatch.setattr(doctor, "cpu_multiplies", survives)
    found = doctor.bfloat16()
    assert found["works"] == works
    assert (advice is None) == (found["advice"] is None)
    assert advice is None or advice in found["advice"]


def test_needs_torch_alone():
    blocked = "rich", "transformers", "matplotlib", "pandas", "tokenizers", "yaml"
    program = (
        "import importlib.util, sys\n"
        f"for name in {blocked}: sys.modules[name] = None\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, package=None: None if name in {blocked} else find(name)\n"
        "from dape.cli import doctor, main\n"
        "doctor.cpu_multiplies = lambda *_: True\n"
        "sys.exit(main(['doctor']))\n"
    )
    assert "lacks tokenizers, rich" in python("-c", program)


@pytest.mark.usefixtures("_quick")
def test_a_kernel_that_is_wrong_fails_by_name(monkeypatch, capsys):
    attend = api.BACKENDS["tiled"].attend
    monkeypatch.setattr(api.BACKENDS["tiled"], "attend", lambda problem: 1.1 * attend(problem))
    assert main(["doctor"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["tiled"]]
    assert any("FAIL" in line and "its output is off by" in line for line in lines)
