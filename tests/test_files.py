"""Files are whole or absent."""

import os

import pytest

from dape.files import distinct_names, replacing, write_atomically


def test_write_replaces(tmp_path):
    path = tmp_path / "x.json"
    write_atomically(path, "äöü")
    assert path.read_bytes() == "äöü".encode()
    write_atomically(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert list(tmp_path.iterdir()) == [path]


def test_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    monkeypatch.setattr(
        os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.png"
    write_atomically(path, "old")

    def interrupted():
        with replacing(path) as temporary:
            assert temporary.suffix == ".png"
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_mode_is_that_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("x")
    write_atomically(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b/"], ["a", "b"]),
        (["runs/a/model", "runs/b/model"], ["a-model", "b-model"]),
        (["x/a/model", "y/a/model", "b"], ["x-a-model", "y-a-model", "b"]),
        (["/a/model", "model"], ["a-model", "model"]),
        (["runs/a", "runs/a"], ["a", "a"]),
        (["."], ["."]),
        ([], []),
    ],
)
def test_names_tell_folders_apart(paths, names):
    assert distinct_names(paths) == names
