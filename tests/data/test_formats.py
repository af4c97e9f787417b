"""Every kind of corpus gives its documents, in a fixed order; every fault is a sentence with file and place."""

import gzip
import json
import os
import sys
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from dape.checksums import file_digest
from dape.data import BadText, find_corpus, prepare, readers
from dape.data import chunks as chunks_module
from dape.data.chunks import Chunk, cut_documents, whole

TEXTS = ["first text\n", "the second, with naïve ünïcode ∑\n", "third\nwith two lines"]


def documents(spec, **options):
    """{name: text} of a corpus, in its order."""
    found: dict[str, str] = {}
    for source in find_corpus(str(spec), **options).sources:
        for chunk in source.read():
            found[chunk.document] = found.get(chunk.document, "") + chunk.text
    return found


def lines(field="text"):
    return "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(TEXTS)).encode()


WRITERS = {
    "x.jsonl": lambda path: path.write_bytes(lines()),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines())),
    # Two frames, as tools that append write them.
    "x.jsonl.zst": lambda path: path.write_bytes(
        zstandard.compress(lines()[:30]) + zstandard.compress(lines()[30:])
    ),
    "x.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_records_with_the_hash_of_the_file(name, tmp_path):
    path = tmp_path / name
    WRITERS[name](path)
    (source,) = find_corpus(str(path)).sources
    reading = source.read()
    found = {chunk.document: chunk.text for chunk in reading}
    assert found == {f"{name}:{n}": text for n, text in enumerate(TEXTS, start=1)}
    assert reading.record()["sha256"] == file_digest(path)
    assert reading.record()["bytes"] == path.stat().st_size


@pytest.mark.parametrize("suffix", [".txt", ".md", ".tex", ".py"])
def test_text_files(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    # A byte order mark is no text; carriage returns are.
    path.write_bytes("\ufeffline ∑\r\nline\n".encode())
    assert documents(path) == {path.name: "line ∑\r\nline\n"}
    (tmp_path / "x.jsonl").write_bytes(lines("body"))
    assert list(documents(tmp_path / "x.jsonl", field="body").values()) == TEXTS


def test_folder_is_walked_in_order_of_names(corpus):
    (corpus / "readme.rst").write_text("not of a known kind")
    (corpus / ".hidden").mkdir()
    (corpus / ".hidden" / "x.txt").write_text("hidden")
    names = list(documents(corpus))
    assert names == sorted(names)
    assert names[:2] == ["even/00.txt", "even/02.txt"]
    assert len(names) == 40


def test_glob(corpus):
    names = list(documents(corpus / "*" / "?1.txt"))
    assert names == ["01.txt", "11.txt", "21.txt", "31.txt"]
    assert len(documents(corpus / "**" / "*.txt")) == 40


def test_library_is_the_default_and_usable(tmp_path):
    found = find_corpus("stdlib").sources
    names = [source.name for source in found]
    assert "argparse.py" in names
    assert names == sorted(names)
    assert not {"site-packages", "test"} & {part for name in names for part in name.split("/")}
    assert sum(source.size for source in found) > 5_000_000


def test_long_texts_come_in_chunks_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK", 64)
    monkeypatch.setattr(chunks_module, "CHUNK", 64)
    text = "".join(f"line {n} é∑🙂\n" for n in range(100)) + "🙂" * 500 + "\nend"
    (tmp_path / "a.txt").write_text(text, "utf-8")
    (source,) = find_corpus(str(tmp_path / "a.txt")).sources
    chunks = list(source.read())
    assert "".join(chunk.text for chunk in chunks) == text
    assert len(chunks) > 20
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    # Cut at line ends, but where a line is longer than a chunk.
    assert all(chunk.text.endswith("\n") or "🙂🙂" in chunk.text for chunk in chunks[:-1])
    records = list(whole("x", text, chunks_module.stop))
    assert "".join(chunk.text for chunk in records) == text
    assert max(len(chunk.text) for chunk in records) <= 64


def test_cut_makes_documents_of_a_size():
    text = "".join(f"line {n}\n" for n in range(1000))
    stream = [Chunk("a", text[:3000], False), Chunk("a", text[3000:], True), Chunk("b", "short", True)]
    cut = list(cut_documents(stream, 500))
    assert "".join(chunk.text for chunk in cut) == text + "short"
    assert [chunk.document for chunk in cut][:2] == ["a#1", "a#2"]
    assert cut[-1] == Chunk("b#1", "short", True)
    assert all(chunk.last for chunk in cut)
    assert all(500 <= len(chunk.text) < 1000 and chunk.text.endswith("\n") for chunk in cut[:-1])


def write(path, content: bytes):
    path.write_bytes(content)
    return path


BAD_FILES = {
    "empty.txt": (b"", r"empty\.txt is empty"),
    "blank.txt": (b" \n\n", r"blank\.txt is empty"),
    "binary.txt": (b"some text\n\x00\x01", r"binary\.txt: a NUL at byte 10: this looks like a binary file"),
    "latin.txt": ("erste\nzweite süß\n".encode("latin-1"), r"latin\.txt, line 2: byte 14 \(0xfc\) is not"),
    "cut.txt": ("abc ∑".encode()[:-1], r"cut\.txt, line 1: byte 4 \(0xe2\) is not UTF-8"),
    "none.jsonl": (b"", r"none\.jsonl is empty"),
    "field.jsonl": (b'{"text": "a"}\n\n{"title": "b", "body": "c"}\n', r'line 3: no field "text"; it has'),
    "json.jsonl": (b'{"text": "a"}\n{"text": \n', r"json\.jsonl, line 2: not JSON"),
    "list.jsonl": (b'["a"]\n', r"list\.jsonl, line 1: an object with a field was expected, not a list"),
    "number.jsonl": (b'{"text": 3}\n', r'number\.jsonl, line 1: field "text" is a number, not text'),
    "null.jsonl": (b'{"text": null}\n', r'field "text" is null, not text'),
    "blank.jsonl": (b'{"text": "a"}\n{"text": " "}\n', r"blank\.jsonl:2 is empty"),
    "latin.jsonl": (b'{"text": "\xfc"}\n', r"latin\.jsonl, line 1: byte 10 of the line is not UTF-8"),
    "half.jsonl": (b'{"text": "a \\ud800"}\n', r"half\.jsonl:1: character 2 is an unpaired surrogate"),
    "nul.jsonl": (b'{"text": "a\\u0000"}\n', r"nul\.jsonl:1: a NUL at character 1"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "aaaa"}\n' * 99)[:-9], r"cut\.jsonl\.gz, after line \d+"),
    "other.jsonl.gz": (b'{"text": "a"}\n', r"other\.jsonl\.gz, after line 0: cannot be unpacked"),
    "other.jsonl.zst": (b'{"text": "a"}\n', r"other\.jsonl\.zst, after line 0: cannot be unpacked"),
    "other.parquet": (b"no parquet", r"other\.parquet: cannot be read as parquet"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_faults_are_sentences_that_leave_nothing_and_can_be_skipped(name, tmp_path, corpus):
    content, message = BAD_FILES[name]
    write(corpus / name, content)
    with pytest.raises(BadText, match=message) as caught:
        prepare(str(corpus), tmp_path / "data", progress=False)
    assert str(corpus / name) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]
    data = prepare(str(corpus), tmp_path / "data", skip_bad=True, progress=False)
    assert data.manifest["sources"]["skipped"] == 1
    records = [json.loads(line) for line in (data.folder / "sources.jsonl").read_text("utf-8").splitlines()]
    (record,) = [record for record in records if record["name"] == name]
    assert record["skipped"] == 1
    assert str(corpus / name) in record["reasons"][0]
    assert data.train.num_documents + data.validation.num_documents == 40 + record["documents"]
    # And it is found done, though a file was never read.
    assert prepare(str(corpus), tmp_path / "data", skip_bad=True, progress=False).manifest == data.manifest


PARQUET_FAULTS = {
    "column": ({"body": ["a"]}, r'no column "text"; it has body'),
    "kind": ({"text": [1, 2]}, r'column "text" holds int64, not text'),
    "null": ({"text": ["a", None]}, r"x\.parquet:2 is null"),
    "empty": ({"text": ["a", ""]}, r"x\.parquet:2 is empty"),
    "rows": ({"text": pyarrow.array([], pyarrow.string())}, r"x\.parquet is empty"),
}


@pytest.mark.parametrize("name", PARQUET_FAULTS)
def test_parquet_faults(name, tmp_path):
    columns, message = PARQUET_FAULTS[name]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    with pytest.raises(BadText, match=message):
        documents(tmp_path / "x.parquet")


def test_what_is_no_corpus(tmp_path):
    with pytest.raises(FileNotFoundError, match='there is no corpus "nowhere"'):
        find_corpus("nowhere")
    with pytest.raises(ValueError, match=r"has no file that ends in \.txt, \.md"):
        find_corpus(str(tmp_path))
    with pytest.raises(ValueError, match=r"no file that ends in .* matches .*\*\.txt"):
        find_corpus(str(tmp_path / "*.txt"))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match="it is not a regular file"):
        find_corpus(str(tmp_path / "pipe.txt")).sources[0].read().record()
    with pytest.raises(ValueError, match=r"x\.doc ends in none of \.txt"):
        find_corpus(str(write(tmp_path / "x.doc", b"text")))


def test_file_that_vanishes(tmp_path):
    path = write(tmp_path / "x.txt", b"text")
    (source,) = find_corpus(str(path)).sources
    path.unlink()
    with pytest.raises(ValueError, match=r"x\.txt cannot be read: No such file"):
        list(source.read())


@pytest.mark.parametrize(("module", "name"), [("zstandard", "x.jsonl.zst"), ("pyarrow", "x.parquet")])
def test_missing_libraries_are_sentences(module, name, tmp_path, monkeypatch):
    WRITERS[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf'needs {module}: pip install "\.\[data\]" in a clone'):
        documents(tmp_path / name)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for `datasets` with one data set; records how it was asked."""
    asked = []

    def load(name, configuration=None, *, split, streaming):
        asked.append((name, configuration, split, streaming))
        if name == "missing":
            raise RuntimeError("Dataset 'missing' doesn't exist\nmore")
        return ({"text": f"{n} {text}", "id": n} for n, text in enumerate(TEXTS * 20))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    return asked


def test_hub_is_streamed(hub, tmp_path):
    data = prepare("hf:user/set@small:test:text", tmp_path / "data", progress=False)
    assert hub == [("user/set", "small", "test", True)]
    assert data.train.num_documents + data.validation.num_documents == 60
    again = prepare("hf:user/set@small:test", tmp_path / "data", progress=False)
    assert again.manifest == data.manifest
    assert len(hub) == 1, "what is prepared is not fetched again"


def test_hub_faults(hub, monkeypatch):
    with pytest.raises(ValueError, match="hf:missing:train:text cannot be opened: Dataset 'missing'"):
        documents("hf:missing")
    with pytest.raises(BadText, match='row 1: no field "body"; it has text, id'):
        documents("hf:user/set::body")
    with pytest.raises(BadText, match='row 1: field "id" is not text'):
        documents("hf:user/set:train:id")
    with pytest.raises(ValueError, match="is not of the form hf:NAME"):
        documents("hf:")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'needs datasets: pip install "\.\[data\]" in a clone'):
        documents("hf:user/set")


def test_all_formats_pack_to_the_same_tokens(tmp_path):
    packed = []
    for name, writer in WRITERS.items():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        writer(folder / name)
        data = prepare(str(folder), tmp_path / f"data-{folder.name}", validation=0.0, progress=False)
        packed.append(data.train)
    for tokens in packed:
        np.testing.assert_array_equal(tokens.ids, packed[0].ids)
        np.testing.assert_array_equal(tokens.documents, packed[0].documents)
