"""Errors as one sentence, printed by the command line and reported by workers."""

from __future__ import annotations

import errno
import re

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota of the disk is used up"}
# torch's messages of failed allocations, on the CPU and on a GPU.
ALLOCATION = re.compile(r"tried to allocate ([\d.,]+\s*\w+)|allocate ([\d.]+ \w+)", re.IGNORECASE)


def install(extra: str) -> str:
    """Command that installs an extra of this package, which is not on an index yet."""
    return f'pip install ".[{extra}]" in a clone of dape'


def sentence(error: BaseException) -> str:
    """The error in one line, with the path or the size in it; unexpected ones with their type."""
    text = " ".join(str(error).split())
    if out_of_memory(error):
        size = ALLOCATION.search(text)
        wanted = f" for {size[1] or size[2]}" if size else ""
        return f"out of memory{wanted}: make the batch, the length or the model smaller"
    if isinstance(error, OSError) and error.errno is not None:
        reason = FULL.get(error.errno) or (error.strerror or "").lower() or text
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return f"{', '.join(names)}: {reason}" if names else reason
    if isinstance(error, ValueError | TypeError | OSError):
        return text or type(error).__name__
    if isinstance(error, KeyError):
        return f"there is no {text}"
    if isinstance(error, RecursionError):
        return "too deeply nested"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def expected(error: BaseException) -> bool:
    """Whether the error is due to the user or the machine; any other is a bug."""
    return isinstance(error, ValueError | TypeError | OSError | MemoryError) or out_of_memory(error)


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    # torch.OutOfMemoryError is a RuntimeError; the CPU's allocator raises a plain one.
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text.lower() or "DefaultCPUAllocator" in text or "can't allocate memory" in text
    )
