"""Load any causal language model by name: a run folder, a model folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import dape.models  # noqa: F401 (so that Hugging Face knows our own)
from dape.checksums import verify_checksums
from dape.data import TokenData, Tokenizer, load_tokenizer, open_data, prepare
from dape.devices import find_device
from dape.files import distinct_names, read_json
from dape.hub import GGUF, loading, pretrained
from dape.models import DapeForCausalLM
from dape.models.config import DapeConfig
from dape.retrofitting.attach import is_retrofitted, own_length, retrofit
from dape.retrofitting.check import check_causal
from dape.retrofitting.files import describes_retrofit, load_retrofitted
from dape.training import load_run
from dape.training.run import Run, no_bars

# Tokens whose text is encoded again to compare tokenizers.
PROBED = 1000
# File that a run folder has, and a model folder does not.
RUN = "run.json"


@dataclass(frozen=True)
class Named:
    """A pretrained model by its name: where its tokenizer is, the tokens it was trained on at a time, and its run, if known."""

    model: PreTrainedModel
    tokenizer: str
    window: int | None
    run: Run | None = None


def load_named(name: str, **options: Any) -> Named:
    """Load a model from a run folder, a model folder, a GGUF file or the hub (hf:NAME; of a folder "hf:" is optional).

    options: of from_pretrained, for models that are not of a run.
    """
    source = name.removeprefix("hf:")
    path = Path(source)
    is_model = any((path / file).exists() for file in ("config.json", "adapter_config.json"))
    if (path / RUN).exists() or not (
        name.startswith("hf:") or path.suffix == GGUF or is_model or describes_retrofit(path)
    ):
        run = load_run(path)
        return Named(run.model(), str(path / "model"), run.config.train_length, run)
    if not source:
        raise ValueError("hf: is followed by a folder or a name on the Hugging Face hub")
    with loading("causal language model", source):
        model = load_causal_lm(source, **options).eval()
    return Named(model, tokenizer_source(source, model), own_length(model))


def load_base(name: str, device: str = "auto") -> Named:
    """Load a model to retrofit, in float32, by any name that `load_named` takes; for one on the hub "hf:" is optional."""
    base = load_named(name if Path(name).exists() else f"hf:{name.removeprefix('hf:')}", dtype=torch.float32)
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
    if describes_retrofit(folder):
        return load_retrofitted(folder, **options)
    if (path := folder / "adapter_config.json").exists():
        base = read_json(path).get("base_model_name_or_path")
        if base and describes_retrofit(Path(base)):
            from peft import PeftModel

            return cast(PreTrainedModel, PeftModel.from_pretrained(load_retrofitted(base, **options), folder))
    if folder.is_dir():
        verify_checksums(folder)
    source, how = pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(source, **{**how, **options})
    if "gguf_file" in how:
        # The weights are dequantised, and transformers would refuse to save or cast them.
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer, model.is_quantized = None, False
    return cast(PreTrainedModel, model)


def tokenizer_source(name: str | Path, model: PreTrainedModel) -> str:
    """Folder, file or name of a loaded model's tokenizer: its own, or its base's for an adapter without one."""
    folder = Path(name)
    has_tokenizer = any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json"))
    if folder.is_dir() and not has_tokenizer and model.config._name_or_path:
        return str(model.config._name_or_path)
    return str(name)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model, its run if known, and the data to evaluate it on.

    train_length: None if unknown; of others' models the window is a limit, not always what they were trained at.
    """

    model: PreTrainedModel
    run: Run | None
    data: TokenData
    train_length: int | None

    @property
    def method(self) -> str | None:
        config: Any = self.model.config
        if self.run is not None:
            return self.run.config.method
        return getattr(config, "method", None) or getattr(config, "dape_retrofit", {}).get("method")


@contextlib.contextmanager
def open_for_evaluation(
    name: str, *, data: Path | None = None, corpus: str | None = None, device: str = "auto"
) -> Iterator[EvaluatedModel]:
    """Open a model with the data to evaluate it on, by any name that `load_named` takes.

    data:   token data, packed with the model's tokenizer; by default the run's own.
    corpus: text to pack with the model's own tokenizer (all of it, for the duration of the evaluation).
    """
    if data is not None and corpus is not None:
        raise ValueError("give token data or a corpus, not both")
    torch_device = find_device(device)
    given = None if data is None else open_data(data)
    named = load_named(name)
    check_causal(named.model)
    if given is not None and named.run is not None:
        named.run.check_data(given, "tokenizer")
    elif given is not None:
        _check_tokenizer(given, named.tokenizer, name)
    with contextlib.ExitStack() as cleanup:
        tokens = given
        if tokens is None and named.run is not None and corpus is None:
            tokens = named.run.data()
        elif tokens is None:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dape-eval-")))
            tokens = prepare(
                corpus or "stdlib", folder / "data", tokenizer=named.tokenizer, validation=1.0, skip_bad=True
            )
        ours = named.run is not None or isinstance(named.model.config, DapeConfig)
        named.model.to(torch_device)  # type: ignore[arg-type]  # as in harness.py
        yield EvaluatedModel(named.model, named.run, tokens, named.window if ours else None)


def open_for_inspection(
    models: Sequence[str], tokenizer: str | None = None
) -> Iterator[tuple[str, PreTrainedModel, Tokenizer]]:
    """A short name, the model and its tokenizer, of models by any name that `load_named` takes.

    A model of others is shown as it is, through our attention. tokenizer: for models without one.
    """
    for label, name in zip(distinct_names([m.removeprefix("hf:") for m in models]), models, strict=True):
        with no_bars():
            named = load_named(name, dtype=torch.float32)
        model, source = named.model, named.tokenizer if tokenizer is None else tokenizer
        if not (isinstance(model, DapeForCausalLM) or is_retrofitted(model)):
            retrofit(model, "plain")
        if tokenizer is None and Path(source).is_dir() and not (Path(source) / "tokenizer.json").exists():
            raise FileNotFoundError(
                f'there is no tokenizer in {source}: pass --tokenizer with a folder that has one, or "bytes" for a '
                f"model of bytes"
            )
        yield label, model, load_tokenizer(source)


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
