"""One process trains in a folder at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, or raise if somebody else does; the system frees it when a process dies."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: taking care is then up to the user
        yield
        return
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is training in {folder}: wait for it, or use another folder"
            ) from None
        yield
