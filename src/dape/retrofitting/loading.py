"""Loading of any causal language model: a run of ours, a folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dape.checksums import verify_checksums
from dape.devices import find_device
from dape.files import read_json
from dape.names import hub_options, not_loaded
from dape.retrofitting.files import describes_retrofit, load_retrofitted

# File that a run folder has, and a model folder does not.
RUN = "run.json"


@dataclass(frozen=True)
class Base:
    """A pretrained model to retrofit: where its tokenizer is, and the tokens it was trained on at a time, if known."""

    model: PreTrainedModel
    tokenizer: str
    window: int | None


def load_base(name: str, device: str = "auto") -> Base:
    """Load a model in float32 from a run folder, a model folder, a GGUF file or the hub; "hf:" before it is optional."""
    path = Path(name.removeprefix("hf:"))
    if (path / RUN).exists():
        from dape.training import load_run

        run = load_run(path)
        base = Base(run.model(), str(path / "model"), run.config.train_length)
    else:
        source = name.removeprefix("hf:")
        options: dict[str, Any] = {"dtype": torch.float32}
        if path.suffix == ".gguf":
            source, options["gguf_file"] = str(path.parent), path.name
        try:
            model = load_causal_lm(source, **options)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(not_loaded("causal language model", source, error)) from error
        if getattr(model.config, "dape_retrofit", None):
            raise ValueError(
                f"{source} is already retrofitted: pass the base model, or continue training with Trainer"
            )
        window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        base = Base(model, source, window)
    base.model.to(find_device(device)).eval()  # type: ignore[arg-type]  # as in harness.py
    return base


def load_causal_lm(name: str | Path, **options: Any) -> PreTrainedModel:
    """Load a causal language model: retrofitted, an adapter of ours or of PEFT on one, or any other.

    name: a folder, or a name on the Hugging Face hub. options: of from_pretrained.
    """
    import dape.models  # noqa: F401 (so that Hugging Face knows our own)

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
    return AutoModelForCausalLM.from_pretrained(name, **{**hub_options(name), **options})


def tokenizer_source(name: str | Path, model: PreTrainedModel) -> str:
    """Folder or name of a loaded model's tokenizer: its own, or its base's for an adapter without one."""
    folder = Path(name)
    has_tokenizer = any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json"))
    if folder.is_dir() and not has_tokenizer and model.config._name_or_path:
        return str(model.config._name_or_path)
    return str(name)
