"""`dape lm-eval RUN --tasks PATH`: tasks of the lm-evaluation-harness on a trained or retrofitted model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.utils import make_table

from dape.cli.parsing import parse
from dape.devices import device_name, find_device
from dape.files import write_atomically
from dape.harness import DapeLM, find_tasks, register
from dape.settings import COUNT, setting


@dataclass(frozen=True)
class Options:
    """Evaluate a model on tasks of the lm-evaluation-harness, local ones or the hub's.

    A task file can execute Python functions (`!function`): only use files that you trust.
    """

    run: str = setting(help="Folder of a run, a Hugging Face model or an adapter.", positional=True)
    tasks: tuple[str, ...] = setting(
        help="Task files (YAML, which can run code by `!function`), folders of them, or names of the harness's "
        "tasks (these download data)."
    )
    tokenizer: str | None = setting(None, help='A folder, or "bytes"; by default the model\'s own.')
    num_fewshot: int | None = setting(
        None, help="Few-shot examples; by default the task's number.", low=0, high=10_000
    )
    limit: int | None = setting(None, help="Maximum examples per task, for a quick test.", **COUNT)
    batch_size: int = setting(8, help="Batch size.", low=1, high=2**20)
    max_length: int = setting(2048, help="Tokens of context.", low=2, high=2**24)
    device: str = setting("auto", help="auto takes the GPU if there is one.", test=device_name)
    out: Path | None = setting(None, help="Also write the results to this JSON file.", writes="file")


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape lm-eval")
    if not options.tasks:
        raise ValueError("--tasks is empty: name at least one task or file")
    register()
    # The harness would silently use the CPU.
    device = find_device(options.device)
    names, manager = find_tasks(list(options.tasks))
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
        write_atomically(options.out, json.dumps(kept, indent=2, default=str) + "\n")
    return 0
