"""Packed tokens: two splits, memory-mapped, in a folder with a manifest."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dape.checksums import file_digest
from dape.data.tokenizers import Tokenizer, load_tokenizer
from dape.files import parse_text, read_json, write_atomically

FORMAT = "dape tokens 1"
SPLITS = ("train", "validation")
# Sizes and times of the files when they were last compared with their checksums.
VERIFIED = ".verified.json"


@dataclass(frozen=True)
class Tokens:
    """One split. ids: uint16 or uint32, all documents end to end; document d is ids[documents[d]:documents[d+1]]."""

    ids: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def document(self, index: int) -> np.ndarray:
        return self.ids[self.documents[index] : self.documents[index + 1]]

    def document_of(self, index: np.ndarray) -> np.ndarray:
        """The document that contains each index into ids."""
        return np.searchsorted(self.documents, index, side="right") - 1

    @staticmethod
    def of(documents: list[np.ndarray]) -> Tokens:
        """A split in memory, from a list of documents."""
        ids = np.concatenate(documents) if documents else np.empty(0)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return Tokens(ids.astype(id_type(int(ids.max(initial=0)) + 1)), offsets)


@dataclass(frozen=True)
class TokenData:
    """Packed tokens in a folder written by `dape data prepare`."""

    folder: Path
    manifest: dict[str, Any]
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer

    def split(self, name: str) -> Tokens:
        if name not in SPLITS:
            raise ValueError(f'there is no split "{name}": choose one of {", ".join(SPLITS)}')
        return {"train": self.train, "validation": self.validation}[name]


def id_type(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the manifest of a folder of token data; raises if the folder holds none."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no token data: make it with `dape data prepare`")
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise ValueError(f'{path} is not of format "{FORMAT}"')
    return manifest


def open_data(folder: str | os.PathLike[str]) -> TokenData:
    """Memory-map the token data of a folder; checksums are verified if the files changed since the last time."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        train, validation = (_open_split(folder, name, manifest) for name in SPLITS)
        data = TokenData(folder, manifest, train, validation, load_tokenizer(folder / "tokenizer"))
        if _verified(folder) != _stamps(folder):
            verify(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / 'manifest.json'} is damaged: {error}") from error
    return data


def _open_split(folder: Path, name: str, manifest: dict[str, Any]) -> Tokens:
    entry = manifest["splits"][name]
    return Tokens(
        _map(folder / f"{name}.ids", np.dtype(manifest["dtype"]), entry["tokens"]),
        _map(folder / f"{name}.documents", np.dtype(np.int64), entry["documents"] + 1),
    )


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: prepare the data again")
    if (size := path.stat().st_size) != count * dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, the manifest says {count * dtype.itemsize}: prepare the data again"
        )
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)


def verify(data: TokenData) -> None:
    """Compare all ids and document offsets with the manifest's checksums; cached until the files change."""
    vocabulary = data.manifest["tokenizer"]["vocab_size"]
    for name in SPLITS:
        for key, value in split_checksums(data.folder, name).items():
            if value != data.manifest["splits"][name][key]:
                raise ValueError(damaged(data.folder / f"{name}.{'ids' if key == 'crc32' else 'documents'}"))
        if (highest := int(data.split(name).ids.max(initial=0))) >= vocabulary:
            raise ValueError(
                f"{data.folder / name}.ids has the id {highest}, its tokenizer has {vocabulary} tokens: prepare the data again"
            )
    tokenizer = data.folder / "tokenizer" / "tokenizer.json"
    if file_digest(tokenizer) != data.manifest["tokenizer"]["sha256"]:
        raise ValueError(damaged(tokenizer))
    note_verified(data.folder)


def split_checksums(folder: Path, name: str) -> dict[str, int]:
    """CRC-32 of the ids and of the document offsets of a split."""
    sums = dict.fromkeys(("crc32", "documents_crc32"), 0)
    for key, kind in zip(sums, ("ids", "documents"), strict=True):
        with open(folder / f"{name}.{kind}", "rb") as file:
            while block := file.read(1 << 22):
                sums[key] = zlib.crc32(block, sums[key])
    return sums


def damaged(path: Path) -> str:
    return f"{path} is damaged: its checksum differs from the manifest's; copy it or prepare the data again"


def note_verified(folder: Path) -> None:
    """Record sizes and times of the files after a successful verification."""
    with contextlib.suppress(OSError):  # shared data may be read-only
        write_atomically(folder / VERIFIED, json.dumps(_stamps(folder)))


def _verified(folder: Path) -> Any:
    try:
        return parse_text((folder / VERIFIED).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _stamps(folder: Path) -> dict[str, list[int]]:
    names = ["manifest.json", "tokenizer/tokenizer.json"]
    names += [f"{name}.{kind}" for name in SPLITS for kind in ("ids", "documents")]
    statuses = {name: (folder / name).stat() for name in names}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in statuses.items()}
