"""`dape lm-eval RUN --tasks PATH`: tasks of the lm-evaluation-harness on a trained or retrofitted model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from dape.harness import DapeLM


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    names, manager = find_tasks(options.tasks)
    model = DapeLM(
        options.run,
        options.tokenizer,
        device=options.device,
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dape lm-eval",
        description="Score a model on tasks of the lm-evaluation-harness, local ones or the hub's.",
    )
    parser.add_argument("run", help="a run's folder, a Hugging Face model's, or an adapter's")
    parser.add_argument(
        "--tasks",
        required=True,
        nargs="+",
        help="task files (YAML), folders of them, or names of the harness's own tasks (these download data)",
    )
    parser.add_argument("--tokenizer", help='a folder, or "bytes"; by default the one beside the model')
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=int, help="examples a task, for a quick look")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of context (default 2048)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="also write the results to this JSON file")
    return parser


def find_tasks(tasks: list[str]) -> tuple[list[Any], TaskManager]:
    """Names for the harness, and a manager that knows the local ones among them."""
    folders, names = [], []
    for task in tasks:
        path = Path(task)
        if path.is_dir():
            files = sorted(path.glob("*.yaml"))
            if not files:
                raise FileNotFoundError(f"{path} holds no task: expected a .yaml file in it")
        elif path.suffix in (".yaml", ".yml"):
            if not path.exists():
                raise FileNotFoundError(f"there is no task file {path}")
            files = [path]
        else:
            names.append(task)
            continue
        folders.append(str(files[0].parent))
        names += [_name(file) for file in files]
    manager = TaskManager(include_path=folders or None)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ValueError(
            f"the harness knows no task {', '.join(unknown)}: pass a YAML file, a folder of them, or a name that "
            f"`lm_eval ls tasks` lists"
        )
    return names, manager


def _name(file: Path) -> str:
    """The task's own name in its file; read by lines, because harness files have tags that YAML does not know."""
    for line in file.read_text().splitlines():
        if line.startswith("task:"):
            return line.removeprefix("task:").strip().strip("\"'")
    raise ValueError(f'{file} has no line "task: NAME"')
