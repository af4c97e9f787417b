"""`dape doctor`: report which backends this machine can run, with advice for the others. Needs torch alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import dape
from dape.bench import workload
from dape.cli.parsing import Parser
from dape.devices import BF16_WORKAROUND, cpu_field, cpu_multiplies, find_device
from dape.errors import install
from dape.files import write_atomically
from dape.ops.score_attention import PLAIN
from dape.ops.score_attention.api import BACKENDS

# Import names of the packages in each extra.
EXTRAS = {
    "models": ("transformers", "safetensors"),
    "lab": ("tokenizers", "rich", "matplotlib", "pandas", "yaml"),
    "test": ("pytest", "ruff", "mypy"),
}
FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="dape doctor",
        description="Report the installed versions, the attention backends that can run here and, for each "
        "that cannot, the reason and a remedy; run each backend's kernels once against float64.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="test the Triton kernels on this GPU and time them: some minutes; exit code 1 if a test fails",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="write everything as JSON, for an issue on a GPU; implies --gpu",
    )
    options = parser.parse_args(arguments)
    findings = examine()
    if with_gpu := options.gpu or options.report is not None:
        from dape.bench import gpu

        findings["gpu"] = gpu.examine_gpu(
            find_device("auto"), lambda line: print(line, file=sys.stderr, flush=True)
        )
    if options.report is not None:
        write_atomically(options.report, json.dumps(findings, indent=2))
    if options.json:
        print(json.dumps(findings, indent=2))
    else:
        print("\n".join([text(findings), *([gpu.gpu_text(findings["gpu"])] if with_gpu else [])]))
    return int(with_gpu and not findings["gpu"]["passes"])


def examine() -> dict[str, Any]:
    """All findings of `dape doctor`, as JSON-serialisable data."""
    return {
        "versions": versions(),
        "machine": machine(),
        "backends": backends(),
        "kernels": kernels(find_device("auto")),
        "bfloat16": bfloat16(),
        "extras": extras(),
    }


def versions() -> dict[str, str | None]:
    installed: dict[str, str | None] = {"dape": dape.__version__, "python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def machine() -> dict[str, Any]:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    flags = cpu_field("flags", "Features").split()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_features": [name for name in FEATURES if name in flags],
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "compiler": compiler,
    }


def backends() -> list[dict[str, Any]]:
    """Whether each backend can run a small call here, and if not, the reason."""
    call = workload.Workload(workload.Sizes(4, 4, 1, 2, 16), device=find_device("auto")).problem()
    # PyTorch's own attention supports no other.
    plain = replace(call, program=PLAIN, bias=None)
    reasons = {
        name: module.unsupported(plain if name == "sdpa" else call) for name, module in BACKENDS.items()
    }
    return [{"name": name, "runs": reason is None, "reason": reason} for name, reason in reasons.items()]


def kernels(device: torch.device) -> list[dict[str, Any]]:
    """Run every backend with kernels of its own once, forward and backward, against the reference in float64.

    For each: the dtypes, the largest error relative to the largest value, and whether rounding explains it.
    """
    half = (torch.float16, torch.bfloat16) if device.type == "cuda" else ()
    calls = {
        "kernel 3": workload.Sizes(70, 70, 1, 4, 32, 16, 3),
        "wide heads, kernel 5": workload.Sizes(40, 40, 1, 3, 80, 32, 5),
        "decoding": workload.Sizes(70, 1, 1, 4, 32, 16, 3),
    }
    results = []
    names = [backend["name"] for backend in backends() if backend["runs"] and backend["name"] != "reference"]
    for backend, dtype, (name, sizes) in itertools.product(names, (torch.float32, *half), calls.items()):
        about = {"backend": backend, "dtype": str(dtype).removeprefix("torch."), "call": name}
        try:
            error = workload.compare_with_reference(backend, sizes, dtype, device)
            results.append({**about, "passes": True, "error": error})
        # A kernel may fail in any way, and the others must still be tested.
        except Exception as error:
            results.append({**about, "passes": False, "reason": f"{type(error).__name__}: {error}"})
    return results


def bfloat16() -> dict[str, Any]:
    """Whether bfloat16 products work on the CPU; tried in a subprocess, which may crash."""
    if cpu_multiplies(torch.bfloat16):
        return {"works": True, "advice": None}
    if cpu_multiplies(torch.bfloat16, BF16_WORKAROUND):
        advice = f"set {BF16_WORKAROUND} in the environment before Python starts"
    else:
        advice = "use float32 or float16 on the CPU"
    return {"works": False, "advice": advice}


def extras() -> dict[str, dict[str, Any]]:
    missing = {
        extra: [name for name in modules if importlib.util.find_spec(name) is None]
        for extra, modules in EXTRAS.items()
    }
    return {
        extra: {"missing": names, "advice": install(extra) if names else None}
        for extra, names in missing.items()
    }


def text(findings: dict[str, Any]) -> str:
    """The findings as text."""
    host, half = findings["machine"], findings["bfloat16"]
    kernels: dict[str, list[str]] = {}
    for kernel in findings["kernels"]:
        verdict = f"pass, error {kernel['error']:.1e}" if kernel["passes"] else f"FAIL: {kernel['reason']}"
        kernels.setdefault(kernel["backend"], []).append(f"{kernel['dtype']}, {kernel['call']}: {verdict}")
    sections: dict[str, list[tuple[str, str]]] = {
        "versions": [(name, version or "not installed") for name, version in findings["versions"].items()],
        "machine": [
            ("system", f"{host['system']}, {host['cores']} cores, {host['threads']} threads used"),
            ("CPU", f"{' '.join(host['cpu_features']) or 'no known vector extensions'} (PyTorch uses {host['torch_cpu_capability']})"),
            ("GPU", host["gpu"] or "none that PyTorch can use"),
            ("C++ compiler", host["compiler"] or "none: install g++ or clang++ to build the CPU kernel"),
        ],
        "attention backends, the fastest first": [
            (backend["name"], "runs" if backend["runs"] else f"cannot run here: {backend['reason']}")
            for backend in findings["backends"]
        ],
        "kernels against float64, forward and backward": [(n, line) for n, lines in kernels.items() for line in lines],
        "bfloat16 products on the CPU": [("", "work" if half["works"] else f"kill the process; {half['advice']}")],
        "extras": [
            (name, "installed" if not extra["missing"] else f"lacks {', '.join(extra['missing'])}: {extra['advice']}")
            for name, extra in findings["extras"].items()
        ],
    }  # fmt: skip
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {f'{name:<13}' if name else ''}{value}" for name, value in rows)]
    return "\n".join(lines)
