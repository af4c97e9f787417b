"""The C++ kernel under hard conditions: unwritten memory, extreme numbers, forks, floating point modes."""

import ctypes.util
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import sanitize
import torch
from op_cases import PROGRAMS, RAGGED, SHAPES, SMALL, assert_as_exact, build, needs_kernel
from processes import python

from dape.ops.score_attention import DistanceBias, Visible, attention, native
from dev import stages

pytestmark = needs_kernel
CSRC = Path(native.__file__).parent / "csrc"


CASES = [
    *(shape.but(bias="distance") for shape in SHAPES.values()),
    *(RAGGED.but(program=x) for x in PROGRAMS),
]


@pytest.mark.parametrize("visible", ["all", "rows that see nothing"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_output_is_written(case, visible, monkeypatch):
    """Outputs start as NaN: what the kernel fails to write shows."""
    monkeypatch.setattr(
        native, "allocate", lambda *shape, dtype=torch.float32: torch.full(shape, torch.nan, dtype=dtype)
    )
    for name, value in build(case.but(visible=visible), torch.float32).results("cpu").items():
        assert value.isfinite().all(), name


def test_the_floating_point_mode_stays():
    assert_as_exact(SMALL, "cpu")
    tiny = torch.tensor(2.0**-140)
    assert float(tiny * 0.5) == 2.0**-141


def test_bounds_far_outside_are_harmless():
    q = torch.randn(1, 2, 30, 4)
    far = torch.full((1, 1), 2**40)
    bias = DistanceBias(torch.zeros(2, 30))
    wide = attention(q, q, q, None, bias=bias, visible=Visible(-far, far), backend="cpu")
    torch.testing.assert_close(wide, attention(q, q, q, None, bias=bias, backend="cpu"))
    assert (attention(q, q, q, None, bias=bias, visible=Visible(far), backend="cpu") == 0).all()


WORKER = """
    import os, sys, torch
    from dape.ops.score_attention import conv_program, DistanceBias, attention

    def result(by_distance=True):
        torch.manual_seed(0)
        q = torch.randn(2, 4, 100, 16, requires_grad=True)
        w = torch.randn(8, 8, 1, 3), torch.randn(8), torch.randn(4, 8, 1, 3), torch.randn(4)
        bias = DistanceBias(torch.randn(4, 100)) if by_distance else torch.randn(1, 4, 100, 100)
        out = attention(q, q, q, conv_program(*w, 1), bias=bias, backend="cpu")
        return torch.autograd.grad(out.sum(), q)[0].sum().item()
"""
FORK = """
    torch.set_num_threads(2)
    torch.randn(2000, 2000) @ torch.randn(2000, 2000)
    # A bias by distance needs torch's own convolution, whose threads do not survive a fork; the kernel's do.
    expected = result(by_distance=False)
    child = os.fork()
    if child == 0:
        os._exit(0 if result(by_distance=False) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
SHARE = """
    def threads(heads, keys):
        q, k = torch.randn(4, heads, 1, 64), torch.randn(4, heads, keys, 64)
        with torch.no_grad():
            attention(q, k, k, backend="cpu")
        return len(os.listdir("/proc/self/task"))

    torch.set_num_threads(2)
    # Where the system lists them.
    if os.path.isdir("/proc/self/task"):
        assert threads(1, 4) == threads(4, 64) < threads(12, 2048)
"""
LOADER = """
    class Rows(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return result()

    if __name__ == "__main__":
        expected = result()
        loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context=sys.argv[1])
        for batch in loader:
            assert abs(batch.item() - expected) < 1e-3, (batch, expected)
"""


@pytest.mark.parametrize(("body", "argument"), [(SHARE, ""), (FORK, ""), (LOADER, "fork"), (LOADER, "spawn")])
def test_worker_processes(body, argument, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER) + textwrap.dedent(body))
    python("-W", "ignore", script, argument)


def test_wrong_memory_is_refused():
    """The last check before pointers leave Python."""
    call = native.Call()
    with pytest.raises(AssertionError):
        call.point(q=torch.zeros(3, dtype=torch.float64))
    with pytest.raises(AssertionError):
        call.stride(q=torch.zeros(1, 2, 3, 4).transpose(2, 3))


def test_structures_are_those_of_the_sources():
    header = re.sub(r"//.*", "", (CSRC / "call.h").read_text())
    kinds = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
    for structure in (native.Call, native.Program, native.StageCall):
        body = re.search(rf"struct {structure.__name__} {{(.*?)}};", header, re.DOTALL)[1]
        fields = []
        for declaration in body.split(";")[:-1]:
            kind, names = declaration.strip().removeprefix("const ").split(maxsplit=1)
            for name in (name.strip() for name in names.split(",")):
                own = ctypes.c_void_p if "*" in names else kinds[kind]
                fields.append((name.strip("*").removesuffix("[3]"), own * 3 if "[3]" in name else own))
        assert structure._fields_ == fields


def test_a_kernel_of_other_sources_is_refused(monkeypatch):
    with pytest.raises(OSError, match="built from other sources"):
        native.load(Path(ctypes.util.find_library("m")))
    monkeypatch.setattr(native, "sources", lambda: "others")
    kernel, problem = native._find()
    assert kernel is None
    assert "it was built from other sources): rebuild it" in problem


def test_the_script_of_make_sanitize_runs_to_its_end(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "build", lambda *case: SimpleNamespace(results=len, attend=len))
    monkeypatch.setattr(native, "KERNEL", native.KERNEL)
    monkeypatch.setattr(stages, "LEAST_SECONDS", 0.0)
    sanitize.main(CSRC.with_name("_kernel.so"))
    assert len(re.findall("without a complaint", capsys.readouterr().out)) == len(native.builds())


def test_out_of_memory_is_an_error(monkeypatch):
    class Full:
        @staticmethod
        def dape_build_name(index):
            return [b"portable", None][index]

        @staticmethod
        def dape_forward(*args):
            return 2

    monkeypatch.setattr(native, "KERNEL", Full)
    with pytest.raises(MemoryError, match="forward pass"):
        native.run("forward", native.Call())


def test_rows_that_see_a_bad_value_show_it():
    q, k, v = (torch.randn(1, 1, 60, 4) for _ in range(3))
    v[0, 0, 50] = torch.nan
    bias = DistanceBias(torch.zeros(1, 60))
    out = attention(q, k, v, None, bias=bias, backend="cpu")
    assert out[0, 0, 50:].isnan().all()
