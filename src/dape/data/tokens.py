"""Packed tokens: two splits, memory-mapped, in a folder with a manifest."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dape.data.tokenizers import Tokenizer, load_tokenizer

FORMAT = "dape tokens 1"
SPLITS = ("train", "validation")


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

    def document_of(self, places: np.ndarray) -> np.ndarray:
        """The document that each place (an index into ids) belongs to."""
        return np.searchsorted(self.documents, places, side="right") - 1

    @staticmethod
    def of(documents: list[np.ndarray]) -> Tokens:
        """Documents at hand, as a split in memory."""
        ids = np.concatenate(documents) if documents else np.empty(0)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return Tokens(ids.astype(id_type(int(ids.max(initial=0)) + 1)), offsets)


@dataclass(frozen=True)
class TokenData:
    """What `dape data prepare` leaves in a folder."""

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
    """The manifest of a folder of token data; an error in a sentence if it is none."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no token data: make it with `dape data prepare`")
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f'{path} is not of format "{FORMAT}"')
    return manifest


def open_data(folder: str | os.PathLike[str]) -> TokenData:
    """The token data of a folder, mapped, not read."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    train, validation = (_open_split(folder, name, manifest) for name in SPLITS)
    return TokenData(folder, manifest, train, validation, load_tokenizer(folder / "tokenizer"))


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
    """Read every id once and compare with the manifest's checksums."""
    for name in SPLITS:
        ids, checksum = data.split(name).ids, 0
        for start in range(0, len(ids), 1 << 22):
            checksum = zlib.crc32(ids[start : start + (1 << 22)].tobytes(), checksum)
        if checksum != data.manifest["splits"][name]["crc32"]:
            raise ValueError(f"{data.folder}/{name}.ids is damaged: its checksum differs from the manifest's")
