"""`dape demo`: what the convolution does, in four parts: recall, reading, training, retrofit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import dape
from dape.cli.parsing import parse
from dape.files import write_atomically
from dape.settings import setting

PLAIN, CONVOLVED = "kerple", "dape1x3-kerple"
# The recall part.
RECALL = {"nope": "plain attention", "dape1x3-nope": "with the 1×3 convolution"}
TRAIN_LENGTH = 24
TEST_LENGTHS = (12, 24, 48, 96)
# The shipped models, and how they are read.
MODELS = ("rope", PLAIN, CONVOLVED)
WINDOW = 128
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LAST, WINDOWS, FILES = 32, 24, 24
# The live training: small enough for two in a minute, each on a core of its own.
LIVE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 256, "num_heads": 4, "train_length": WINDOW, "batch_size": 16, "steps": 200,
    "warmup_steps": 20, "learning_rate": 2e-3, "log_every": 2, "checkpoint_every": 100,
}  # fmt: skip
REPAIR: dict[str, Any] = {
    "steps": 60, "control": True, "jobs": 2, "windows": 64, "last": LAST, "lengths": "128,256,512,1024", "device": "cpu",
}  # fmt: skip
# Training from scratch in place of the shipped models.
SCRATCH: dict[str, Any] = LIVE | {
    "num_layers": 4,
    "steps": 3000,
    "learning_rate": 1.5e-3,
    "warmup_steps": 100,
}
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class DemoOptions:
    """The idea in four parts: a one-layer model that recalls; shipped models that read source code they have never
    seen, at up to 32 times their training length; two models trained before your eyes; and the model that breaks,
    repaired. The same command continues what was interrupted."""

    quick: bool = setting(False, help="Only the first part, in seconds.")
    text: Path | None = setting(
        None, help="Folder of text or source code that the shipped models read, instead of held-out packages.",
        reads="folder",
    )  # fmt: skip
    train: bool = setting(
        False,
        help="Train the models of the second part from scratch instead of reading the shipped ones (hours).",
    )
    models: Path = setting(
        Path(dape.__file__).parents[2] / "models", help="Folder of the shipped models; a clone has it."
    )
    picture: Path | None = setting(
        None,
        help="Draw the recall part: scores, convolution, weights (svg, png or pdf); the accuracies go into a JSON file "
        "next to it.",
        writes="file",
    )
    steps: int = setting(120, help="Training steps of each model in the first part.", low=1, high=10**9)
    seed: int = setting(0, help="Seed of initial weights and data.", low=0, high=2**63 - 1)
    out: Path = setting(
        Path("runs/demo"), help="Folder of what is trained, and of the page.", writes="folder"
    )


@dataclass
class Page:
    """What the parts have found, for the page: a title, sentences, tables as (header, rows), and figures as SVG files."""

    parts: list[dict[str, Any]] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    options: DemoOptions = parse(DemoOptions, arguments, prog="dape demo")
    import transformers

    transformers.logging.disable_progress_bar()
    console = Console(highlight=False)
    start = time.monotonic()
    page = Page()
    for part in PARTS[:1] if options.quick else PARTS:
        part(options, console, page)
        console.print()
    if not options.quick:
        write_page(page, options.out / "index.html")
        minutes, seconds = divmod(round(time.monotonic() - start), 60)
        console.print(
            f"All of this in {minutes} min {seconds} s. The page: {options.out / 'index.html'}",
            soft_wrap=True,
        )
    return 0


def heading(console: Console, page: Page, title: str, text: str) -> dict[str, Any]:
    console.print(f"[bold]{title}[/]. {text}\n")
    page.parts.append({"title": title, "text": text, "sentences": [], "table": None, "figure": None})
    return page.parts[-1]


def say(console: Console, part: dict[str, Any], sentence: str) -> None:
    console.print(sentence, markup=False)
    part["sentences"].append(sentence)


# 1. Recall


def recall(options: DemoOptions, console: Console, page: Page) -> None:
    """Train and test associative recall with and without the convolution."""
    part = heading(
        console, page, "1. Recall", "8 keys with their values, then 8 keys: give the value of each. One layer, two heads, "
        f"no positions, trained for {options.steps} steps at length {TRAIN_LENGTH}.",
    )  # fmt: skip
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[loss]}"),
    )
    start = time.process_time()
    accuracy, models = {}, {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bars = {
            method: progress.add_task(title, total=options.steps, start=False, loss="")
            for method, title in RECALL.items()
        }
        for method, bar in bars.items():
            progress.start_task(bar)
            with one_thread():
                accuracy[method], models[method] = train_and_test(method, options, show_on(progress, bar))
            progress.update(bar, loss="")
    rows = [[title, *(f"{100 * accuracy[m][n]:.0f} %" for n in TEST_LENGTHS)] for m, title in RECALL.items()]
    rows.append(["guessing a value just shown", *(f"{100 * 3 / n:.0f} %" for n in TEST_LENGTHS)])
    show_table(console, part, ["accuracy at length", *map(str, TEST_LENGTHS)], rows, bold=1)
    say(console, part, verdict(accuracy))
    if options.picture is not None:
        draw(options, accuracy, models, time.process_time() - start)
        console.print(f"Picture: {options.picture}", soft_wrap=True)


def draw(
    options: DemoOptions, accuracy: dict[str, dict[int, float]], models: dict[str, Any], seconds: float
) -> None:
    from dape.inspection.idea import draw_idea
    from dape.lab.environment import environment
    from dape.tasks.recall import AssociativeRecall

    assert options.picture is not None
    draw_idea(models["dape1x3-nope"], AssociativeRecall(), options.picture, seed=options.seed)
    record = {
        "accuracy": {
            method: {n: round(share, 4) for n, share in shares.items()} for method, shares in accuracy.items()
        },
        "train_length": TRAIN_LENGTH,
        "steps": options.steps,
        "seed": options.seed,
        "cpu_seconds": round(seconds, 1),
        "environment": environment(1),
    }
    write_atomically(options.picture.with_suffix(".json"), json.dumps(record, indent=1) + "\n")


def train_and_test(
    method: str, options: DemoOptions, show: Callable[[dict[str, float]], None]
) -> tuple[dict[int, float], Any]:
    """Accuracy by length of a model trained from scratch, and the model."""
    from dape.lab.solving import GeneratedTask, accuracy_by_length, build_solver
    from dape.tasks import build_task
    from dape.training import LoopSettings, fit

    task = build_task("associative_recall")
    model = build_solver(task, method, num_layers=1, hidden_size=64, num_heads=2, seed=options.seed)
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
    """Summary of the accuracies."""
    longest = TEST_LENGTHS[-1]
    plain, convolved = (100 * accuracy[method][longest] for method in RECALL)
    if convolved > 90 and plain < 50:
        return (
            "Scores find the key that matches, but its value is the next token; the convolution moves the score there: "
            f"{convolved:.0f} % against {plain:.0f} % at {longest // TRAIN_LENGTH} times the training length."
        )
    return (
        f"At length {longest}: {plain:.0f} % without the convolution, {convolved:.0f} % with it. The difference is "
        "usually larger: try more --steps."
    )


# 2. Reading


def reading(options: DemoOptions, console: Console, page: Page) -> None:
    """Perplexity by length of the shipped models on text that they have not seen, and an example of what was copied."""
    import numpy as np

    from dape.evaluation import losses_by_length
    from dape.evaluation.statistics import perplexity

    read = (
        "source files of packages that they were not trained on"
        if options.text is None
        else str(options.text)
    )
    part = heading(
        console, page, "2. Reading", f"Three models of four million parameters, trained on windows of {WINDOW} tokens of "
        f"Python, read {read}: perplexity of the same {LAST} tokens after more and more input.",
    )  # fmt: skip
    folders = trained(options, console) if options.train else {name: options.models / name for name in MODELS}
    models = {name: load_model(folder) for name, folder in folders.items()}
    tokenizer = load_tokenizer(next(iter(folders.values())))
    tokens = held_out(tokenizer, options.text)
    losses = {}
    with Progress(
        TextColumn("{task.description:<16}"), BarColumn(), console=console, transient=True
    ) as progress:
        for name, model in models.items():
            bar = progress.add_task(name, total=sum(LENGTHS) * WINDOWS)

            def advance(length: int, count: int, bar: TaskID = bar) -> None:
                progress.advance(bar, length * count)

            losses[name] = losses_by_length(
                model, tokens, LENGTHS, last=LAST, windows=WINDOWS, progress=advance
            )
    ppl = {
        name: [perplexity(float(of.losses[n].mean(dtype=np.float64))) for n in LENGTHS]
        for name, of in losses.items()
    }
    rows = [[name, *(f"{value:.1f}" for value in values), sparkline(values)] for name, values in ppl.items()]
    show_table(console, part, ["perplexity at", *map(str, LENGTHS), ""], rows, bold=len(rows) - 1)
    part["figure"] = length_figure(ppl, options.out / "reading.svg")
    plain, convolved = ppl[PLAIN], ppl[CONVOLVED]
    moved = "falls" if convolved[-1] < convolved[0] else "rises"
    say(
        console, part, f"With the convolution it {moved} from {convolved[0]:.1f} to {convolved[-1]:.1f}; Kerple without "
        f"it goes from {plain[0]:.1f} to {plain[-1]:.1f}, RoPE from {ppl['rope'][0]:.1f} to {ppl['rope'][-1]:.1f}.",
    )  # fmt: skip
    for sentence in copied(tokenizer, tokens, losses):
        say(console, part, sentence)


def trained(options: DemoOptions, console: Console) -> dict[str, Path]:
    """Folders of the models after training from scratch."""
    runs = {name: options.out / "scratch" / name for name in MODELS}
    for pair in (MODELS[:2], MODELS[2:]):
        train_together({name: runs[name] for name in pair}, SCRATCH, options, console)
    return {name: folder / "model" for name, folder in runs.items()}


def load_model(folder: Path) -> Any:
    """A model in float32, ready to read."""
    import torch

    from dape.loading import load_causal_lm

    if not folder.is_dir():
        raise ValueError(
            f"there is no model in {folder}: the shipped models are in the repository's folder models/, not in the wheel; "
            "pass --models FOLDER, or --train to train them"
        )
    return load_causal_lm(folder, dtype=torch.float32).eval()


def load_tokenizer(folder: Path) -> Any:
    from dape.data import load_tokenizer

    return load_tokenizer(folder)


def held_out(tokenizer: Any, folder: Path | None) -> Any:
    """Tokens of files with room for the longest input: of the given folder, or of the packages held out of `python`."""
    import numpy as np

    from dape.data import Tokens, find_corpus
    from dape.data.python_corpus import HELD_OUT

    sources = find_corpus("python" if folder is None else str(folder), report=lambda problem: None).sources
    if folder is None:
        sources = [source for source in sources if source.name.split("/")[0] in HELD_OUT]
        # Some of each package, in the corpus's order.
        sources = sources[:: max(1, len(sources) // FILES)]
    documents = []
    for source in sources:
        text = "".join(chunk.text for chunk in source.read(lambda problem: None))
        ids = np.asarray(tokenizer.encode(text))
        if len(ids) > LENGTHS[-1]:
            documents.append(ids)
        if len(documents) == FILES:
            break
    if not documents:
        raise ValueError(f"no file of {folder} has the {LENGTHS[-1] + 1} tokens that the longest input needs")
    return Tokens.of(documents)


def copied(tokenizer: Any, tokens: Any, losses: dict[str, Any]) -> list[str]:
    """The piece of a word that longer input helped the convolution most with, and where the input had it before."""
    import numpy as np

    from dape.inspection.page import token_texts

    short, long = (losses[CONVOLVED].losses[n] for n in (LENGTHS[0], LENGTHS[-1]))
    for flat in np.argsort((long - short).ravel()):
        window, target = (int(i) for i in np.unravel_index(flat, short.shape))
        ids = losses[CONVOLVED].windows.ids(tokens, LENGTHS[-1], slice(window, window + 1))[0]
        at = len(ids) - LAST + target
        texts = token_texts(tokenizer.decode, ids.tolist())
        # Both halves of a name are legible: the token that is copied, and the one it follows.
        if not (texts[at].isalpha() and len(texts[at]) > 3 and texts[at - 1].strip().isidentifier()):
            continue
        earlier = [
            i
            for i in range(2, len(ids) - WINDOW - LAST)
            if (ids[i - 2 : i + 1] == ids[at - 2 : at + 1]).all()
        ]
        if earlier:
            break
    else:
        return []

    def around(place: int) -> str:
        before = "".join(texts[max(0, place - 12) : place]).split("\n")[-1].lstrip()
        return f"{before}«{texts[place]}»"

    def share(name: str, length: int) -> str:
        return f"{100 * float(np.exp(-losses[name].losses[length][window, target])):.0f} %"

    return [
        f"Copied, for example: the last token of  {around(at)}  stood {at - earlier[-1]:,} tokens before in  "
        f"{around(earlier[-1])}  Its probability with {LENGTHS[0]} and {LENGTHS[-1]} tokens of input: "
        f"{share(CONVOLVED, LENGTHS[0])} and {share(CONVOLVED, LENGTHS[-1])} with the convolution, "
        f"{share(PLAIN, LENGTHS[0])} and {share(PLAIN, LENGTHS[-1])} without."
    ]


def length_figure(ppl: dict[str, list[float]], path: Path) -> Path:
    """Perplexity by length, one line a model."""
    from matplotlib.figure import Figure

    from dape.files import replacing

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for name, values in ppl.items():
        axes.plot(LENGTHS, values, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=f"tokens of input (trained at {WINDOW})", ylabel="perplexity")
    axes.set_xticks(LENGTHS, map(str, LENGTHS))
    ticks = [
        t
        for t in (5, 10, 20, 50, 100, 200, 500, 1000)
        if min(map(min, ppl.values())) / 2 < t < 2 * max(map(max, ppl.values()))
    ]
    axes.set_yticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return path


def sparkline(values: list[float]) -> str:
    """The values as bars from a quarter below the first to a quarter above it; what leaves this range is cut off."""
    return "".join(BARS[min(7, max(0, round(3.5 + 14 * (value / values[0] - 1))))] for value in values)


# 3. Training


def training(options: DemoOptions, console: Console, page: Page) -> None:
    """Train two models side by side, and show both losses."""
    part = heading(
        console, page, "3. Training", f"The same two layers of width {LIVE['hidden_size']} without and with the "
        f"convolution, from scratch, {LIVE['steps']} steps of {LIVE['batch_size']} × {WINDOW} tokens of Python.",
    )  # fmt: skip
    runs = {name: options.out / "live" / name for name in (PLAIN, CONVOLVED)}
    curves = train_together(runs, LIVE, options, console)
    last = {name: sum(values[-20:]) / len(values[-20:]) for name, values in curves.items()}
    seconds = {name: seconds_of(folder) for name, folder in runs.items()}
    rows = [[name, f"{last[name]:.2f}", f"{seconds[name]:.0f} s", curve(curves[name])] for name in runs]
    show_table(console, part, ["method", "loss, last 40 steps", "time", "loss by step"], rows, bold=1)
    say(
        console, part, f"After {LIVE['steps']} steps the loss with the convolution is {last[CONVOLVED] - last[PLAIN]:+.2f} "
        "of that without; the gap grows with more steps.",
    )  # fmt: skip


def train_together(
    runs: dict[str, Path], settings: dict[str, Any], options: DemoOptions, console: Console
) -> dict[str, list[float]]:
    """Run `dape train` once a method, each in a process of its own, and return the losses by step."""
    data = prepared(options)
    chosen = [
        text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    threads = max(1, (os.cpu_count() or 1) // len(runs))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    processes = {}
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for name, folder in runs.items():
            command = [sys.executable, "-m", "dape", "train", "--method", name, "--data", str(data), *chosen]
            command += ["--seed", str(options.seed), "--device", "cpu", "--out", str(folder)]
            # A long message must not block the process, nor be lost.
            with open(options.out / f"{name}.log", "w") as log:
                processes[name] = subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=log
                )
        with Live(console=console, transient=True, refresh_per_second=4) as live:
            while any(process.poll() is None for process in processes.values()):
                live.update(progress_of(runs, int(settings["steps"])))
                time.sleep(0.25)
    finally:
        for process in processes.values():
            process.terminate()
    for name, process in processes.items():
        if process.wait():
            lines = (options.out / f"{name}.log").read_text().strip().splitlines()
            raise ValueError(f"training {name} failed: {lines[-1] if lines else 'no message'}")
    return {name: losses_of(folder) for name, folder in runs.items()}


def prepared(options: DemoOptions) -> Path:
    """Folder of the packed corpus, made once."""
    from dape.data import prepare

    tokenizer = str(options.models / CONVOLVED)
    folder = options.out / "data"
    prepare("python", folder, tokenizer="bpe:2048" if not Path(tokenizer).is_dir() else tokenizer)
    return folder


def records_of(folder: Path) -> list[dict[str, float]]:
    from dape.training.display import read_metrics

    return read_metrics(folder / "metrics.jsonl")


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in records_of(folder) if "loss" in record]


def seconds_of(folder: Path) -> float:
    return float(records_of(folder)[-1]["seconds"])


def progress_of(runs: dict[str, Path], steps: int) -> Group:
    """One line a run: a bar, the loss, and its curve; then the difference."""
    lines, latest = [], {}
    for name, folder in runs.items():
        records = records_of(folder)
        done = records[-1]["step"] if records else 0
        values = [record["loss"] for record in records if "loss" in record]
        latest[name] = values
        full = round(20 * done / steps)
        loss = f"loss {values[-1]:.2f}" if values else "starting"
        lines.append(
            Text(f"{name:<16}{'━' * full}{'╌' * (20 - full)} {done:>4}/{steps}  {loss}  {curve(values)}")
        )
    counts = [len(values) for values in latest.values()]
    if len(latest) == 2 and min(counts) > 5:
        n = min(counts)
        first, second = (sum(values[n - 5 : n]) / 5 for values in latest.values())
        lines.append(Text(f"at the same step: {second - first:+.2f} with the convolution", style="bold"))
    return Group(*lines)


def curve(losses: list[float], width: int = 20) -> str:
    """The losses as bars from 2 to 7.5 nats."""
    if not losses:
        return ""
    step = max(1, len(losses) // width)
    means = [sum(losses[i : i + step]) / len(losses[i : i + step]) for i in range(0, len(losses), step)][
        :width
    ]
    return "".join(BARS[min(7, max(0, int((loss - 2) / 5.5 * 8)))] for loss in means)


# 4. Retrofit


def repair(options: DemoOptions, console: Console, page: Page) -> None:
    """Exchange the method of the RoPE model, train it on for a minute, and compare with the base trained on as long."""
    from dape.data import open_data
    from dape.retrofitting.adapt import adapt

    part = heading(
        console, page, "4. Retrofit", "The RoPE model breaks beyond its window. Its rotation is stretched eight times, the "
        f"convolution added, and both trained for {REPAIR['steps']} steps; so is the model as it was, in its own window.",
    )  # fmt: skip
    folder = options.out / "scratch" / "rope" / "model" if options.train else options.models / "rope"
    with console.status("training both, and measuring"):
        report = adapt(
            load_model(folder),
            texts=open_data(prepared(options)),
            tokenizer=str(folder),
            window=WINDOW,
            out=options.out / "retrofit",
            **REPAIR,
            seed=options.seed,
        ).report
    rows = [[label, *cells] for label, cells in report.rows()]
    bold = [label for label, _ in report.rows()].index(report.retrofits[-1])
    show_table(console, part, ["perplexity at", *map(str, report.lengths)], rows, bold=bold)
    for sentence in report.sentences():
        say(console, part, sentence)
    part["figure"] = options.out / "retrofit" / "perplexity.svg"


def show_table(
    console: Console, part: dict[str, Any], header: list[str], rows: list[list[str]], *, bold: int
) -> None:
    """Print a table and keep it for the page; bold: the row that stands out."""
    table = Table(*header, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number == bold else "")
    console.print(table)
    part["table"] = (header, rows)


def write_page(page: Page, path: Path) -> None:
    """The parts as one file: tables, sentences, figures."""
    import base64

    from dape.pages import environment

    for part in page.parts:
        figure = part["figure"]
        part["image"] = base64.b64encode(Path(figure).read_bytes()).decode() if figure is not None else None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, environment("dape.cli").get_template("demo.html.j2").render(parts=page.parts))


# Each part prints its own section.
PARTS: tuple[Callable[[DemoOptions, Console, Page], None], ...] = (recall, reading, training, repair)
