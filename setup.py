"""Builds the C++ kernel, where there is a compiler; everything else stands in pyproject.toml.

The kernel is a plain shared library, loaded by ctypes: one wheel a platform serves every Python.

CXX                    the compiler's command, by default c++, g++ or clang++; on Windows clang as ziglang brings it,
                       because MSVC has no vector types and MinGW's GCC misaligns AVX registers on the stack.
CFLAGS, LDFLAGS        added to its arguments.
DAPE_KERNEL_PLATFORM   the platform to build for (such as win_amd64), where CXX is a cross compiler.
DAPE_REQUIRE_KERNEL    fail where the kernel cannot be built, in place of leaving it out.
"""

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/dape/ops/score_attention/csrc")
# Never -ffast-math: it would switch the whole process to flush-to-zero.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"]

PLATFORM = (
    os.environ.get("DAPE_KERNEL_PLATFORM", sysconfig.get_platform())
    .lower()
    .replace("-", "_")
    .replace(".", "_")
)
WINDOWS = PLATFORM.startswith("win")
X86 = PLATFORM.endswith(("x86_64", "amd64"))
# Sixteen lanes make tiles of 48 queries; in the short build they have 16.
SHORT = [*AVX512, "-DDAPE_VECTORS=1"]
BUILDS = {"portable": []}
if X86:
    BUILDS |= {"avx2": AVX2, "avx512": AVX512, "avx512_short": SHORT}
LIBRARY = "_kernel.dll" if WINDOWS else "_kernel.so"


def compiler() -> list[str]:
    """The command that compiles, as words."""
    if given := os.environ.get("CXX"):
        return shlex.split(given)
    if WINDOWS:
        if importlib.util.find_spec("ziglang") is None:
            raise OSError("the kernel needs clang on Windows: pip install ziglang")
        return [sys.executable, "-m", "ziglang", "c++"]
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise OSError("no C++ compiler: looked for c++, g++ and clang++")


class BuildKernel(build_ext):
    """Compiles one source once for each instruction set and links the results with the file that chooses."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")[:-1]) / LIBRARY)

    def build_extension(self, ext):
        output = Path(self.get_ext_fullpath(ext.name))
        try:
            self._build(output)
        except (OSError, subprocess.CalledProcessError) as error:
            # Without a compiler the installation still succeeds; the other backends do the work.
            if os.environ.get("DAPE_REQUIRE_KERNEL"):
                raise
            self.warn(f"the C++ kernel was not built ({error}): the backend `cpu` will say so")

    def copy_extensions_to_source(self):
        target = Path("src") / self.get_ext_filename(self.extensions[0].name)
        built = Path(self.build_lib) / self.get_ext_filename(self.extensions[0].name)
        if built.exists():
            # Kernels of versions that named them after a Python would be found too.
            for old in target.parent.glob("_kernel.*"):
                old.unlink()
            self.copy_file(str(built), str(target))

    def _build(self, output):
        command, objects = compiler(), []
        folder = Path(self.build_temp).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        # As native.sources, which tells a library of other sources by it.
        files = sorted(SOURCES.glob("*.[ch]*"), key=lambda path: path.name)
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        defined = [f'-DDAPE_SOURCES="{digest}"', *(["-DDAPE_X86=1"] if X86 else [])]
        parts = [("dispatch.cpp", "dispatch", defined)]
        parts += [("kernel.cpp", name, [f"-DBUILD={name}", *flags]) for name, flags in BUILDS.items()]
        pic = [] if WINDOWS else ["-fPIC"]
        commands = []
        for source, name, flags in parts:
            objects.append(str(folder / f"{name}.o"))
            words = [*FLAGS, *pic, *shlex.split(os.environ.get("CFLAGS", "")), *flags]
            commands.append([*command, *words, "-c", str(SOURCES / source), "-o", objects[-1]])
        # Each takes half a minute.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._run, commands))
        libraries = ["-ldl"] if PLATFORM.startswith("linux") else []
        words = ["-shared", "-pthread", *shlex.split(os.environ.get("LDFLAGS", "")), *libraries]
        self._run([*command, *objects, *words, "-o", str(output)])

    def _run(self, words):
        self.announce(shlex.join(words), level=2)
        subprocess.run(words, check=True)


class PlatformWheel(bdist_wheel):
    """py3-none-PLATFORM with the kernel in it, py3-none-any without."""

    def get_tag(self):
        kernel = Path(self.get_finalized_command("build").build_lib) / "dape/ops/score_attention" / LIBRARY
        *_, platform = super().get_tag()
        given = os.environ.get("DAPE_KERNEL_PLATFORM")
        return ("py3", "none", (PLATFORM if given else platform) if kernel.exists() else "any")


kernel = Extension(
    "dape.ops.score_attention._kernel", sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))]
)
setup(ext_modules=[kernel], cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel})
