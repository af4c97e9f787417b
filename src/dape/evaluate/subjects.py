"""Models for `dape eval`: those of run folders, and any causal language model of Hugging Face."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dape.data import TokenData, Tokens, load_tokenizer, open_data, prepare
from dape.devices import find_device
from dape.names import not_loaded

# Tokens whose text is encoded again to compare tokenizers.
PROBED = 1000


@dataclass(frozen=True)
class Subject:
    """A model and the data to evaluate it on; method, seed and train_length if known.

    trained_on: data with the model's training split, if known; opened when it is needed.
    """

    label: str
    model: nn.Module
    data: TokenData
    method: str | None = None
    seed: int | None = None
    train_length: int | None = None
    trained_on: Callable[[], TokenData] | None = None

    def training_tokens(self) -> Tokens:
        """Tokens that the model was trained on; raises if they are not known."""
        train = self.trained_on().train if self.trained_on is not None else None
        if train is None or not len(train):
            raise ValueError(
                f"what {self.label} was trained on is not known, and so not how often an n-gram occurred there: leave out "
                f"--max-training-count, or pass the packed training data of an hf: model by --data"
            )
        return train

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "model": self.label,
            "method": self.method,
            "seed": self.seed,
            "train_length": self.train_length,
        }

    def same_tokens(self, other: Subject, split: str) -> bool:
        """Whether both are evaluated on the same token ids."""
        mine, theirs = self.data.manifest, other.data.manifest
        return (
            mine["tokenizer"]["sha256"] == theirs["tokenizer"]["sha256"]
            and mine["splits"][split] == theirs["splits"][split]
        )


@contextlib.contextmanager
def open_subject(
    name: str,
    *,
    data: Path | None = None,
    corpus: str | None = None,
    device: str = "auto",
    label: str | None = None,
) -> Iterator[Subject]:
    """Open a subject by name: a run folder, or hf:PATH.

    data:   token data, packed with the model's tokenizer; by default the run's own.
    corpus: text to pack with the model's own tokenizer (all of it, for the duration of the evaluation).
    label:  name in reports; by default its folder's.
    """
    if data is not None and corpus is not None:
        raise ValueError("give token data or a corpus, not both")
    torch_device = find_device(device)
    with contextlib.ExitStack() as cleanup:
        if name.startswith("hf:"):
            subject = _hugging_face(name, data, corpus, cleanup)
        else:
            subject = _run(name, data, corpus, cleanup)
        subject.model.to(torch_device)
        yield subject if label is None else replace(subject, label=label)


def _hugging_face(name: str, data: Path | None, corpus: str | None, cleanup: contextlib.ExitStack) -> Subject:
    import dape.models  # noqa: F401 (so that Hugging Face knows our own)
    from dape.retrofitting.loading import load_causal_lm, tokenizer_source

    path = name.removeprefix("hf:")
    if not path:
        raise ValueError("hf: is followed by a folder or a name on the Hugging Face hub")
    tokens = None if data is None else open_data(data)
    try:
        model = load_causal_lm(path)
    except (OSError, ValueError) as error:
        raise ValueError(not_loaded("causal language model", path, error)) from error
    source, given = tokenizer_source(path, model), tokens
    if given is None:
        tokens = _pack(corpus or "stdlib", source, cleanup)
    else:
        tokens = given
        _check_tokenizer(given, source, name)
    method = getattr(model.config, "method", None) or getattr(model.config, "dape_retrofit", {}).get("method")
    trained_on = None if given is None else lambda: given
    return Subject(Path(path).name or path, model, tokens, method, trained_on=trained_on)


def _check_tokenizer(data: TokenData, source: str, name: str) -> None:
    """Raise if the model's tokenizer gives other ids than those of the packed data; a model may have none."""
    try:
        own = load_tokenizer(source)
    except (OSError, ValueError):
        return
    tokens = data.validation if data.validation.num_documents else data.train
    text = data.tokenizer.decode(tokens.document(0)[:PROBED].tolist())
    if list(own.encode(text)) != list(data.tokenizer.encode(text)):
        raise ValueError(
            f"{data.folder} was packed with another tokenizer than that of {name}: pack the text with --tokenizer "
            f"{source}, or give --corpus TEXT instead"
        )


def _run(name: str, data: Path | None, corpus: str | None, cleanup: contextlib.ExitStack) -> Subject:
    from dape.training import load_run

    run = load_run(Path(name))
    if data is not None:
        tokens = open_data(data)
        run.check_packed(tokens, "tokenizer")
    elif corpus is not None:
        tokens = _pack(corpus, str(run.folder / "model"), cleanup)
    else:
        tokens = run.data()
    config = run.config
    known = (config.method, config.seed, config.train_length)
    return Subject(Path(name).name, run.model(), tokens, *known, trained_on=run.data)


def _pack(corpus: str, tokenizer: str, cleanup: contextlib.ExitStack) -> TokenData:
    folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dape-eval-"))
    return prepare(corpus, Path(folder) / "data", tokenizer=tokenizer, validation=1.0, skip_bad=True)
