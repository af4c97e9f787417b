"""Files that are whole or absent, written under a temporary name and then renamed; and names to tell folders by."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replace the file by `content` (text as UTF-8): a reader, or a crash, sees the old file or the new one."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`, for writers that take a name; it becomes `path` if the block succeeds."""
    path = Path(path)
    # The suffix stays, because writers of pictures and archives choose the format by it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Have the file's bytes on the disk before going on."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Have the folder's entries on the disk, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def exclusive(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a lock file, waiting for whoever holds it; the system frees it when a process dies."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: one process at a time is then up to the user
        yield
        return
    while True:
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held it before has removed the file: a lock on it keeps nobody out.
            if not _is_still(file.fileno(), path):
                continue
            try:
                yield
            finally:
                os.unlink(path)
            return


def _is_still(handle: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def distinct_names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """A name for each path, fit for a file: as many of its last parts, joined by "-", as tell all of them apart."""
    parts = [[part for part in Path(path).parts if part != os.sep] or [str(path)] for path in paths]
    names: list[str] = []
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["-".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(map(tuple, parts))):
            break
    return names
