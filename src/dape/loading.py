"""Load any causal language model by name: a run folder, a model folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import dape.models  # noqa: F401 (so that Hugging Face knows our own)
from dape.checksums import verify_checksums
from dape.data import TokenData, load_tokenizer, open_data, prepare
from dape.devices import find_device
from dape.evaluation.models import EvaluatedModel
from dape.files import read_json
from dape.hub import hub_options, loading
from dape.models.config import DapeConfig
from dape.retrofitting.files import describes_retrofit, load_retrofitted
from dape.training import load_run

# Tokens whose text is encoded again to compare tokenizers.
PROBED = 1000
# File that a run folder has, and a model folder does not.
RUN = "run.json"
GGUF = ".gguf"


@dataclass(frozen=True)
class Base:
    """A pretrained model to retrofit: where its tokenizer is, and the tokens it was trained on at a time, if known."""

    model: PreTrainedModel
    tokenizer: str
    window: int | None


def is_run(name: str) -> bool:
    """Whether a name is that of a run, trained or not yet, rather than of a model: hf:NAME, a model folder or a GGUF file."""
    path = Path(name)
    is_model = (path / "config.json").exists() or (path / "adapter_config.json").exists()
    return not (name.startswith("hf:") or path.suffix == GGUF or (is_model and not (path / RUN).exists()))


def load_named(name: str, **options: Any) -> Base:
    """Load a model from a run folder, a model folder, a GGUF file or the hub (hf:NAME; in a folder "hf:" is optional).

    options: of from_pretrained.
    """
    source = name.removeprefix("hf:")
    path = Path(source)
    if (path / RUN).exists():
        run = load_run(path)
        return Base(run.model(), str(path / "model"), run.config.train_length)
    with loading("causal language model", source):
        model = load_causal_lm(source, **options)
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Base(model, str(path.parent) if path.suffix == GGUF else tokenizer_source(source, model), window)


def load_base(name: str, device: str = "auto") -> Base:
    """Load a model to retrofit, in float32, by any name that `load_named` takes."""
    base = load_named(name, dtype=torch.float32)
    if getattr(base.model.config, "dape_retrofit", None):
        raise ValueError(
            f"{name} is already retrofitted: pass the base model, or continue training with Trainer"
        )
    base.model.to(find_device(device)).eval()  # type: ignore[arg-type]  # as in harness.py
    return base


def load_causal_lm(name: str | Path, **options: Any) -> PreTrainedModel:
    """Load a causal language model: retrofitted, an adapter of ours or of PEFT on one, or any other.

    name: a folder, a GGUF file, or a name on the Hugging Face hub. options: of from_pretrained.
    """
    folder, name = Path(name), str(name)
    if folder.suffix == GGUF:
        return AutoModelForCausalLM.from_pretrained(str(folder.parent), gguf_file=folder.name, **options)
    if describes_retrofit(folder):
        return load_retrofitted(folder, **options)
    if (path := folder / "adapter_config.json").exists():
        base = read_json(path).get("base_model_name_or_path")
        if base and describes_retrofit(Path(base)):
            from peft import PeftModel

            return cast(PreTrainedModel, PeftModel.from_pretrained(load_retrofitted(base, **options), folder))
    if folder.is_dir():
        verify_checksums(folder)
    return AutoModelForCausalLM.from_pretrained(name, **{**hub_options(name), **options})


def tokenizer_source(name: str | Path, model: PreTrainedModel) -> str:
    """Folder or name of a loaded model's tokenizer: its own, or its base's for an adapter without one."""
    folder = Path(name)
    has_tokenizer = any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json"))
    if folder.is_dir() and not has_tokenizer and model.config._name_or_path:
        return str(model.config._name_or_path)
    return str(name)


@contextlib.contextmanager
def open_for_evaluation(
    name: str,
    *,
    data: Path | None = None,
    corpus: str | None = None,
    device: str = "auto",
    label: str | None = None,
) -> Iterator[EvaluatedModel]:
    """Open a model with the data to evaluate it on: a run folder, a model folder, a GGUF file, or hf:NAME.

    data:   token data, packed with the model's tokenizer; by default the run's own.
    corpus: text to pack with the model's own tokenizer (all of it, for the duration of the evaluation).
    label:  name in reports; by default its folder's.
    """
    if data is not None and corpus is not None:
        raise ValueError("give token data or a corpus, not both")
    torch_device = find_device(device)
    with contextlib.ExitStack() as cleanup:
        opened = (_run if is_run(name) else _hugging_face)(name, data, corpus, cleanup)
        opened.model.to(torch_device)
        yield opened if label is None else replace(opened, label=label)


def _hugging_face(
    name: str, data: Path | None, corpus: str | None, cleanup: contextlib.ExitStack
) -> EvaluatedModel:
    path = name.removeprefix("hf:")
    if not path:
        raise ValueError("hf: is followed by a folder or a name on the Hugging Face hub")
    tokens = None if data is None else open_data(data)
    base, given = load_named(name), tokens
    model, source = base.model, base.tokenizer
    if given is None:
        tokens = _pack(corpus or "stdlib", source, cleanup)
    else:
        tokens = given
        _check_tokenizer(given, source, name)
    method = getattr(model.config, "method", None) or getattr(model.config, "dape_retrofit", {}).get("method")
    trained_on = None if given is None else lambda: given
    # Of others' models this is a limit, not always what they were trained at.
    length = model.config.max_position_embeddings if isinstance(model.config, DapeConfig) else None
    return EvaluatedModel(
        Path(path).name or path, model, tokens, method, train_length=length, trained_on=trained_on
    )


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
            f"{data.folder} was packed with a different tokenizer than {name}: pack the text with --tokenizer "
            f"{source}, or give --corpus TEXT instead"
        )


def _run(name: str, data: Path | None, corpus: str | None, cleanup: contextlib.ExitStack) -> EvaluatedModel:
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
    return EvaluatedModel(Path(name).name, run.model(), tokens, *known, trained_on=run.data)


def _pack(corpus: str, tokenizer: str, cleanup: contextlib.ExitStack) -> TokenData:
    folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dape-eval-"))
    return prepare(corpus, Path(folder) / "data", tokenizer=tokenizer, validation=1.0, skip_bad=True)
