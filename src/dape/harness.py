"""Our models in EleutherAI's lm-evaluation-harness: `--model dape`. Needs `dape[lm-eval]`.

Importing this module registers nothing; `register()` does, for this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dape.hub import hub_options
from dape.loading import load_named
from dape.models.byte_tokenizer import byte_tokenizer


class DapeLM(HFLM):
    """A trained run, an exported folder or a retrofitted model; other arguments are those of `--model hf`.

    pretrained: any name that `load_named` takes, such as a run's folder, its `model` folder, or an adapter's folder.
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
        if isinstance(pretrained, PreTrainedModel):
            model, source = pretrained, pretrained.config._name_or_path
        else:
            named = load_named(pretrained, dtype=dtype)
            model, source = named.model, named.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = find_tokenizer(tokenizer or source)
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


def find_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder, or the byte tokenizer for "bytes"."""
    if source == "bytes":
        return byte_tokenizer()
    folder = Path(source)
    if folder.is_dir() and not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ValueError(
            f'there is no tokenizer in {folder}: pass tokenizer=FOLDER with one that has, or "bytes" for a model '
            f"of bytes"
        )
    return AutoTokenizer.from_pretrained(source, **hub_options(str(source)))


def register() -> None:
    """Register our model as "dape" with the harness, in this process."""
    if "dape" not in model_registry:
        model_registry.register("dape", target="dape.harness:DapeLM")
