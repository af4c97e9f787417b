"""Our models in EleutherAI's lm-evaluation-harness: `--model dape`. Needs `dape[lm-eval]`.

`python -m dape.harness …` is the harness's own command line with our model registered. Importing this module
registers nothing; `register()` does, for this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import dape.models  # noqa: F401 (so that Hugging Face knows our own)
from dape.hub import hub_options
from dape.loading import load_causal_lm
from dape.retrofitting.files import DESCRIPTION


class DapeLM(HFLM):
    """A trained run, an exported folder or a retrofitted model; other arguments are those of `--model hf`.

    pretrained: a run's folder, its `model` folder, or an adapter's folder.
    tokenizer:  "bytes", or a folder; by default the model's.
    max_length: length of the context, 2048 by default; a model without learned positions has no limit of its own.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        device: str | None = None,
        dtype: str = "auto",
        max_length: int = 2048,
        **options: Any,
    ) -> None:
        model = pretrained if isinstance(pretrained, PreTrainedModel) else load_model(pretrained, dtype=dtype)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = load_tokenizer(tokenizer or model.config._name_or_path)
        if len(tokenizer) > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, the model knows {model.config.vocab_size}: "
                f"pass the tokenizer that it was trained with"
            )
        # As the harness: a GPU by default, or the CPU if there is none.
        device = device or "cuda"
        device = device if torch.cuda.is_available() or "cuda" not in device else "cpu"
        model.to(device)  # type: ignore[arg-type]  # transformers wraps it without a name of a device
        super().__init__(
            model, backend="causal", tokenizer=tokenizer, max_length=max_length, device=device, **options
        )


def model_folder(run: str | Path) -> Path:
    """The folder with config.json: the run itself or its `model`."""
    run = Path(run)
    for folder in (run, run / "model"):
        if (folder / DESCRIPTION).exists() or _is_model(folder):
            return folder
    raise FileNotFoundError(
        f"{run} holds no model: expected config.json and model.safetensors in it or in {run / 'model'}"
    )


def _is_model(folder: Path) -> bool:
    # A run has a config.json of its own; a model's is next to weights.
    return (folder / "config.json").exists() and any(folder.glob("model*.safetensors*"))


def load_model(run: str | Path, *, dtype: str = "auto") -> PreTrainedModel:
    return load_causal_lm(model_folder(run), dtype=dtype)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder, or the byte tokenizer for "bytes"."""
    if source == "bytes":
        from dape.models.byte_tokenizer import byte_tokenizer

        return byte_tokenizer()
    folder = Path(source)
    if folder.is_dir() and not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ValueError(
            f'there is no tokenizer in {folder}: pass --tokenizer with a folder that has one, or "bytes" for a model '
            f"of bytes"
        )
    return AutoTokenizer.from_pretrained(source, **hub_options(str(source)))


def register() -> None:
    """Register our model as "dape" with the harness, in this process."""
    if "dape" not in model_registry:
        model_registry.register("dape", target="dape.harness:DapeLM")


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()
