"""Preparing data: the split, the manifest, going on after a kill, never half a data set, bounded memory."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from dape.data import open_data, packing, prepare, verify
from dape.data.chunks import Chunk
from dape.data.packing import ByHash
from dape.files import exclusive


def pack(corpus, folder, **options):
    return prepare(str(corpus), folder, progress=False, **options)


def texts(data, split):
    tokens = data.split(split)
    return [data.tokenizer.decode(tokens.document(d)) for d in range(tokens.num_documents)]


def contents(folder):
    """Every file but the note of times, which differ."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".verified.json"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_tokens_are_the_texts(corpus, tmp_path):
    data = pack(corpus, tmp_path / "data")
    wanted = {path.read_text("utf-8") for path in corpus.rglob("*.txt")}
    train, validation = texts(data, "train"), texts(data, "validation")
    assert set(train) | set(validation) == wanted
    assert len(train) + len(validation) == 40
    assert isinstance(data.train.ids, np.memmap)
    assert data.train.ids.dtype == np.uint16
    assert data.train.documents.dtype == np.int64
    assert data.manifest["splits"]["train"]["tokens"] == len(data.train)
    size = sum(path.stat().st_size for path in corpus.rglob("*.txt"))
    assert data.manifest["sources"].items() >= {"count": 40, "bytes": size, "skipped": 0}.items()
    verify(data)


def test_split_follows_the_text_not_the_place(corpus, tmp_path):
    first = pack(corpus, tmp_path / "first")
    moved = tmp_path / "moved"
    moved.mkdir()
    for number, path in enumerate(sorted(corpus.rglob("*.txt"), reverse=True)):
        shutil.copy(path, moved / f"{number:03}.md")
    second = pack(moved, tmp_path / "second")
    assert set(texts(first, "validation")) == set(texts(second, "validation"))
    assert texts(first, "validation") != []
    assert texts(first, "validation") != texts(second, "validation"), "the order is that of the names"
    other = pack(corpus, tmp_path / "other", seed=1)
    assert set(texts(first, "validation")) != set(texts(other, "validation"))


@pytest.mark.parametrize("names", [["03", "even/04.txt"], ["03.txt", "even/04"], ["odd/03.txt", "04"]])
def test_named_documents_are_held_out(corpus, tmp_path, names):
    data = pack(corpus, tmp_path / "data", validation=names)
    assert [text.split(":")[0] for text in texts(data, "validation")] == ["Document 4", "Document 3"]
    assert data.train.num_documents == 38


def test_named_rows_and_cuts_are_held_out(tmp_path):
    rows = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(1, 6))
    (tmp_path / "x.jsonl").write_text(rows)
    data = pack(tmp_path / "x.jsonl", tmp_path / "rows", validation=["x.jsonl:2"])
    assert texts(data, "validation") == ["row 2"]
    (tmp_path / "long.txt").write_text("0123456789\n" * 100)
    data = pack(tmp_path / "long.txt", tmp_path / "cuts", validation=["long.txt#3"], cut=110)
    assert (data.validation.num_documents, data.train.num_documents) == (1, 9)


def test_names_that_do_not_exist(corpus, tmp_path):
    with pytest.raises(ValueError, match="no document of the corpus is called 99, nope"):
        pack(corpus, tmp_path / "data", validation=["99", "03", "nope"])
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r"no document of the corpus is called x\.jsonl:7"):
        pack(tmp_path / "x.jsonl", tmp_path / "data", validation=["x.jsonl:7"])
    assert not (tmp_path / "data").exists()


def test_too_few_documents_to_split(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"only {n}\n" for n in range(400)))
    with pytest.raises(ValueError, match=r"no document falls into the \w+ split .the corpus has 1.*cut"):
        pack(tmp_path / "one.txt", tmp_path / "data")
    data = pack(tmp_path / "one.txt", tmp_path / "data", cut=100)
    assert data.validation.num_documents > 0
    assert "".join([*texts(data, "train"), *texts(data, "validation")]).count("only") == 400


@pytest.mark.parametrize("books", [1, 2])
def test_a_book_or_two_are_cut_into_documents_and_that_is_said(books, tmp_path, capsys):
    (tmp_path / "books").mkdir()
    for book in range(books):
        text = "".join(f"book {book}, line {n}\n" for n in range(10_000))
        (tmp_path / "books" / f"{book}.txt").write_text(text)
    data = prepare(str(tmp_path / "books"), tmp_path / "data")
    assert "cut into documents of about" in capsys.readouterr().err
    assert 40 < data.train.num_documents + data.validation.num_documents < 80
    assert data.validation.num_documents > 0
    lines = "".join(texts(data, "train") + texts(data, "validation")).splitlines()
    assert len(lines) == 10_000 * books
    # The same data again, and as they are where somebody had cut them otherwise.
    assert pack(tmp_path / "books", tmp_path / "data").manifest == data.manifest
    other = pack(tmp_path / "books", tmp_path / "other", cut=3000)
    assert pack(tmp_path / "books", tmp_path / "other").manifest == other.manifest
    with pytest.raises(ValueError, match="prepared with cut 3000"):
        pack(tmp_path / "books", tmp_path / "other", cut=4000)


def test_packed_data_travel_without_their_text(corpus, tmp_path):
    before = pack(corpus, tmp_path / "data").manifest
    shutil.rmtree(corpus)
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    assert pack(corpus, tmp_path / "elsewhere").manifest == before
    with pytest.raises(ValueError, match='prepared with tokenizer "bytes"'):
        pack(corpus, tmp_path / "elsewhere", tokenizer="bpe:300")
    with pytest.raises(FileNotFoundError):
        pack(corpus, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 1.5}, "validation=1.5 is not a fraction"),
        ({"validation": "03"}, "a fraction is from 0 to 1"),
        ({"tokenizer": "bpe:100"}, "size of the vocabulary, at least 256"),
        ({"tokenizer": "bpe:many"}, "size of the vocabulary, at least 256"),
        ({"tokenizer": "nowhere/tokenizer.json"}, "there is no tokenizer nowhere/tokenizer.json"),
        ({"cut": 0}, "cut=0"),
    ],
)
def test_options_that_make_no_sense(corpus, tmp_path, options, message):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        pack(corpus, tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


def test_again_does_nothing(corpus, tmp_path, monkeypatch):
    before = pack(corpus, tmp_path / "data")
    monkeypatch.setattr(packing.Packer, "pack", lambda *args, **kwargs: pytest.fail("packed again"))
    # A copy has other dates, but the same text.
    for path in corpus.rglob("*.txt"):
        os.utime(path, ns=(1, 1))
    assert pack(corpus, tmp_path / "data").manifest == before.manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "data"], "nothing is left behind"


def change(path):
    path.write_text(path.read_text("utf-8").swapcase(), "utf-8")


CHANGES = {
    "changed": lambda corpus: change(corpus / "odd" / "03.txt"),
    "added": lambda corpus: (corpus / "odd" / "new.txt").write_text("new"),
    "removed": lambda corpus: (corpus / "odd" / "03.txt").unlink(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_sources_are_refused(name, corpus, tmp_path):
    pack(corpus, tmp_path / "data")
    CHANGES[name](corpus)
    with pytest.raises(ValueError, match=rf"odd/\w+.txt has .*{name}.*since .*data was prepared"):
        pack(corpus, tmp_path / "data")


def test_a_corpus_may_move(corpus, tmp_path, monkeypatch):
    data = pack(corpus, tmp_path / "data")
    interrupt(corpus, tmp_path / "half", monkeypatch)
    moved = tmp_path / "elsewhere"
    corpus.rename(moved)
    before = contents(data.folder)
    assert contents(pack(moved, tmp_path / "data").folder) == before
    assert texts(pack(moved, tmp_path / "half"), "train") == texts(data, "train")
    change(moved / "odd" / "03.txt")
    with pytest.raises(ValueError, match=r"odd/03.txt has changed"):
        pack(moved, tmp_path / "data")


def test_other_things_in_the_folder_are_left_alone(corpus, tmp_path):
    (tmp_path / "data").mkdir()
    pack(corpus, tmp_path / "data")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="mine exists and holds something else"):
        pack(corpus, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def interrupt(corpus, folder, monkeypatch, **options):
    """Leave a packing unfinished."""
    with monkeypatch.context() as patch:
        patch.setattr(packing, "BATCH", 200)
        patch.setattr(packing, "JOURNAL_CHARACTERS", 400)
        flush = packing.Packer.flush

        def interrupted(self):
            flush(self)
            if self.splits["train"].tokens > 2000:
                raise KeyboardInterrupt

        patch.setattr(packing.Packer, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack(corpus, folder, **options)
    assert not folder.exists()


def test_an_unfinished_packing_goes_on_and_does_nothing_twice(corpus, tmp_path, monkeypatch):
    """A kill at any moment leaves the same files: tests/soak.py."""
    # A long file, so that it is interrupted in the middle of a source too.
    rows = "".join(json.dumps({"text": f"row {n} " * 30}) + "\n" for n in range(40))
    (corpus / "a.jsonl").write_text(rows)
    options = {"validation": ["03", "39"]}
    whole = pack(corpus, tmp_path / "whole", **options)
    interrupt(corpus, tmp_path / "data", monkeypatch, **options)
    journal = json.loads((tmp_path / ".data.partial" / "journal.json").read_text())
    assert journal["sources"] + journal["pieces"] > 0
    read, kind = [], type(whole.tokenizer)
    encode = kind.encode_batch
    monkeypatch.setattr(kind, "encode_batch", lambda self, texts: read.extend(texts) or encode(self, texts))
    data = pack(corpus, tmp_path / "data", **options)
    total = len(whole.train) + len(whole.validation)
    assert sum(len(text.encode()) for text in read) < total - 1000, "what was journalled is not done again"
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")
    verify(data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "data", "whole"]


def test_an_unfinished_packing_is_not_mixed_with_another(corpus, tmp_path, monkeypatch):
    interrupt(corpus, tmp_path / "data", monkeypatch)
    with pytest.raises(ValueError, match=r"was started with seed 0 .now 5.: delete .*partial to start again"):
        pack(corpus, tmp_path / "data", seed=5)
    shutil.rmtree(tmp_path / ".data.partial")
    data = pack(corpus, tmp_path / "data", seed=5)
    assert contents(data.folder) == contents(pack(corpus, tmp_path / "fresh", seed=5).folder)
    # Changed texts begin again by themselves.
    interrupt(corpus, tmp_path / "other", monkeypatch)
    change(corpus / "even" / "00.txt")
    data = pack(corpus, tmp_path / "other")
    assert contents(data.folder) == contents(pack(corpus, tmp_path / "new").folder)


def test_a_trained_tokenizer_survives_the_interruption(corpus, tmp_path, monkeypatch):
    interrupt(corpus, tmp_path / "data", monkeypatch, tokenizer="bpe:300")
    monkeypatch.setattr("dape.data.preparation.train_bpe", lambda *a, **b: pytest.fail("trained again"))
    assert pack(corpus, tmp_path / "data", tokenizer="bpe:300").tokenizer.vocab_size == 300


def test_two_processes_at_once(corpus, tmp_path):
    """The second waits for whoever holds the lock."""
    script = (
        "import sys; from dape.data import prepare; "
        "print(prepare(sys.argv[1], sys.argv[2], progress=False).manifest['sources']['count'])"
    )
    command = [sys.executable, "-c", script, str(corpus), str(tmp_path / "data")]
    with exclusive(tmp_path / ".data.lock"):
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=5)
        assert not (tmp_path / "data").exists()
    assert waiting.communicate()[0].strip() == "40"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "data"]


MEMORY = textwrap.dedent("""
    import os, resource, sys, types

    LINES = "a line of text, as good as any other\\n" * 28000

    def rows(*args, **kwargs):
        for n in range(120):
            yield {"text": f"{n} {LINES}"}

    os.environ["HF_HUB_OFFLINE"] = "1"  # whatever is asked of the hub is made up here
    sys.modules["datasets"] = types.SimpleNamespace(load_dataset=rows)
    from dape.data import prepare

    folder = sys.argv[1]
    with open(f"{folder}/big.txt", "w") as file:
        for _ in range(120):
            file.write(LINES)
    prepare("stdlib", f"{folder}/warm", progress=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for corpus, name in (("hf:any", "stream"), (f"{folder}/big.txt", "file")):
        data = prepare(corpus, f"{folder}/{name}", validation=0.0, progress=False)
        print(len(data.train), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""")


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """120 MB, as many documents or as a single one, need a small fraction of that."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in lines:
        tokens, grown = map(int, line.split())
        assert tokens > 120_000_000
        assert grown < 50 * 1024
    assert len(lines) == 2


def damage(name, change):
    """A function of a folder that changes the bytes of one of its files."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip(content, place=10):
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


DAMAGE = {
    "nothing": (lambda folder: shutil.rmtree(folder), "holds no token data: make it with `dape data"),
    "gone": (lambda folder: (folder / "train.ids").unlink(), "train.ids is missing: prepare the data again"),
    "short": (damage("train.ids", lambda content: content[:-2]), "prepare the data again"),
    "ids": (damage("train.ids", flip), "train.ids is damaged"),
    "held-out ids": (damage("validation.ids", flip), "validation.ids is damaged"),
    "documents": (damage("train.documents", flip), "train.documents is damaged"),
    "tokenizer": (damage("tokenizer/tokenizer.json", flip), "tokenizer.json is (damaged|not a tokenizer)"),
    "no JSON": (damage("manifest.json", lambda content: b"{"), "manifest.json is damaged"),
    "no format": (damage("manifest.json", lambda content: b"{}"), "is not of format"),
    "no splits": (
        damage("manifest.json", lambda content: content.replace(b'"splits"', b'"splitz"')),
        "manifest.json is damaged",
    ),
    "vocabulary": (
        damage("manifest.json", lambda content: content.replace(b'"vocab_size": 256', b'"vocab_size": 99')),
        r"train.ids has the id \d+, its tokenizer has 99 tokens",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_a_sentence_when_the_data_is_first_opened(name, corpus, tmp_path):
    folder = pack(corpus, tmp_path / "data").folder
    change, message = DAMAGE[name]
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_data(folder)


def test_data_is_read_once_while_it_stays_as_it_is(corpus, tmp_path, monkeypatch):
    folder = pack(corpus, tmp_path / "data").folder
    monkeypatch.setattr("dape.data.tokens.verify", lambda data: pytest.fail("read again"))
    open_data(folder)
    os.utime(folder / "train.ids", (1, 1))
    with pytest.raises(pytest.fail.Exception):
        open_data(folder)


def odd_corpus(folder):
    """Two good files among a link to nowhere, a pipe, a socket and a name that is not UTF-8."""
    import socket

    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(f"{name} good text " * 20)
    (folder / "link.txt").symlink_to(folder / "nowhere.txt")
    os.mkfifo(folder / "pipe.txt")
    # A socket's address is short: bound from inside its folder.
    here = os.getcwd()
    os.chdir(folder)
    try:
        socket.socket(socket.AF_UNIX).bind("socket.txt")
    finally:
        os.chdir(here)
    with open(os.fsencode(folder) + b"/\xff\xfe.txt", "wb") as file:
        file.write(b"odd name")
    return folder


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_odd_files_are_refused_at_once_and_skipped_by_name(tmp_path):
    corpus = odd_corpus(tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"cannot be read: (it is|its name)"):
        pack(corpus, tmp_path / "data", validation=0.0)
    data = pack(corpus, tmp_path / "data", validation=0.0, skip_bad=True)
    assert data.train.num_documents == 2
    said = "\n".join(data.manifest["sources"]["left_out"])
    for reason in (
        "link.txt cannot be read: it is a dangling link",
        "pipe.txt cannot be read: it is not a regular",
    ):
        assert reason in said
    assert "socket.txt cannot be read" in said
    assert "its name is not UTF-8" in said
    assert data.manifest["sources"]["skipped"] == 4


def test_fraction_is_met_and_growing_it_only_adds():
    chunks = [Chunk("x", f"text {n}", True) for n in range(4000)]
    held = {f: {p.text for p in chunks if ByHash(f, 0)(p) == "validation"} for f in (0.0, 0.05, 0.2, 1.0)}
    assert held[0.0] == set()
    assert len(held[1.0]) == 4000
    assert len(held[0.05]) == pytest.approx(200, abs=4 * 14)
    assert len(held[0.2]) == pytest.approx(800, abs=4 * 26)
    assert held[0.05] <= held[0.2]
