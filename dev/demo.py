"""`make demo`, or `python -m dev.demo --quick`: what the convolution does, in four parts: recall, reading, training, retrofit."""

from __future__ import annotations

import base64
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dape.cli.parsing import parse
from dape.files import write_atomically
from dape.settings import COUNT, SEED, setting

if TYPE_CHECKING:
    import pandas as pd

    from dape.data import Tokens
    from dape.lab.runs import Job, Run
    from dape.lab.tables import Table

PLAIN, CONVOLVED = "kerple", "dape1x3-kerple"
RECALL = {"nope": "plain attention", "dape1x3-nope": "with the 1×3 convolution"}
# The shipped models, and how they are read.
MODELS = ("rope", PLAIN, CONVOLVED)
WINDOW = 128
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LAST, WINDOWS = 32, 24
# Small enough for two in a minute, each on a core of its own.
LIVE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 256, "num_heads": 4, "train_length": WINDOW, "batch_size": 16, "steps": 200,
    "warmup_steps": 20, "learning_rate": 2e-3, "log_every": 2, "checkpoint_every": 100,
}  # fmt: skip
LIVE_LENGTHS = (128, 1024)
# As the shipped models were trained.
SCRATCH = LIVE | {"num_layers": 4, "steps": 3000, "warmup_steps": 100, "learning_rate": 1.5e-3}
REPAIR: dict[str, Any] = {
    "steps": 60, "control": True, "jobs": 2, "windows": 64, "last": LAST, "lengths": "128,256,512,1024", "device": "cpu",
}  # fmt: skip


@dataclass(frozen=True)
class DemoOptions:
    """The idea in four parts: a one-layer model that recalls; shipped models that read source code they have never
    seen, up to 32 times their training length; two models trained while you watch; and the model that breaks,
    repaired. The same command resumes an interrupted demo."""

    quick: bool = setting(False, help="Only the first part, in seconds.")
    text: Path | None = setting(
        None, help="Folder of text or source code for the shipped models to read, instead of held-out packages.",
        reads="folder",
    )  # fmt: skip
    train: bool = setting(
        False,
        help="Train the models of the second part from scratch, for hours, in place of the shipped ones.",
    )
    models: Path = setting(
        Path(__file__).parents[1] / "models", help="Folder of the shipped models.", reads="folder"
    )
    steps: int = setting(120, help="Training steps of each model in the first part.", **COUNT)
    seed: int = setting(0, help="Seed of initial weights and data.", **SEED)
    out: Path = setting(Path("runs/demo"), help="Folder of the trained models and the page.", writes="folder")


@dataclass
class Part:
    """A part of the demo, printed as it comes and kept for the page."""

    console: Console
    title: str
    text: str
    table: Table | None = None
    figure: Path | None = None
    sentences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.console.print(f"[bold]{self.title}[/]. {self.text}\n")

    def show(
        self, corner: str, heads: Sequence[object], rows: Mapping[str, Sequence[str]], best: str
    ) -> None:
        from dape.lab.tables import Cell, Row, Table

        lines = [Row(name, tuple(map(Cell, cells)), best=name == best) for name, cells in rows.items()]
        self.table = Table("", tuple(map(str, heads)), tuple(lines), corner)
        self.console.print(self.table.rich())

    def say(self, sentence: str) -> None:
        self.console.print(sentence, markup=False)
        self.sentences.append(sentence)

    @property
    def image(self) -> str:
        return base64.b64encode(self.figure.read_bytes()).decode() if self.figure else ""


def main(arguments: list[str]) -> int:
    options: DemoOptions = parse(DemoOptions, arguments, prog="python -m dev.demo")
    import transformers

    from dape.pages import environment

    transformers.logging.disable_progress_bar()
    console, start, parts = Console(highlight=False), time.monotonic(), []
    for part in PARTS[:1] if options.quick else PARTS:
        parts.append(part(options, console))
        console.print()
    if not options.quick:
        page = options.out / "index.html"
        write_atomically(page, environment("dev").get_template("demo.html.j2").render(parts=parts))
        minutes, seconds = divmod(round(time.monotonic() - start), 60)
        console.print(f"All of this took {minutes} min {seconds} s. The page: {page}", soft_wrap=True)
    return 0


def run_all(jobs: Sequence[Job], folder: Path, console: Console, *, at_once: int = 1) -> pd.DataFrame:
    """Table of the runs, with their progress on the terminal."""
    from dape.lab.display import display
    from dape.lab.experiment import run_experiment

    with display(console, lines=False) as announce:
        outcome = run_experiment(jobs, folder, jobs=at_once, in_process=at_once == 1, announce=announce)
    for job, reason in outcome.failures:
        raise ValueError(f"{job.title}: {reason}")
    return outcome.table


def recall(options: DemoOptions, console: Console) -> Part:
    """Train and test associative recall with and without the convolution."""
    from dape.evaluation.table import means
    from dape.lab.tasks import TaskRun
    from dape.tasks import build_task

    task = build_task("associative_recall")
    protocol = replace(task.protocol, steps=options.steps)
    [trained] = protocol.train_lengths
    part = Part(
        console, "1. Recall", "8 keys with their values, then 8 keys: give the value of each. One layer, two heads, "
        f"no positions, trained for {options.steps} steps at length {trained}.",
    )  # fmt: skip
    runs = [TaskRun(name, options.seed, task.name, protocol, label=title) for name, title in RECALL.items()]
    accuracy = 100 * means(run_all(runs, options.out / "recall", console), "accuracy")
    rows = {str(title): [f"{share:.0f} %" for share in shares] for title, shares in accuracy.iterrows()}
    rows["guessing a value just shown"] = [f"{300 / n:.0f} %" for n in accuracy]
    part.show("accuracy at length", list(accuracy), rows, RECALL["dape1x3-nope"])
    plain, convolved = accuracy.iloc[:, -1]
    longest = accuracy.columns[-1]
    if convolved > 90 and plain < 50:
        part.say(
            "Scores find the key that matches, but its value is the next token; the convolution moves the score there: "
            f"{convolved:.0f} % against {plain:.0f} % at {longest / trained:g} times the training length."
        )
    else:
        part.say(
            f"At length {longest}: {plain:.0f} % without the convolution, {convolved:.0f} % with it. The difference is "
            "usually larger: try more --steps."
        )
    return part


def read_on(options: DemoOptions, console: Console) -> Part:
    """Perplexity by length of the shipped models on text that they have not seen, and a word that was recalled."""
    from dape.data import load_tokenizer
    from dape.evaluation import losses_by_length
    from dape.evaluation.statistics import perplexity
    from dape.lab.figures import length_figure, save
    from dev.recalled import recalled_word

    text = options.text or "source files of packages that they were not trained on"
    part = Part(
        console, "2. Reading", f"Three models of four million parameters, trained on windows of {WINDOW} tokens of "
        f"Python, read {text}: perplexity of the same {LAST} tokens after more and more input.",
    )  # fmt: skip
    folders = from_scratch(options, console) if options.train else {m: options.models / m for m in MODELS}
    models = {name: shipped_model(folder) for name, folder in folders.items()}
    tokenizer = load_tokenizer(options.models / CONVOLVED)
    tokens, losses = held_out(options), {}
    for name, model in models.items():
        with console.status(f"{name} is reading"):
            losses[name] = losses_by_length(model, tokens, LENGTHS, last=LAST, windows=WINDOWS)
    ppl = {name: [perplexity(of.at(n).value) for n in LENGTHS] for name, of in losses.items()}
    part.show("perplexity at", LENGTHS, {n: [f"{x:.1f}" for x in row] for n, row in ppl.items()}, CONVOLVED)
    series = {name: list(zip(LENGTHS, values, strict=True)) for name, values in ppl.items()}
    part.figure = save(length_figure(series, "perplexity", unit=WINDOW), options.out / "reading.svg")
    trail = {name: f"from {row[0]:.1f} to {row[-1]:.1f}" for name, row in ppl.items()}
    part.say(
        f"From {LENGTHS[0]} to {LENGTHS[-1]:,} tokens of input, perplexity goes {trail[CONVOLVED]} with the convolution, "
        f"{trail[PLAIN]} with Kerple alone, {trail['rope']} with RoPE."
    )
    if found := recalled_word(tokenizer.decode, tokens, losses, CONVOLVED):
        (low, high), (other_low, other_high) = found.probability[CONVOLVED], found.probability[PLAIN]
        part.say(
            f"An example: the word {found.word} in the line  {found.line} …  The file used it last {found.distance:,} tokens "
            f"earlier, within {LENGTHS[-1]:,} tokens of input and not within {LENGTHS[0]}. After {found.beginning}, the rest of "
            f"the word has a probability of {100 * low:.0f} % with {LENGTHS[0]} tokens and {100 * high:.0f} % with "
            f"{LENGTHS[-1]:,}; without the convolution, {100 * other_low:.0f} % and {100 * other_high:.0f} %."
        )
    return part


def shipped_model(folder: Path) -> Any:
    """A shipped model in float32."""
    import torch

    from dape.loading import load_causal_lm

    if not folder.is_dir():
        raise ValueError(
            f"there is no model in {folder}: the shipped models are in the repository's folder models/: pass --models FOLDER"
        )
    return load_causal_lm(folder, dtype=torch.float32).eval()


def held_out(options: DemoOptions) -> Tokens:
    """Tokens of the given folder, or of the packages held out of `python`."""
    from dape.data import open_data, prepare

    if options.text is None:
        return open_data(packed(options)).validation
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = str(options.models / CONVOLVED)
        data = prepare(
            str(options.text), Path(folder) / "data", tokenizer=tokenizer, validation=1.0, skip_bad=True
        )
        return replace(
            data.validation, ids=data.validation.ids.copy(), documents=data.validation.documents.copy()
        )


def packed(options: DemoOptions) -> Path:
    """Folder of the packed corpus, made once."""
    from dape.data import prepare

    folder = options.out / "data"
    prepare("python", folder, tokenizer=str(options.models / CONVOLVED))
    return folder


def runs_on_python(
    options: DemoOptions, methods: Sequence[str], settings: Mapping[str, Any], lengths: tuple[int, ...]
) -> list[Run]:
    """Runs of the methods on the packed corpus."""
    from dape.lab.runs import Evaluation, Run
    from dape.training import TrainConfig

    data, how = str(packed(options)), Evaluation(last=LAST, windows=WINDOWS)
    return [
        Run(TrainConfig(method=name, data=data, seed=options.seed, device="cpu", **settings), lengths, how, corpus="python")
        for name in methods
    ]  # fmt: skip


def from_scratch(options: DemoOptions, console: Console) -> dict[str, Path]:
    """Folders of the models of the second part, after their training."""
    runs, folder = runs_on_python(options, MODELS, SCRATCH, (WINDOW,)), options.out / "scratch"
    run_all(runs, folder, console, at_once=2)
    return {name: folder / "runs" / run.training / "model" for name, run in zip(MODELS, runs, strict=True)}


def training(options: DemoOptions, console: Console) -> Part:
    """Train two models side by side, and read on beyond their training length."""
    from dape.evaluation.table import perplexities

    part = Part(
        console, "3. Training", f"Two layers of width {LIVE['hidden_size']} without and with the convolution, "
        f"trained from scratch side by side, {LIVE['steps']} steps of {LIVE['batch_size']} × {WINDOW} tokens of Python.",
    )  # fmt: skip
    runs = runs_on_python(options, (PLAIN, CONVOLVED), LIVE, LIVE_LENGTHS)
    table = run_all(runs, options.out / "training", console, at_once=2)
    numbers = table[table["document"] < 0].pivot(index="method", columns="metric", values="sum")
    ppl = perplexities(table)
    rows = {
        name: [f"{numbers.train_loss[name]:.2f}", f"{numbers.train_seconds[name]:.0f} s", *(f"{x:.0f}" for x in ppl.loc[name])]
        for name in (PLAIN, CONVOLVED)
    }  # fmt: skip
    heads = ["training loss", "time", *(f"perplexity at {n}" for n in LIVE_LENGTHS)]
    part.show("method", heads, rows, CONVOLVED)
    change = numbers.train_loss[CONVOLVED] - numbers.train_loss[PLAIN]
    part.say(
        f"After {LIVE['steps']} steps the training loss is {abs(change):.2f} nats {'lower' if change < 0 else 'higher'} with "
        "the convolution. The gap widens with more steps."
    )
    return part


def repair(options: DemoOptions, console: Console) -> Part:
    """Exchange the method of the RoPE model, train it on for a minute, and compare with the base trained on as long."""
    from dape.data import open_data
    from dape.retrofitting.adapt import adapt

    part = Part(
        console, "4. Retrofit", "The RoPE model breaks beyond its window. Its rotation is stretched eight times, the "
        f"convolution added, and both trained for {REPAIR['steps']} steps; so is the model as it was, in its own window.",
    )  # fmt: skip
    folder = options.models / "rope"
    with console.status("training both, and measuring"):
        report = adapt(
            shipped_model(folder),
            texts=open_data(packed(options)),
            tokenizer=str(folder),
            window=WINDOW,
            out=options.out / "retrofit",
            **REPAIR,
            seed=options.seed,
        ).report
    part.show("perplexity at", report.lengths, dict(report.rows()), report.retrofits[-1])
    for sentence in report.sentences():
        part.say(sentence)
    part.figure = options.out / "retrofit" / "perplexity.svg"
    return part


PARTS: tuple[Callable[[DemoOptions, Console], Part], ...] = (recall, read_on, training, repair)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"demo: {error}")
