"""Environment of a comparison: versions, CPU, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import dape
from dape.devices import cpu_name
from dape.plugins import loaded_imports

PACKAGES = ("torch", "transformers", "numpy", "tokenizers")


def environment(jobs: int) -> dict[str, Any]:
    """Environment for the report, without the names of machine and user."""
    return {
        "dape": dape.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": num_cores(),
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


@cache
def commit() -> str | None:
    """Commit of the package's sources, if they are a working copy; marked if it has changes."""
    git = ["git", "-C", str(Path(dape.__file__).parent)]
    tracked = [*git, "ls-files", "--error-unmatch", "__init__.py"]
    described = [*git, "describe", "--always", "--dirty=, with changes", "--abbrev=12", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        done = subprocess.run(described, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
