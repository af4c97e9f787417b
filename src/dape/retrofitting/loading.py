"""Loading of any causal language model, retrofitted or not, by folder or name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import AutoModelForCausalLM, PreTrainedModel

from dape.checksums import verify_checksums
from dape.files import read_json
from dape.names import hub_options
from dape.retrofitting.files import describes_retrofit, load_retrofitted


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
