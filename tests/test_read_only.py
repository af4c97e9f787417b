"""Folders that an ordinary user may read and not write: what only reads works, the rest is a sentence before any work."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_commands import EVALUATION, TINY, ended, world

# Root may write anywhere.
USER = 65534 if os.geteuid() == 0 else None
pytestmark = pytest.mark.skipif(
    USER is not None and any(not folder.stat().st_mode & 0o001 for folder in Path(sys.prefix).parents),
    reason="other users cannot enter the folder of this environment",
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A corpus, its tokens, a run and a comparison, read-only; `secret` may not even be read."""
    # pytest's own folders are closed to other users.
    root = Path(tempfile.mkdtemp(prefix="dape-shared-"))
    root.chmod(0o755)
    for name, path in world().items():
        shutil.copytree(path, root / name)
    (root / "secret").mkdir()
    (root / "secret" / "a.txt").write_text("some text")
    for path in [*root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    (root / "secret" / "a.txt").chmod(0)
    yield root
    for path in [*root.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(root)


@pytest.fixture
def home(shared: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


READS = {
    "data show": "{data}",
    "eval": "{run} --lengths 16,32 --windows 4",
    "generate": "{run} --tokens 4",
    "inspect": "{run} --text ab --out {home}/maps",
    "merge": "{compared} {compared} --out {home}/merged",
    "train": f"--data {{data}} --corpus {{corpus}} {TINY} --out {{home}}/run",
    "retrofit": "{run} --steps 1 --corpus {corpus} --out {home}/retrofit",
    "data prepare": "{corpus} --out {home}/data",
}
WRITES = {
    "train": f"--corpus {{corpus}} {TINY} --out {{shared}}/new",
    "train again": f"--corpus {{corpus}} {TINY} --steps 9 --out {{run}}",
    "data prepare": "{corpus} --out {shared}/new",
    "compare": f"--methods kerple --corpus {{corpus}} {TINY} {EVALUATION} --out {{shared}}/new",
    "sweep": f"--methods kerple --corpus {{corpus}} {TINY} {EVALUATION} --over learning_rate=1e-3 --out {{shared}}/new",
    "merge": "{compared} {compared} --out {shared}/new",
    "inspect": "{run} --text ab --out {shared}/new",
    "retrofit": "{run} --corpus {corpus} --out {shared}/new",
    "suite": "{run} --out {shared}/new",
    "tasks run": "even_pairs --steps 1 --out {shared}/new",
    "bench attention": "--json {shared}/new.json",
}
UNREADABLE = {
    "train": "--corpus {secret} --out {home}/run",
    "data prepare": "{secret}/a.txt --out {home}/data",
}


def run(name: str, line: str, shared: Path, home: Path) -> tuple[int | None, str]:
    paths = {path.name: path for path in shared.iterdir()} | {"shared": shared, "home": home}
    words = name.removesuffix(" again").split()
    return ended([*words, *line.format(**paths).split()], home, USER)


@pytest.mark.parametrize("name", READS)
def test_what_only_reads_a_folder_works(name, shared, home):
    code, said = run(name, READS[name], shared, home)
    assert code == 0, said
    assert "denied" not in said


@pytest.mark.parametrize("name", WRITES)
def test_a_folder_that_may_not_be_written_is_a_sentence_before_any_work(name, shared, home):
    before = sorted(shared.rglob("*"))
    code, said = run(name, WRITES[name], shared, home)
    assert (code, said.count("\n")) == (2, 1), said
    assert "cannot be written: Permission denied" in said
    assert sorted(shared.rglob("*")) == before


@pytest.mark.parametrize("name", UNREADABLE)
def test_text_that_may_not_be_read_is_a_sentence(name, shared, home):
    code, said = run(name, UNREADABLE[name], shared, home)
    assert (code, said.count("\n")) == (2, 1), said
    assert "permission denied" in said.lower()
