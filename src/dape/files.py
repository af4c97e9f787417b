"""Atomic writes by temporary file and rename, JSON files, locks, and distinct names for paths."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Prefix of temporary files and folders, followed by their owner, so that leftovers of a kill can be removed.
WRITING = ".writing-"


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove temporary files of dead processes from the folder; `replacing` calls it before it writes."""
    for path in Path(folder).glob(f"{WRITING}*"):
        process, _, machine = path.name.removeprefix(WRITING).split("-")[0].partition("@")
        # Whether a process of another machine or container is alive cannot be checked.
        if not process.isdecimal() or machine != _machine() or _lives(int(process)):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@functools.cache
def _machine() -> str:
    """Identifier of the process id namespace: the machine's name and, on Linux, the container."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        container = ""
    return re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32] + re.sub(r"\D", "", container)


def _begin(folder: str | os.PathLike[str]) -> str:
    """Prefix of temporary files in the folder, after a sweep."""
    os.makedirs(folder, exist_ok=True)
    sweep(folder)
    return f"{WRITING}{os.getpid()}@{_machine()}-"


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replace the file by `content` (text as UTF-8) atomically: readers see the old file or the new one."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


class DamagedFile(ValueError, KeyError):
    """A file of ours lacks an entry. Also a KeyError, for readers to which the entry is optional."""

    __str__ = ValueError.__str__


class Entries(dict[str, Any]):
    """An object in a JSON file of ours; a missing entry raises an error with the path."""

    def __init__(self, entries: Iterable[tuple[str, Any]] = (), path: Path | None = None) -> None:
        super().__init__(entries)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise DamagedFile(f'{self.path} is damaged: it has no entry "{name}"')

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self.items()), self.path)


def read_json(path: str | os.PathLike[str], kind: type = dict) -> Any:
    """Read a JSON file of ours; invalid content, or a missing entry later, is a ValueError with the path."""
    path = Path(path)
    try:
        content = _parsed(path, path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} is damaged: it holds {json_kind(type(content))}, not {json_kind(kind)}")
    return content


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[Entries]:
    """Read a file of ours with one JSON object per line; invalid content is a ValueError with path and line."""
    path = Path(path)
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                content = _parsed(path, line)
            except ValueError as error:
                raise ValueError(f"{path} is damaged: line {number} is not JSON ({error})") from error
            if not isinstance(content, Entries):
                raise ValueError(
                    f"{path} is damaged: line {number} holds {json_kind(type(content))}, not an object"
                )
            yield content


def json_kind(kind: type) -> str:
    """A type in the words of JSON."""
    named = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return "an object" if issubclass(kind, dict) else named.get(kind, "a number")


def _parsed(path: Path, text: str) -> Any:
    return parse_text(text, object_pairs_hook=lambda pairs: Entries(pairs, path))


def parse_text(text: str | bytes, suffix: str = ".json", **options: Any) -> Any:
    """Content of JSON, TOML or YAML from anywhere; whatever is wrong with it is a ValueError, too deep nesting included.

    suffix: of a file of that kind. options: of json.loads.
    """
    try:
        if suffix == ".json":
            return json.loads(text, **options)
        if suffix == ".toml":
            import tomllib

            return tomllib.loads(text if isinstance(text, str) else text.decode())
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is too deeply nested") from None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path next to `path`, for writers that take a name; it becomes `path` if the block succeeds.

    A link is followed and stays one. A special file, such as a device or a pipe, is never replaced: the content is
    written into it after the block.
    """
    path = Path(path)
    target = _regular_target(path)
    # The suffix is kept, because writers of images and archives select the format by it.
    folder = tempfile.gettempdir() if target is None else target.parent
    prefix = f"{_begin(folder)}{path.stem[:120]}."
    handle, name = tempfile.mkstemp(dir=folder, prefix=prefix, suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if target is None:
            sys.stdout.flush()
            with open(temporary, "rb") as content, open(path, "wb") as device:
                shutil.copyfileobj(content, device)
            temporary.unlink()
            return
        _adopt(temporary, target)
        sync(temporary)
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _name(error, path)
        raise
    sync_folder(target.parent)


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike[str], *, last: str) -> Iterator[Path]:
    """An empty folder next to `path`, for writers of several files; it becomes `path` if the block succeeds.

    An existing folder keeps its other files, and each new file is moved into it atomically.
    last: the file that is moved after all others, such as checksums, which then reveal a partly updated folder.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file, expected a folder", str(path))
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f"{_begin(path.parent)}{path.name[:120]}."))
    try:
        os.chmod(temporary, 0o777 & ~_umask())
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                sync(file)
        if not path.exists():
            os.rename(temporary, path)
        else:
            for file in sorted(temporary.iterdir(), key=lambda file: (file.name == last, file.name)):
                if file.is_dir() and (path / file.name).is_dir():
                    shutil.rmtree(path / file.name)
                os.replace(file, path / file.name)
            temporary.rmdir()
            sync_folder(path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _name(error, path)
        raise
    sync_folder(path.parent)


def _name(error: BaseException, path: Path) -> None:
    """Put `path` into an error of a write, which has no name or that of our temporary file."""
    if isinstance(error, OSError) and error.errno is not None:
        known = str(error.filename or "")
        if not known or Path(known).name.startswith(WRITING):
            error.filename = str(path)


def _regular_target(path: Path) -> Path | None:
    """The file to replace, with links followed; None for a device, a pipe or an open file under /dev or /proc."""
    for _ in range(40):
        # /dev/stdout leads to an open file: a new file of the same name would not be that one.
        if os.path.realpath(path.parent).split(os.sep)[1:2] in (["dev"], ["proc"]):
            return None
        if not path.is_symlink():
            break
        path = path.parent / os.readlink(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, expected a file", str(path))
    return None if path.exists() and not path.is_file() else Path(os.path.realpath(path))


def _adopt(temporary: Path, path: Path) -> None:
    """Give the new file the mode and owner of the one that it replaces, or the default mode."""
    if not path.exists():
        os.chmod(temporary, 0o666 & ~_umask())
        return
    before = path.stat()
    with contextlib.suppress(PermissionError, AttributeError):
        os.chown(temporary, before.st_uid, before.st_gid)
    os.chmod(temporary, before.st_mode)


def check_output(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Raise an OSError with the reason if the file or folder could not be written; leaves no files behind."""
    path = Path(path)
    try:
        if folder:
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(f"{path} is a file, expected a folder")
            existing = path
            while not existing.exists():
                _check_name(existing)
                existing = existing.parent
            # Permissions are not sufficient: the file system may be read-only, full, or a special one.
            with tempfile.TemporaryFile(dir=existing):
                return
        target = _regular_target(path)
        if target is None:
            if not os.access(path, os.W_OK):
                raise PermissionError(f"{path} cannot be written")
            return
        _check_name(target)
        check_output(target.parent, folder=True)
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(f"{path} cannot be written: {error.strerror}") from error


def _check_name(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.lstat()  # a name that is too long is an OSError here


def sync(path: str | os.PathLike[str]) -> None:
    """Flush the file to the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Flush the folder's entries to the disk, if the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def exclusive(path: str | os.PathLike[str], *, busy: str = "") -> Iterator[None]:
    """Hold a lock file, which the system releases when a process dies.

    busy: message of the ValueError if another process holds it; without one, wait.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system: one process at a time is then up to the user
        yield
        return
    while True:
        with open(path, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
            except BlockingIOError:
                raise ValueError(busy) from None
            # The previous holder has removed the file: a lock on it excludes nobody.
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


def usual_mode(path: str | os.PathLike[str]) -> None:
    """Give a file the default mode of new files; some libraries restrict it to the owner."""
    with contextlib.suppress(PermissionError):
        os.chmod(path, 0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def distinct_names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """File names for paths: as many of their last parts, joined by "-", as make them distinct."""
    # "." and ".." are no names: those folders go by their own.
    whole = [Path(path) for path in paths]
    named = [path.resolve() if path.name in ("", "..") else path for path in whole]
    parts = [[part for part in path.parts if part != os.sep] or [str(path)] for path in named]
    names: list[str] = []
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["-".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(map(tuple, parts))):
            break
    return names


def plain(value: Any) -> Any:
    """The value as JSON data: None for non-finite numbers, lists for tuples, strings for dictionary keys."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
