"""`dape demo`: associative recall in seconds, then a comparison of five methods beyond their training length."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dape.cli.parsing import parse
from dape.files import write_atomically
from dape.settings import setting

METHODS = {"nope": "plain attention", "dape1x3-nope": "with the 1×3 convolution"}
TRAIN_LENGTH = 24
TEST_LENGTHS = (12, 24, 48, 96)
# Short enough for a few minutes on two cores, long enough for methods to differ.
COMPARISON: dict[str, Any] = {"steps": 400, "windows": 64, "last": 32}
REPAIRED = "dape1x3-kerple"
REPAIR: dict[str, Any] = {
    "steps": 200,
    "learning_rate": 2e-3,
    "final_learning_rate": 2e-5,
    "warmup_steps": 10,
    "weight_decay": 0.0,
}


@dataclass(frozen=True)
class DemoOptions:
    """Train a one-layer model on associative recall, with and without the convolution of its scores (seconds);
    then train five methods on the sources of Python's library and evaluate each to 16 times its training
    length (minutes), with a report; then repair the one that broke (a minute). Interrupted, it continues."""

    quick: bool = setting(False, help="Only the recall part.")
    picture: Path | None = setting(
        None,
        help="Draw the recall part: scores, convolution, weights (svg, png or pdf); the accuracies go into a JSON file "
        "next to it.",
        writes="file",
    )
    steps: int = setting(
        120,
        help="Training steps of each model in the recall part; the comparison has its own.",
        low=1,
        high=10**9,
    )
    seed: int = setting(0, help="Seed of initial weights and data.", low=0, high=2**63 - 1)
    out: str = setting("runs/demo", help="Folder of the comparison and its report.", writes="folder")


def main(arguments: list[str]) -> int:
    options: DemoOptions = parse(DemoOptions, arguments, prog="dape demo")
    console = Console()
    codes = [part(options, console) for part in (PARTS[:1] if options.quick else PARTS)]
    return max(codes)


def recall(options: DemoOptions, console: Console) -> int:
    """Train and test associative recall with and without the convolution."""
    console.print(
        "[bold]Associative recall[/]: 8 key–value pairs, then 8 keys: name the value of each.\n"
        "One layer, width 64, two heads, no position encoding, trained at length 24.\n"
    )
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[loss]}"),
    )
    start = time.process_time()
    accuracy, models = {}, {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bars = {
            method: progress.add_task(title, total=options.steps, start=False, loss="")
            for method, title in METHODS.items()
        }
        for method, bar in bars.items():
            progress.start_task(bar)
            with one_thread():
                accuracy[method], models[method] = train_and_test(method, options, show_on(progress, bar))
            progress.update(bar, loss="")

    table = Table("accuracy at length", *map(str, TEST_LENGTHS))
    for method, title in METHODS.items():
        cells = [f"{100 * accuracy[method][length]:.0f} %" for length in TEST_LENGTHS]
        table.add_row(title, *cells, style="bold" if method.startswith("dape") else "")
    table.add_row(
        "guess a value just shown", *[f"{100 * 3 / length:.0f} %" for length in TEST_LENGTHS], style="dim"
    )
    console.print(table)
    console.print(verdict(accuracy))
    if options.picture is not None:
        from dape.inspection.idea import draw_idea
        from dape.lab.environment import environment
        from dape.tasks.recall import AssociativeRecall

        draw_idea(models["dape1x3-nope"], AssociativeRecall(), options.picture, seed=options.seed)
        record = {
            "accuracy": {
                method: {length: round(share, 4) for length, share in shares.items()}
                for method, shares in accuracy.items()
            },
            "train_length": TRAIN_LENGTH,
            "steps": options.steps,
            "seed": options.seed,
            "cpu_seconds": round(time.process_time() - start, 1),
            "environment": environment(1),
        }
        write_atomically(options.picture.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
        console.print(f"Picture: {options.picture}", soft_wrap=True)
    return 0


def train_and_test(
    method: str, options: DemoOptions, show: Callable[[dict[str, float]], None]
) -> tuple[dict[int, float], Any]:
    """Accuracy by length of a model trained from scratch, and the model."""
    from dape.lab.solving import GeneratedTask, accuracy_by_length, build_model
    from dape.tasks import build_task
    from dape.training import LoopSettings, fit

    task = build_task("associative_recall")
    model = build_model(task, method, num_layers=1, hidden_size=64, num_heads=2, seed=options.seed)
    training = GeneratedTask(task, model, 64, (TRAIN_LENGTH,), options.seed)
    settings = LoopSettings(
        steps=options.steps,
        learning_rate=3e-3,
        final_learning_rate=3e-3,
        warmup_steps=0,
        weight_decay=0.0,
        log_every=2,
        checkpoint_every=options.steps,
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = fit(training, settings, Path(folder), on_step=show, progress=False)
    if result.stopped_early:
        raise KeyboardInterrupt
    return accuracy_by_length(task, model, TEST_LENGTHS, 256, seed=options.seed), model


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: a model this small does not profit from more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def show_on(progress: Progress, bar: TaskID) -> Callable[[dict[str, float]], None]:
    def show(record: dict[str, float]) -> None:
        progress.update(bar, completed=record["step"], loss=f"loss {record['loss']:.2f}")

    return show


def verdict(accuracy: dict[str, dict[int, float]]) -> str:
    """Two-line summary of the accuracies."""
    longest = TEST_LENGTHS[-1]
    plain, convolved = (100 * accuracy[method][longest] for method in METHODS)
    if convolved > 90 and plain < 50:
        return (
            "Scores find the key that matches, but its value is the next token; the\n"
            f"convolution moves the score there: {convolved:.0f} % against {plain:.0f} % at "
            f"{longest // TRAIN_LENGTH}× the trained length."
        )
    return (
        f"At length {longest}: {plain:.0f} % without the convolution, {convolved:.0f} % with it.\n"
        "The difference is usually larger: try more --steps."
    )


def comparison(options: DemoOptions, console: Console) -> int:
    """Compare five methods on text, up to 16 times their training length."""
    from dape.cli.compare import run, show
    from dape.lab.compare import by_recipe
    from dape.lab.environment import num_cores

    jobs = min(5, num_cores())
    settings = by_recipe("tiny", seeds=str(options.seed), out=options.out, jobs=jobs, **COMPARISON)
    console.print(
        f"\n[bold]Length extrapolation[/]: five methods on Python's library, byte by byte, trained at\n"
        f"length {settings.train_length} for {settings.steps} steps, evaluated to {settings.length_list[-1]}: "
        f"a few minutes on two cores.\n"
    )
    result = run(settings, console)
    show(result, console)
    return int(result.failed)


def repair(options: DemoOptions, console: Console) -> int:
    """Retrofit the RoPE model of the comparison with Kerple and the convolution."""
    import torch
    import transformers

    from dape.evaluate import evaluate_by_length
    from dape.lab.environment import num_cores
    from dape.lab.figures import length_figure, save
    from dape.retrofitting.exchange import exchange_method
    from dape.retrofitting.tuning import Tuning
    from dape.training import LoopSettings, fit

    run = trained_run(Path(options.out), "rope", COMPARISON["steps"], options.seed)
    if run is None:
        console.print("the RoPE model was not trained: there is nothing to repair", style="red")
        return 1
    length, teacher, data = run.config.train_length, run.model(), run.data()
    lengths = [length * multiple for multiple in (1, 2, 4, 8, 16)]
    console.print(
        f"\n[bold]Repair[/]: the RoPE model breaks beyond its {length} tokens. Its positions are exchanged for Kerple "
        f"with the 1×3 convolution, and each attention layer learns what it gave before, for {REPAIR['steps']} steps: less than a minute.\n"
    )
    torch.manual_seed(options.seed)
    model = exchange_method(teacher, REPAIRED)
    task = Tuning(
        model,
        data.train.ids,
        train_length=2 * length,
        batch_size=8,
        seed=options.seed,
        teacher=teacher,
        teacher_length=length,
        match_steps=REPAIR["steps"],
    )
    settings = LoopSettings(**REPAIR, seed=options.seed, device="cpu")
    folder = Path(options.out) / "repair"
    torch.set_num_threads(num_cores())
    result = fit(task, settings, folder, progress=console.is_terminal)
    if result.stopped_early:
        raise KeyboardInterrupt
    evaluated = {
        name: evaluate_by_length(
            subject, data.validation, lengths, last=COMPARISON["last"], windows=COMPARISON["windows"]
        )
        for name, subject in (("rope", teacher), (f"rope → {REPAIRED}", model))
    }
    table = Table("perplexity at length", *map(str, lengths))
    for name, losses in evaluated.items():
        table.add_row(name, *[f"{loss.ppl:.2f}" for loss in losses], style="bold" if "→" in name else "")
    console.print(table)
    console.print(
        f"Repaired in {result.seconds:.0f} seconds of training, on text of {2 * length} tokens a window."
    )
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder / "model")
    drawn = {name: [(loss.eval_length, loss.ppl) for loss in losses] for name, losses in evaluated.items()}
    save(length_figure(drawn, "perplexity", unit=length), folder / "perplexity.svg")
    write_atomically(
        folder / "repair.json",
        json.dumps(
            {
                "method": REPAIRED,
                "steps": result.steps,
                "seconds": round(result.seconds, 1),
                "train_length": length,
                "losses": {name: [loss.record() for loss in losses] for name, losses in evaluated.items()},
            },
            indent=1,
        )
        + "\n",
    )
    console.print(f"figure   {folder / 'perplexity.svg'}", soft_wrap=True)
    return 0


def trained_run(folder: Path, method: str, steps: int, seed: int) -> Any:
    """The comparison's run of a method with these steps and seed; None if there is none."""
    from dape.training import load_run

    for path in sorted((folder / "runs").glob("*")):
        with contextlib.suppress(ValueError, OSError):
            run = load_run(path)
            if (run.config.method, run.config.steps, run.config.seed) == (method, steps, seed):
                return run
    return None


# Each part prints its own section and returns its exit code.
PARTS: tuple[Callable[[DemoOptions, Console], int], ...] = (recall, comparison, repair)
