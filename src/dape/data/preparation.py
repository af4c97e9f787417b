"""`prepare`: pack a corpus into a folder of token data, atomically; existing data is reused if nothing changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dape.checksums import file_digest
from dape.data.chunks import BadText, Interrupted, cut_documents, stop
from dape.data.corpora import BUILT_IN, Corpus, FileSource, Source, default_validation, find_corpus
from dape.data.packing import ByHash, ByName, Packer, Side, name_forms
from dape.data.tokenizers import Tokenizer, bpe_size, load_tokenizer, train_bpe
from dape.data.tokens import (
    FORMAT,
    SPLITS,
    TokenData,
    id_type,
    note_verified,
    open_data,
    read_manifest,
    split_checksums,
)
from dape.files import check_output, exclusive, read_json, read_json_lines, sync_folder, write_atomically
from dape.settings import split_names

# Chunks of text handed to the BPE trainer, which holds a few hundred of them.
TRAINING_CHUNK = 1 << 16
# Fewer text files than the first are cut into about the second number of documents, of at least the third in characters.
FEW_FILES, CUT_INTO, LEAST_CUT = 10, 64, 2_000


def prepare(
    corpus: str,
    folder: str | os.PathLike[str],
    *,
    tokenizer: str = "bytes",
    validation: float | str | Sequence[str] | None = None,
    seed: int = 0,
    field: str = "text",
    cut: int | None = None,
    skip_bad: bool = False,
    progress: bool = True,
) -> TokenData:
    """Pack the corpus into `folder`. Existing data of the same recipe and sources is reused; other data is an error.

    Packed data does not need its text: if the text no longer exists, the folder is used as it is.

    corpus:     "python", "stdlib", a file, folder or glob, or hf:NAME[@CONFIGURATION][:SPLIT][:FIELD].
    tokenizer:  "bytes", "bpe:VOCAB" (trained on the training split), a tokenizer.json, or a Hugging Face name.
    validation: the fraction of documents held out, chosen by hash, or the names of those to hold out (a folder's ends in
                "/"), also as text; by default three packages of "python", a tenth of any other corpus.
    seed:       seed of that choice.
    field:      field of a JSON line, or column of a parquet file, that holds the text.
    cut:        make documents of at least this many characters out of longer ones; by default, fewer than 10 text
                files are cut into about 64 documents, so that one book has parts to train on and parts to hold out.
    skip_bad:   leave out documents that cannot be read, and list them; otherwise the first one is an error.
    """
    folder = Path(folder)
    validation = default_validation(corpus) if validation is None else validation
    validation = parse_validation(validation) if isinstance(validation, str) else validation
    recipe = _recipe(corpus, tokenizer, validation, seed=seed, field=field, cut=cut, skip_bad=skip_bad)
    left_out: list[BadText] = []
    packed = (folder / "manifest.json").exists()
    if packed and cut is None:
        recipe["cut"] = read_manifest(folder)["recipe"]["cut"]
    try:
        texts = find_corpus(corpus, field=field, report=left_out.append if skip_bad else stop)
    except FileNotFoundError:
        if not packed:
            raise
        _check_same_data(folder, recipe, None)
        return open_data(folder)
    recipe["corpus"] = texts.spec
    side = _side(validation, seed, texts)
    if packed:
        # Complete data needs no lock: a read-only folder can be shared.
        _check_same_data(folder, recipe, texts)
        return open_data(folder)
    if cut is None and isinstance(validation, float | int):
        recipe["cut"] = automatic_cut(texts)
        if recipe["cut"] is not None and progress:
            _say_cut(texts, recipe["cut"])
    if texts.note:
        print(texts.note, file=sys.stderr)
    given = None if bpe_size(tokenizer) else load_tokenizer(tokenizer)
    check_output(folder, folder=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may need the same data at once: one packs while the other waits.
    with exclusive(folder.parent / f".{folder.name}.lock"):
        if (folder / "manifest.json").exists():
            _check_same_data(folder, recipe, texts)
            return open_data(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} exists and holds something else: pass another folder")
        partial = _begin(folder, recipe, texts)
        try:
            learnt = _tokenizer(recipe, partial, texts, side, given, progress)
            _pack(recipe, partial, texts, learnt, side, left_out, progress)
        except Interrupted:
            raise
        except ValueError:
            # A resumed packing would fail again, so nothing is kept.
            shutil.rmtree(partial)
            raise
        note_verified(partial)
        os.rename(partial, folder)
        sync_folder(folder.parent)
    return open_data(folder)


def automatic_cut(corpus: Corpus) -> int | None:
    """Default document size in characters for a corpus of a few long text files; None if files are documents."""
    if len(corpus.sources) >= FEW_FILES or not all(source.text_file for source in corpus.sources):
        return None
    size = sum(source.size for source in corpus.sources)
    cut = max(LEAST_CUT, size // CUT_INTO)
    return cut if size >= 2 * cut else None


def _say_cut(corpus: Corpus, cut: int) -> None:
    files = "1 text file is" if len(corpus.sources) == 1 else f"{len(corpus.sources)} text files are"
    print(
        f"{files} cut into documents of about {cut:,} characters, a fraction of which is held out "
        f"(`dape data prepare --cut` chooses another size)",
        file=sys.stderr,
    )


def parse_validation(text: str) -> float | list[str]:
    """Parse the documents to hold out: a fraction if the text is a number, else names."""
    try:
        fraction = float(text)
    except ValueError:
        if names := split_names(text):
            return names
        raise ValueError("give a fraction, or names of documents") from None
    if not 0 <= fraction <= 1:
        raise ValueError("a fraction is from 0 to 1")
    return fraction


def _recipe(
    corpus: str, tokenizer: str, validation: float | Sequence[str], *, cut: int | None, **rest: Any
) -> dict[str, Any]:
    """Settings that determine the tokens, apart from the sources' contents."""
    bpe_size(tokenizer)
    if isinstance(validation, int | float):
        if not 0 <= validation <= 1:
            raise ValueError(f"validation={validation} is not a fraction between 0 and 1")
        held_out: float | list[str] = float(validation)
    else:
        held_out = sorted(validation)
    if cut is not None and cut < 1:
        raise ValueError(f"cut={cut}: a document has at least one character")
    return {"corpus": corpus, "tokenizer": tokenizer, "validation": held_out, "cut": cut, **rest}


def _side(validation: float | Sequence[str], seed: int, corpus: Corpus) -> Side:
    if isinstance(validation, int | float):
        return ByHash(validation, seed)
    side = ByName(validation)
    if all(source.text_file for source in corpus.sources):
        # Files are documents here, so a wrong name is reported before packing.
        known = set().union(*(name_forms(source.name) for source in corpus.sources))
        _check_names(side.names - known - {name for name in side.names if "#" in name})
    return side


def _check_names(missing: set[str]) -> None:
    if missing:
        raise ValueError(f"no document of the corpus is called {', '.join(sorted(missing))}")


def _begin(folder: Path, recipe: dict[str, Any], corpus: Corpus) -> Path:
    """Temporary folder next to `folder` to pack into; that of an interrupted packing if recipe and sources are the same."""
    partial = folder.parent / f".{folder.name}.partial"
    plan = {"recipe": recipe, "sources": corpus.fingerprint}
    file = partial / "plan.json"
    if partial.exists():
        begun = read_json(file) if file.exists() else {}
        if "recipe" in begun and (difference := _difference_of(begun["recipe"], recipe)):
            raise ValueError(f"{folder} was started with {difference}: delete {partial} to start again")
        if begun == plan:
            return partial
    # No earlier packing, or its sources have changed since: it cannot be reused.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_atomically(file, json.dumps(plan))
    return partial


def _difference_of(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Differences between two recipes, or "". Files may have moved: names and contents are compared."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not any(recipe["corpus"].startswith("hf:") or recipe["corpus"] in BUILT_IN for recipe in (old, new)):
        keys = [key for key in keys if key != "corpus"]
    return ", ".join(f"{key} {json.dumps(old.get(key))} (now {json.dumps(new.get(key))})" for key in keys)


def _check_same_data(folder: Path, recipe: dict[str, Any], corpus: Corpus | None) -> None:
    """Raise if the token data has another recipe or other texts. corpus: None if the text no longer exists."""
    manifest = read_manifest(folder)
    if difference := _difference_of(manifest["recipe"], recipe):
        raise ValueError(f"{folder} was prepared with {difference}: give another folder or delete it")
    # For text of the hub, deleted text, or another Python's library, the packed tokens are the only record.
    if corpus is None or corpus.spec.startswith("hf:") or corpus.spec in BUILT_IN:
        return
    records = {record["name"]: record for record in read_json_lines(folder / "sources.jsonl")}
    advice = f"since {folder} was prepared: give another folder or delete it"
    for source in corpus.sources:
        record = records.pop(source.name, None)
        if record is None:
            raise ValueError(f"{source.name} has been added to the corpus {advice}")
        changed = record["bytes"] != source.size
        if isinstance(source, FileSource) and record["stamp"] != source.stamp:
            changed = changed or file_digest(source.path) != record["sha256"]
        if changed:
            raise ValueError(f"{source.name} has changed {advice}")
    if records:
        raise ValueError(f"{next(iter(records))} has been removed from the corpus {advice}")


def _track(sources: Sequence[Source], description: str, progress: bool) -> Iterable[Source]:
    """The sources, with a progress bar over them."""
    from rich.progress import track

    return track(sources, description, transient=True, disable=not progress)


def _tokenizer(
    recipe: dict[str, Any], partial: Path, corpus: Corpus, side: Side, given: Tokenizer | None, progress: bool
) -> Tokenizer:
    """The recipe's tokenizer, saved in the folder; trained first if requested and not yet done."""
    saved = partial / "tokenizer"
    if (saved / "tokenizer_config.json").exists():
        return load_tokenizer(saved)
    size = bpe_size(recipe["tokenizer"])
    if size is None:
        tokenizer = given or load_tokenizer(recipe["tokenizer"])
    else:
        sources = _track(corpus.sources, "learning the BPE", progress)
        tokenizer = train_bpe(_training_texts(recipe, sources, side), size)
    tokenizer.save(saved)
    return tokenizer


def _training_texts(recipe: dict[str, Any], sources: Iterable[Source], side: Side) -> Iterator[str]:
    problems: list[BadText] = []
    for source in sources:
        reader = source.read(problems.append if recipe["skip_bad"] else stop)
        split = None
        for chunk in reader if recipe["cut"] is None else cut_documents(reader, recipe["cut"]):
            split = side(chunk) if split is None else split
            if split == "train":
                for start in range(0, len(chunk.text), TRAINING_CHUNK):
                    yield chunk.text[start : start + TRAINING_CHUNK]
            split = None if chunk.last else split


def _pack(
    recipe: dict[str, Any],
    partial: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    side: Side,
    left_out: Sequence[BadText],
    progress: bool,
) -> None:
    dtype = np.dtype(id_type(tokenizer.vocab_size))
    packer = Packer(partial, tokenizer, dtype, side)
    try:
        for source in _track(corpus.sources[packer.sources :], "packing", progress):
            packer.pack(source, cut=recipe["cut"], skip_bad=recipe["skip_bad"])
        packer.flush()
        packer.save()
    finally:
        packer.close()
    splits = {name: packer.splits[name].state() | split_checksums(partial, name) for name in SPLITS}
    if isinstance(side, ByName):
        _check_names(side.names - side.found)
    _check_filled(recipe, splits)
    manifest = {
        "format": FORMAT,
        "recipe": recipe,
        "tokenizer": {
            "vocab_size": tokenizer.vocab_size,
            "sha256": file_digest(partial / "tokenizer" / "tokenizer.json"),
        },
        "dtype": dtype.name,
        "splits": splits,
        "sources": _summary(partial / "sources.jsonl", left_out),
    }
    write_atomically(partial / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    for name in ("plan.json", "journal.json"):
        (partial / name).unlink()


def _check_filled(recipe: dict[str, Any], splits: dict[str, dict[str, int]]) -> None:
    total = sum(split["documents"] for split in splits.values())
    if total == 0:
        raise ValueError(f"the corpus {recipe['corpus']} has no document that can be used")
    wanted = {"train": recipe["validation"] != 1, "validation": recipe["validation"] not in (0, [])}
    for name in SPLITS:
        if wanted[name] and not splits[name]["documents"]:
            raise ValueError(
                f"no document falls into the {name} split (the corpus has {total}): name the documents to hold "
                f"out, choose another seed or fraction, or make more documents with cut"
            )


def _summary(path: Path, left_out: Sequence[BadText] = ()) -> dict[str, Any]:
    """Counts over all sources, a hash of their names and contents, and the sources left out, each with the reason."""
    count = size = 0
    skipped = len(left_out)
    digest = hashlib.sha256()
    for record in read_json_lines(path):
        count, size, skipped = count + 1, size + record["bytes"], skipped + record.get("skipped", 0)
        digest.update(f"{record['name']}\0{record['sha256']}\n".encode())
    summary = {"count": count, "bytes": size, "skipped": skipped, "sha256": digest.hexdigest()}
    return {**summary, "left_out": [str(problem) for problem in left_out]} if left_out else summary
