"""Files are whole or absent."""

import errno
import os
import stat
import subprocess
import sys
from functools import partial

import pytest

from dape.errors import sentence
from dape.files import WRITING, check_output, distinct_names, replacing, replacing_folder, write_atomically


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_writer_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "x.png"
    write_atomically(path, "old")
    with pytest.raises(type(error)), replacing(path) as temporary:  # noqa: PT012 (the writer is interrupted)
        assert temporary.suffix == ".png"
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def killed(writer: str, path) -> None:
    """Have another process begin to write, and end in the middle of it."""
    code = f"import os, sys; from dape.files import *\nwith {writer} as half:\n print('x'); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(path)], stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "writer", ["replacing(sys.argv[1])", "replacing_folder(sys.argv[1], last='')"], ids=["file", "folder"]
)
def test_whoever_writes_into_a_folder_sweeps_what_killed_writers_left_there(tmp_path, writer):
    killed(writer, tmp_path / "x")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(WRITING)
    # What lives, or lives where it cannot be asked, stays.
    elsewhere = tmp_path / left.name.replace("@", "@elsewhere")
    elsewhere.touch()
    with replacing(tmp_path / "y"):
        mine = {path.name for path in tmp_path.iterdir()}
        write_atomically(tmp_path / "z", "")
        assert mine <= {path.name for path in tmp_path.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([elsewhere.name, "y", "z"])


def test_a_folder_is_whole_or_absent(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt), replacing_folder(path, last="sums") as temporary:  # noqa: PT012 (the writer is interrupted)
        (temporary / "weights").write_text("half")
        assert not path.exists()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with replacing_folder(path, last="sums") as temporary:
        (temporary / "weights").write_text("1")
    assert (path / "weights").read_text() == "1"
    (tmp_path / "plain").mkdir()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_that_is_there_gets_each_file_whole_and_the_last_one_last(tmp_path, monkeypatch):
    path = tmp_path / "model"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    (path / "weights").write_text("1")
    order, rename = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(os.path.basename(b)), rename(a, b)))
    with replacing_folder(path, last="a-sums") as temporary:
        for name in ("a-sums", "weights"):
            (temporary / name).write_text("2")
        assert (path / "weights").read_text() == "1"
    assert order == ["weights", "a-sums"]
    assert {file.name: file.read_text() for file in path.iterdir()} == {
        "notes.txt": "mine",
        "weights": "2",
        "a-sums": "2",
    }
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), replacing_folder(tmp_path / "file", last=""):
        pass
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, "content")


def test_a_link_is_followed_and_stays_and_the_mode_is_that_of_any_new_file(tmp_path):
    (tmp_path / "there").mkdir()
    target, link, plain = tmp_path / "there" / "x.json", tmp_path / "link.json", tmp_path / "plain"
    link.symlink_to(target)
    for content in ("äöü", b"\x00\x01"):
        write_atomically(link, content)
        assert target.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert link.is_symlink()
    plain.touch()
    assert target.stat().st_mode == plain.stat().st_mode


def test_pipes_and_devices_are_written_to_and_stay(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]
    write_atomically(os.devnull, "content")
    if os.path.exists("/dev/full"):
        with pytest.raises(OSError, match="No space left") as raised:
            write_atomically("/dev/full", "content")
        assert sentence(raised.value) == "/dev/full: the disk is full"
    for device in (os.devnull, "/dev/full"):
        assert not os.path.exists(device) or stat.S_ISCHR(os.stat(device).st_mode)


def test_an_error_of_writing_names_the_file_that_was_asked_for(tmp_path):
    for writer in (replacing, partial(replacing_folder, last="x")):
        with pytest.raises(OSError, match="No space") as raised, writer(tmp_path / "new"):
            raise OSError(errno.ENOSPC, "No space left on device")
        assert sentence(raised.value) == f"{tmp_path / 'new'}: the disk is full"
        assert not any(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="no such device")
@pytest.mark.parametrize("where", ["file", "pipe"])
def test_standard_output_is_written_to(tmp_path, where):
    program = (
        "from dape.files import write_atomically; print('first'); write_atomically('/dev/stdout', 'content')"
    )
    with open(tmp_path / "out", "wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=file if where == "file" else subprocess.PIPE, check=True
        )
    said = (tmp_path / "out").read_bytes() if where == "file" else done.stdout
    assert said.endswith(b"content")


@pytest.mark.parametrize(
    ("path", "folder", "message"),
    [
        ("file/x.json", False, "cannot be written: Not a directory"),
        ("file", True, "is a file, expected a folder"),
        ("folder", False, "is a folder, expected a file"),
        ("file/deeper/still", True, "cannot be written: Not a directory"),
        ("n" * 300, False, "cannot be written: File name too long"),
        ("n" * 300 + "/deeper", True, "cannot be written: File name too long"),
        ("/proc/nosuch", True, "/proc/nosuch cannot be written"),
    ],
)
def test_an_output_that_cannot_be_written_is_said_beforehand(tmp_path, path, folder, message):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match=message):
        check_output(tmp_path / path, folder=folder)
    # A check leaves nothing.
    check_output(tmp_path / "x.json")
    check_output(tmp_path / "new" / "x.json")
    check_output(tmp_path / "deep" / "er", folder=True)
    check_output("/dev/null")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b/"], ["a", "b"]), (["runs/a/model", "runs/b/model"], ["a-model", "b-model"]),
        (["x/a/model", "y/a/model", "b"], ["x-a-model", "y-a-model", "b"]),
        (["/a/model", "model"], ["a-model", "model"]), (["runs/a", "runs/a"], ["a", "a"]),
        (["."], ["here"]), ([".", "b/.."], ["here", "here"]), ([], [])
    ],
)  # fmt: skip
def test_names_tell_folders_apart(paths, names, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert distinct_names(paths) == names
