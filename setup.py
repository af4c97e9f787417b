"""Builds the C++ kernel, where there is a compiler; everything else stands in pyproject.toml."""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "src/dape/ops/score_attention/csrc"
# Never -ffast-math: it would switch the whole process to flush-to-zero.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
BUILDS = {"portable": []}
if X86:
    BUILDS["avx2"] = ["-mavx2", "-mfma"]
    BUILDS["avx512"] = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"]


class BuildKernel(build_ext):
    """Compiles one source once for each instruction set and links the results with the file that chooses."""

    def build_extension(self, ext):
        output = self.get_ext_fullpath(ext.name)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        objects = self._compile("dispatch.cpp", "dispatch", [("DAPE_X86", "1")] if X86 else [], [])
        for name, flags in BUILDS.items():
            objects += self._compile("kernel.cpp", name, [("BUILD", name)], flags)
        self.compiler.link_shared_object(
            objects,
            output,
            extra_postargs=["-pthread", "-ldl"],
            build_temp=self.build_temp,
            target_lang="c++",
        )

    def _compile(self, source, name, macros, flags):
        return self.compiler.compile(
            [f"{SOURCES}/{source}"],
            output_dir=f"{self.build_temp}/{name}",
            macros=macros,
            extra_postargs=FLAGS + flags,
            depends=[str(path) for path in Path(SOURCES).glob("*.h")],
        )


kernel = Extension(
    "dape.ops.score_attention._kernel",
    sources=[f"{SOURCES}/dispatch.cpp", f"{SOURCES}/kernel.cpp"],
    depends=[str(path) for path in Path(SOURCES).glob("*.h")],
    language="c++",
    # Without a compiler the installation still succeeds; the other backends do the work.
    optional=True,
)
setup(ext_modules=[kernel], cmdclass={"build_ext": BuildKernel})
