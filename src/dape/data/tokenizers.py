"""Tokenizers: bytes, a byte-level BPE trained here, a tokenizer.json, or one of Hugging Face's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers as hf

from dape.files import read_json, write_atomically
from dape.hub import loading, pretrained

# Special token that ends texts and pads batches, if a tokenizer has none of its own.
END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>")
# This byte occurs in no UTF-8 text: its token is free to be the special one, and no vocabulary has to grow.
FREE_BYTE = 0xFF
# Maximum number of tokens that make up a character: the bytes of UTF-8.
UTF8_BYTES = 4


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that `load_tokenizer` and transformers' AutoTokenizer read."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8: 256 ids, the byte values."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; invalid UTF-8, which a model may generate, becomes replacement characters."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def save(self, folder: str | os.PathLike[str]) -> None:
        # The same mapping for the `tokenizers` library: a byte-level BPE of 256 tokens without merges.
        vocab = {character: byte for byte, character in _byte_characters().items()}
        model = _byte_level(hf.models.BPE(vocab, []), use_regex=False)
        _save(model, Path(folder), {"dape_tokenizer": "bytes"})


class SubwordTokenizer:
    """Any tokenizer of the `tokenizers` library; documents get no special tokens."""

    def __init__(self, backend: hf.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        self.backend = backend
        self.settings = settings or {}
        backend.no_padding()
        backend.no_truncation()
        # The spelling of a special token in a corpus is ordinary text.
        backend.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        # Ids may have gaps, and a model needs a row up to the highest.
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The fast form leaves offsets out; the library spreads the texts over all cores.
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, folder: str | os.PathLike[str]) -> None:
        _save(self.backend, Path(folder), self.settings)


def load_tokenizer(spec: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer: "bytes", a tokenizer.json, a folder, a GGUF file, or a name on the Hugging Face hub."""
    if spec == "bytes":
        return ByteTokenizer()
    if str(spec).startswith("bpe:"):
        raise ValueError(
            f'"{spec}" has to be trained: prepare data with it and take the tokenizer from there'
        )
    path = Path(spec).expanduser()
    if ":" in str(spec) and not path.exists():
        raise ValueError(
            f'no tokenizer "{spec}": give bytes, bpe:VOCAB (such as bpe:2048), a tokenizer.json, a folder, or a name on '
            f"the Hugging Face hub"
        )
    if path.suffix == ".json":
        return _load_file(path, {})
    if not (path / "tokenizer.json").exists():
        return _load_pretrained(str(path) if path.exists() else str(spec))
    settings = path / "tokenizer_config.json"
    loaded = read_json(settings) if settings.exists() else {}
    if loaded.get("dape_tokenizer") == "bytes":
        return ByteTokenizer()
    return _load_file(path / "tokenizer.json", loaded)


def train_bpe(texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """Train a byte-level BPE with at most `vocab_size` tokens on the texts."""
    if vocab_size < 256:
        raise ValueError(f"bpe:{vocab_size}: a byte-level vocabulary has at least 256 tokens")
    model = _byte_level(hf.models.BPE(), use_regex=True)
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=sorted(_byte_characters().values()),
        special_tokens=[],
    )
    model.train_from_iterator(texts, trainer)
    return SubwordTokenizer(model)


def bpe_size(spec: str) -> int | None:
    """VOCAB of "bpe:VOCAB", or None for another spec."""
    if not spec.startswith("bpe:"):
        return None
    number = spec.removeprefix("bpe:")
    if not number.isdecimal() or int(number) < 256:
        raise ValueError(f'tokenizer "{spec}": bpe: is followed by the size of the vocabulary, at least 256')
    return int(number)


def _byte_level(model: Any, *, use_regex: bool) -> hf.Tokenizer:
    tokenizer = hf.Tokenizer(model)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = hf.decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> dict[int, str]:
    """The printable character of each byte in byte-level tokenizers.

    Printable Latin-1 bytes map to themselves; the others, in order, to the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def _save(tokenizer: hf.Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    description = json.loads(tokenizer.to_str())
    end = settings.get("eos_token") or _end_of_text(description)
    write_atomically(folder / "tokenizer.json", json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({"eos_token": end, "pad_token": end} if end else {}),
        **settings,
    }
    write_atomically(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


def _end_of_text(description: dict[str, Any]) -> str | None:
    """The special token that ends texts; a byte-level vocabulary without one uses the token of an unused byte.

    description: the contents of a tokenizer.json, changed in place.
    """
    known = {token["content"] for token in description["added_tokens"] if token["special"]}
    for name in ENDS:
        if name in known:
            return name
    vocabulary = description["model"].get("vocab", {})
    free = _byte_characters()[FREE_BYTE]
    byte_level = (description["pre_tokenizer"] or {}).get("type") == "ByteLevel"
    if not byte_level or free not in vocabulary or END in vocabulary:
        return None
    number = vocabulary.pop(free)
    vocabulary[END] = number
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    description["added_tokens"].append({"id": number, "content": END, **flags})
    return END


def _load_file(path: Path, settings: dict[str, Any]) -> SubwordTokenizer:
    if not path.exists():
        raise FileNotFoundError(f"there is no tokenizer {path}")
    try:
        return SubwordTokenizer(hf.Tokenizer.from_file(str(path)), settings)
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path} is not a tokenizer of the `tokenizers` library: {error}") from error


def _load_pretrained(name: str) -> SubwordTokenizer:
    from transformers import AutoTokenizer

    with loading("tokenizer", name):
        source, options = pretrained(name)
        loaded = AutoTokenizer.from_pretrained(source, **options)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f'tokenizer "{name}" has no fast version in the `tokenizers` library')
    settings = {"tokenizer_class": type(loaded).__name__}
    for token in ("eos_token", "bos_token", "unk_token", "pad_token"):
        if (value := getattr(loaded, token, None)) is not None:
            settings[token] = str(value)
    return SubwordTokenizer(backend, settings)


def token_texts(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Text of each token; a character that several tokens make up is the text of the first, the others have none."""
    texts: list[str] = []
    while len(texts) < len(ids):
        start = len(texts)
        reach = min(len(ids) - start, UTF8_BYTES)
        whole = ([*ids[start : start + count]] for count in range(1, reach + 1))
        group = next((part for part in whole if "\ufffd" not in decode(part)), [ids[start]])
        texts += [decode(group), *[""] * (len(group) - 1)]
    return texts
