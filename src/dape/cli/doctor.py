"""`dape doctor`: report which backends this machine can run, with advice for the others. Needs torch alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import dape
from dape.cli.parsing import Parser
from dape.devices import BF16_WORKAROUND, cpu_field, cpu_multiplies, find_device
from dape.errors import install
from dape.files import write_atomically
from dape.ops.score_attention import PLAIN, DistanceBias, conv_program
from dape.ops.score_attention.api import BACKENDS
from dape.ops.score_attention.types import EVERYTHING, Problem

# Import names of the packages in each extra.
EXTRAS = {
    "models": ("transformers", "safetensors"),
    "lab": ("tokenizers", "rich", "matplotlib", "plotly", "yaml"),
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
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_features": cpu_features(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "compiler": compiler,
    }


def cpu_features() -> list[str]:
    """Vector instruction sets used by the kernel that the CPU supports."""
    words = cpu_field("flags", "Features").split()
    return [feature for feature in FEATURES if feature in words]


def backends() -> list[dict[str, Any]]:
    """Whether each backend can run a small call here, and if not, the reason."""
    device = find_device("auto")
    results = []
    for name, module in BACKENDS.items():
        reason = module.unsupported(_small_call(name, device))
        results.append({"name": name, "runs": reason is None, "reason": reason})
    return results


def kernels(device: torch.device) -> list[dict[str, Any]]:
    """Run every backend with kernels of its own once, forward and backward, against the reference in float64.

    For each: the dtypes, the largest error relative to the largest value, and whether rounding explains it.
    """
    from dape.bench import workload

    half = (torch.float16, torch.bfloat16) if device.type == "cuda" else ()
    calls = {
        "kernel 3": workload.Sizes(70, 70, 1, 4, 32, 16, 3),
        "wide heads, kernel 5": workload.Sizes(40, 40, 1, 3, 80, 32, 5),
        "decoding": workload.Sizes(70, 1, 1, 4, 32, 16, 3),
    }
    results = []
    for backend in backends():
        if not backend["runs"] or backend["name"] == "reference":
            continue
        for dtype in (torch.float32, *half):
            for name, sizes in calls.items():
                number = str(dtype).removeprefix("torch.")
                result: dict[str, Any] = {"backend": backend["name"], "dtype": number, "call": name}
                try:
                    result |= {
                        "passes": True,
                        "error": workload.compare_with_reference(backend["name"], sizes, dtype, device),
                    }
                # A kernel may fail in any way, and the others must still be tested.
                except Exception as error:
                    result |= {"passes": False, "reason": f"{type(error).__name__}: {error}"}
                results.append(result)
    return results


def _small_call(backend: str, device: torch.device) -> Problem:
    """A typical call: two heads, kernel 3, a bias by distance; plain attention for the backend that supports no other."""
    q = torch.zeros(1, 2, 4, 16, device=device)
    if backend == "sdpa":
        return Problem(q, q, q, PLAIN, None, EVERYTHING, True, 1.0, 0.0)
    expand, project = torch.zeros(4, 4, 1, 3, device=device), torch.zeros(2, 4, 1, 3, device=device)
    program = conv_program(expand, expand[:, 0, 0, 0], project, project[:, 0, 0, 0], left=1)
    bias = DistanceBias(torch.zeros(2, 4, device=device))
    return Problem(q, q, q, program, bias, EVERYTHING, True, 1.0, 0.0)


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
    status = {}
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        advice = install(extra) if missing else None
        status[extra] = {"missing": missing, "advice": advice}
    return status


def text(findings: dict[str, Any]) -> str:
    """The findings as text."""
    lines = ["versions"]
    lines += [f"  {name:<13}{version or 'not installed'}" for name, version in findings["versions"].items()]
    host = findings["machine"]
    lines += [
        "machine",
        f"  system       {host['system']}, {host['cores']} cores, {host['threads']} threads used",
        f"  CPU          {' '.join(host['cpu_features']) or 'no known vector extensions'} "
        f"(PyTorch uses {host['torch_cpu_capability']})",
        f"  GPU          {host['gpu'] or 'none that PyTorch can use'}",
        f"  C++ compiler {host['compiler'] or 'none found: install g++ or clang++ to build the CPU kernel'}",
        "attention backends, the fastest first",
    ]
    lines += [
        f"  {backend['name']:<13}{'runs' if backend['runs'] else 'cannot run here: ' + backend['reason']}"
        for backend in findings["backends"]
    ]
    lines.append("kernels against float64, forward and backward")
    for kernel in findings["kernels"]:
        verdict = f"pass, error {kernel['error']:.1e}" if kernel["passes"] else f"FAIL: {kernel['reason']}"
        lines.append(f"  {kernel['backend']:<13}{kernel['dtype']}, {kernel['call']}: {verdict}")
    half = findings["bfloat16"]
    verdict = "works" if half["works"] else f"kills the process; {half['advice']}"
    lines += ["bfloat16 products on the CPU", f"  {verdict}", "extras"]
    for name, extra in findings["extras"].items():
        state = (
            "installed" if not extra["missing"] else f"lacks {', '.join(extra['missing'])}: {extra['advice']}"
        )
        lines.append(f"  {name:<13}{state}")
    return "\n".join(lines)
