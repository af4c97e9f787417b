"""Our models in EleutherAI's lm-evaluation-harness: `--model dape`. Needs `dape[lm-eval]`.

`python -m dape.harness …` is the harness's own command line with our model registered. Importing this module
registers nothing; `register()` does, for this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
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
            tokenizer = find_tokenizer(tokenizer or model.config._name_or_path)
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


def find_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
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


def find_tasks(tasks: list[str]) -> tuple[list[Any], TaskManager]:
    """Tasks for the harness, local ones as their configuration, and a task manager for their includes."""
    files = [file for task in tasks for file in task_files(task)]
    configurations = [read_task(file) for file in files]
    names = [task for task in tasks if not is_local(task)]
    # The harness reads thousands of files to index its own tasks, and every file below a folder passed to it.
    groups = any("group" in configuration for configuration in configurations)
    manager = TaskManager(
        include_path=sorted({str(file.parent) for file in files}) if groups else None,
        include_defaults=bool(names) or groups,
    )
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ValueError(
            f"the harness has no task {', '.join(unknown)}: pass a YAML file, a folder of them, or a name that "
            f"`lm_eval ls tasks` lists"
        )
    return [*names, *configurations], manager


def read_task(file: Path) -> dict[str, Any]:
    """Read the configuration in a task's file, with its includes."""
    try:
        configuration = load_yaml(file, resolve_func=True)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{file} is not a task of the harness: {' '.join(str(error).split())}") from error
    if not configuration.keys() & {"task", "group"}:
        raise ValueError(f'{file} is not a task of the harness: it has no line "task: NAME"')
    return configuration


def is_local(task: str) -> bool:
    return Path(task).is_dir() or Path(task).suffix in (".yaml", ".yml")


def task_files(task: str) -> list[Path]:
    """The YAML files of a folder or path; none for the name of a task."""
    path = Path(task)
    if not is_local(task):
        return []
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"there is no task file {path}")
        return [path]
    files = sorted(path.glob("*.yaml"))
    if not files:
        raise FileNotFoundError(f"{path} holds no task: expected a .yaml file in it")
    return files


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()
