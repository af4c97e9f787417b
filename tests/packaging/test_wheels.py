"""Wheels: one a platform for every Python, none of them in need of a compiler to install."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "src")
HOOK = "import sys, setuptools.build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


@pytest.fixture
def clone(tmp_path):
    """The files that a build reads, without anything built."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("*.so", "*.dll", "__pycache__", "*.egg-info")
            shutil.copytree(source, tmp_path / "clone" / name, ignore=skip)
        else:
            (tmp_path / "clone").mkdir(exist_ok=True)
            shutil.copy(source, tmp_path / "clone" / name)
    return tmp_path / "clone"


def build(clone, kind, out, timeout=300, **environment):
    """The path of a wheel or sdist, built as pip does it."""
    out.mkdir(exist_ok=True)
    command, env = [sys.executable, "-c", HOOK, kind, str(out)], {**os.environ, **environment}
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def kernels(wheel):
    return [name for name in zipfile.ZipFile(wheel).namelist() if "_kernel" in name]


# A stand-in that is fast: what is tested is what becomes of its output.
STAND_IN = """#!{python}
import sys
open(sys.argv[sys.argv.index("-o") + 1], "w").write(" ".join(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("platform", "library", "instructions"),
    [
        ("win_amd64", "_kernel.dll", True),
        ("macosx_11_0_arm64", "_kernel.so", False),
        ("linux_x86_64", "_kernel.so", True),
        ("linux_aarch64", "_kernel.so", False),
    ],
)
def test_a_wheel_is_for_a_platform_and_every_python(clone, tmp_path, platform, library, instructions):
    compiler = tmp_path / "compiler"
    compiler.write_text(STAND_IN.format(python=sys.executable))
    compiler.chmod(0o755)
    chosen = {"CXX": str(compiler), "DAPE_KERNEL_PLATFORM": platform, "DAPE_REQUIRE_KERNEL": "1"}
    wheel = build(clone, "wheel", tmp_path / "out", **chosen)
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert kernels(wheel) == [f"dape/ops/score_attention/{library}"]
    linked = zipfile.ZipFile(wheel).read(kernels(wheel)[0]).decode()
    assert ("avx512.o" in linked) == instructions


def test_without_a_compiler_the_source_distribution_gives_a_wheel_for_any_platform(clone, tmp_path):
    nothing = {"PATH": str(tmp_path / "empty"), "CXX": ""}
    sdist = build(clone, "sdist", tmp_path / "out", **nothing)
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "src/dape/ops/score_attention/csrc/dispatch.cpp").exists()
    wheel = build(unpacked, "wheel", tmp_path / "out", **nothing)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not kernels(wheel)
    assert "dape/py.typed" in zipfile.ZipFile(wheel).namelist()


TARGETS = {
    "win_amd64": ("x86_64-windows-gnu", b"MZ"),
    "macosx_11_0_arm64": ("aarch64-macos", b"\xcf\xfa\xed\xfe"),
    "linux_aarch64": ("aarch64-linux-gnu", b"\x7fELF"),
}


@pytest.mark.slow
@pytest.mark.parametrize("platform", TARGETS)
def test_the_kernel_compiles_for_platforms_that_are_not_here(clone, tmp_path, platform):
    """Compiled and linked by clang (`pip install ziglang`); what it computes there is untested."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang, as a cross compiler")
    target, beginning = TARGETS[platform]
    chosen = {"DAPE_KERNEL_PLATFORM": platform, "DAPE_REQUIRE_KERNEL": "1"}
    chosen["CXX"] = f"{sys.executable} -m ziglang c++ -target {target}"
    wheel = build(clone, "wheel", tmp_path / "out", timeout=3600, **chosen)
    library = zipfile.ZipFile(wheel).read(kernels(wheel)[0])
    assert library.startswith(beginning)
    for name in (b"dape_forward", b"dape_backward", b"dape_decode", b"dape_build_name"):
        assert name in library


@pytest.mark.parametrize(
    ("platform", "reason"),
    [("linux", "no C++ compiler was found"), ("win32", "it builds with clang alone on Windows")],
)
def test_where_the_kernel_is_missing_the_reason_is_the_platforms(platform, reason, tmp_path, monkeypatch):
    copied = shutil.copy(ROOT / "src/dape/ops/score_attention/native.py", tmp_path)
    spec = importlib.util.spec_from_file_location("native_without_kernel", copied)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "platform", platform)
    spec.loader.exec_module(module)
    assert module.KERNEL is None
    assert reason in module.PROBLEM
