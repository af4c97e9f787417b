"""Devices by name, CPU features, and memory checks."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def device_name(name: str) -> None:
    """Raise if the name is not that of a device; its existence is checked on use."""
    if name == "auto":
        return
    try:
        torch.device(name)
    except RuntimeError:
        raise ValueError("no such device: pass auto, cpu, cuda, cuda:1, …") from None


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of that name, after a test; "auto" is this process's accelerator, or the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device_name(name)
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f'device="{name}", but torch sees no CUDA device')
        if device.index is None:
            device = torch.device("cuda", local_rank)
    if device.type != "cpu":
        try:
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f'device="{name}" cannot compute here: {reason}') from error
    return device


def free_memory(device: torch.device) -> int | None:
    """Free memory of a device in bytes, or None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            return None


def check_fits(needed: int, what: str, *, advice: str, device: torch.device | None = None) -> None:
    """Raise if `needed` bytes, a lower bound, are not free."""
    free = free_memory(device or torch.device("cpu"))
    if free is not None and needed > free:
        raise ValueError(
            f"{what} needs about {gigabytes(needed)} of memory and {gigabytes(free)} are free: {advice}"
        )


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


# Some CPUs advertise matrix units that crash the process; this setting makes oneDNN avoid them.
BF16_WORKAROUND = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
# Sizes at which vendor libraries use matrix units, where unusable ones crash the process.
PROBE = """
import torch
with torch.autocast("cpu", dtype=getattr(torch, "{dtype}")):
    x = torch.randn(256, 256, requires_grad=True)
    (x @ torch.randn(256, 256)).float().sum().backward()
"""


@functools.cache
def cpu_multiplies(dtype: torch.dtype, *settings: str) -> bool:
    """Whether a matrix product in this dtype works on the CPU; tried in a subprocess, which may crash.

    settings: environment variables of that process, NAME=VALUE.
    """
    program = PROBE.format(dtype=str(dtype).removeprefix("torch."))
    environment = {**os.environ, **dict(setting.split("=", 1) for setting in settings)}
    tried = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=120, check=False
    )
    return tried.returncode == 0


def cpu_field(*names: str) -> str:
    """Value of the first line of /proc/cpuinfo that begins with one of the names, or "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def cpu_name() -> str:
    return cpu_field("model name") or platform.processor() or platform.machine()
