"""Environment of a comparison: versions, processor, memory, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import dape
from dape.devices import cpu_field
from dape.plugins import loaded_imports

PACKAGES = ("torch", "transformers", "numpy", "tokenizers")


def environment(jobs: int) -> dict[str, Any]:
    """Environment for the report, without the names of machine and user."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {
        "dape": dape.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": processor(),
        "cores": num_cores(),
        "memory": f"{_memory() / 2**30:.0f} GB" if _memory() else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "jobs": jobs,
        "threads": threads_of(jobs),
        **({"imports": imports} if (imports := loaded_imports()) else {}),
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(jobs: int) -> int:
    """Threads per process if `jobs` processes share the cores."""
    return max(1, num_cores() // jobs)


def processor() -> str:
    """Name of the CPU."""
    return cpu_field("model name") or platform.processor() or platform.machine()


@cache
def commit() -> str | None:
    """Commit of the package's sources, if they are a working copy; marked if it has changes."""
    folder = Path(dape.__file__).parent
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    name = _git(folder, "rev-parse", "--short=12", "HEAD") if tracked else None
    if not name:
        return None
    return f"{name}, with changes" if _git(folder, "status", "--porcelain", "--", ".") else name


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
