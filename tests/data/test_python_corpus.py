"""The built-in corpus `python`: the same text on every machine that has the pinned packages, packages held out whole."""

import re
from pathlib import Path

import pytest

from dape.data import find_corpus, open_data, prepare, python_corpus
from dape.data.chunks import Chunk
from dape.data.corpora import default_validation
from dape.data.packing import ByName
from dape.training import TrainConfig


def test_the_installed_files_are_those_of_the_list():
    corpus = find_corpus("python")
    assert corpus.note == ""
    assert [source.name for source in corpus.sources] == [file.name for file in python_corpus.listed()[0]]
    assert all(source.size >= 30_000 for source in corpus.sources)


def test_whole_packages_are_held_out():
    side = ByName(default_validation("python").split(","))
    packages: dict[str, set[str]] = {"train": set(), "validation": set()}
    for source in find_corpus("python").sources:
        packages[side(Chunk(source.name, "", True))].add(source.name.split("/")[0])
    config = TrainConfig(corpus="python")
    assert (config.tokenizer, config.validation) == ("bpe:2048", "matplotlib/,networkx/,numpy/")
    assert packages["validation"] == set(python_corpus.HELD_OUT)
    assert packages["train"] == set(python_corpus.PACKAGES) - set(python_corpus.HELD_OUT)


def test_a_folder_is_held_out_by_its_name(tmp_path):
    for name in ("a/one.py", "a/deep/two.py", "b/three.py"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" * 20)
    data = prepare(str(tmp_path / "text"), tmp_path / "data", validation=["a/"], progress=False)
    assert (data.train.num_documents, data.validation.num_documents) == (1, 2)
    assert open_data(tmp_path / "data").manifest["recipe"]["validation"] == ["a/"]


def test_other_versions_are_said_and_a_missing_package_is_an_error(monkeypatch):
    files, versions = python_corpus.listed()
    other = [
        python_corpus.Listed(file.name, file.size + (file.package == "numpy"), file.sha256) for file in files
    ]
    monkeypatch.setattr(python_corpus, "listed", lambda: (other, versions))
    count = sum(file.package == "numpy" for file in files)
    assert (
        f"numpy {versions['numpy']} instead of {versions['numpy']} ({count} files differ)"
        in find_corpus("python").note
    )
    monkeypatch.setattr(python_corpus, "PACKAGES", {**python_corpus.PACKAGES, "no_such_package": "MIT"})
    with pytest.raises(ValueError, match="needs the package no_such_package, which is not installed: pip"):
        find_corpus("python")


def test_the_versions_are_those_that_are_pinned():
    pins = Path("constraints.txt").read_text()
    for package, version in python_corpus.listed()[1].items():
        assert re.search(rf"^{package}=={re.escape(version.split('+')[0])}$", pins, re.M), package
