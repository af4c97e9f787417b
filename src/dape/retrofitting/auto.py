"""Entry point of `auto_map` in the folder of a retrofitted model, so that plain transformers loads it retrofitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from dape.retrofitting.files import load_retrofitted

# Arguments of AutoModelForCausalLM that describe how a class of remote code was found.
FOUND = ("config", "trust_remote_code", "code_revision", "adapter_kwargs", "_from_auto", "_commit_hash")
HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class RetrofittedCausalLM:
    """AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) gives the base's own class, retrofitted."""

    @classmethod
    def from_pretrained(cls, name: str | Path, *arguments: Any, **options: Any) -> PreTrainedModel:
        """The model; options as those of from_pretrained."""
        if arguments:
            raise ValueError("a retrofitted model takes keyword options only")
        # Some versions hand the dtype on inside the configuration.
        dtype = getattr(options.get("config"), "dtype", None)
        options = {key: value for key, value in options.items() if key not in FOUND}
        if dtype is not None:
            options.setdefault("dtype", dtype)
        hub = {key: options.pop(key) for key in HUB if key in options}
        folder = Path(name)
        if not folder.is_dir():
            taken = ("cache_dir", "force_download", "local_files_only", "revision", "token")
            folder = Path(snapshot_download(str(name), **{key: hub[key] for key in taken if key in hub}))
        return load_retrofitted(folder, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """No effect: `export` writes the code along with the weights."""
