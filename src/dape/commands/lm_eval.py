"""`dape lm-eval RUN --tasks PATH`: tasks of the lm-evaluation-harness on a trained or retrofitted model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import make_table

from dape.commands.parsing import Parser
from dape.harness import DapeLM, register_command
from dape.training.parallel import find_device


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    # The harness would go on on the CPU without a word.
    device = find_device(options.device)
    names, manager = find_tasks(options.tasks)
    model = DapeLM(
        options.run,
        options.tokenizer,
        device=str(device),
        batch_size=options.batch_size,
        max_length=options.max_length,
    )
    results = simple_evaluate(
        model=model,
        tasks=names,
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
    )
    assert results is not None
    print(make_table(results))
    if options.out:
        kept = {key: results[key] for key in ("results", "n-samples", "versions") if key in results}
        Path(options.out).write_text(json.dumps(kept, indent=2, default=str) + "\n")
    return 0


class Register(argparse.Action):
    """Registers and ends, as `--help` does, whatever else is given."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        print(f"wrote {register_command()}: `lm_eval --model dape --model_args pretrained=RUN …` works now")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dape lm-eval",
        description="Score a model on tasks of the lm-evaluation-harness, local ones or the hub's.",
    )
    parser.add_argument(
        "--register",
        action=Register,
        nargs=0,
        help="make the harness's own command know our models in this environment: `lm_eval --model dape …`; it writes "
        "one file beside the packages and names it, delete that to undo",
    )
    parser.add_argument("run", help="a run's folder, a Hugging Face model's, or an adapter's")
    parser.add_argument(
        "--tasks",
        required=True,
        nargs="+",
        help="task files (YAML), folders of them, or names of the harness's own tasks (these download data)",
    )
    parser.add_argument("--tokenizer", help='a folder, or "bytes"; by default the one beside the model')
    parser.add_argument(
        "--num-fewshot",
        type=int,
        help="solved examples before each question; by default the task's own number",
    )
    parser.add_argument("--limit", type=int, help="examples a task, for a quick look")
    parser.add_argument("--batch-size", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of context (default 2048)")
    parser.add_argument("--device", default="auto", help="auto (the default) takes the GPU if there is one")
    parser.add_argument("--out", help="also write the results to this JSON file")
    return parser


def find_tasks(tasks: list[str]) -> tuple[list[Any], TaskManager]:
    """Tasks for the harness, local ones as their configuration, and a manager that knows what they refer to."""
    files = [file for task in tasks for file in task_files(task)]
    configurations = [read_task(file) for file in files]
    names = [task for task in tasks if not is_local(task)]
    # The harness reads thousands of files to know its own tasks, and every file below a folder that it is told of.
    groups = any("group" in configuration for configuration in configurations)
    manager = TaskManager(
        include_path=sorted({str(file.parent) for file in files}) if groups else None,
        include_defaults=bool(names) or groups,
    )
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ValueError(
            f"the harness knows no task {', '.join(unknown)}: pass a YAML file, a folder of them, or a name that "
            f"`lm_eval ls tasks` lists"
        )
    return [*names, *configurations], manager


def read_task(file: Path) -> dict[str, Any]:
    """The configuration in a task's file, with whatever it includes."""
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
