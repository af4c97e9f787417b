"""Experiments: lists of runs at three scales, made in Python, and how they are executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dape.evaluation.table import make_table, read_table
from dape.lab.experiment import Announce, Outcome, run_experiment, silent
from dape.lab.runs import Evaluation, Job, Run
from dape.training import TrainConfig
from papers.texts import LIBRARY, TEXTS

HERE = Path(__file__).parent
SMOKE, LAPTOP, PAPER = "smoke", "laptop", "paper"


@dataclass(frozen=True)
class Scale:
    """What the experiments of a scale share; `with_` changes some of it for one experiment.

    corpora, trains, seeds: the grid. lengths: of evaluation, or multiples of the training length.
    windows, last, longest: number of evaluation windows, scored tokens of each, input for which all have room.
    """

    name: str
    corpora: tuple[str, ...]
    trains: tuple[int, ...]
    train: dict[str, Any]
    windows: int
    last: int
    longest: int
    seeds: tuple[int, ...] = (0,)
    lengths: tuple[int, ...] = ()
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    tokens: int = 0

    def with_(self, *, train: dict[str, Any] | None = None, **changes: Any) -> Scale:
        return replace(self, train={**self.train, **(train or {})}, **changes)

    def __call__(
        self, *methods: str, label: str = "{}", evaluation: dict[str, Any] | None = None, **changes: Any
    ) -> list[Run]:
        """Runs of the methods: seed by seed, then by training length and corpus; `label` names a variant.

        changes: fields of the scale (seeds, corpora, trains …) or of TrainConfig.
        """
        own = {name: changes.pop(name) for name in list(changes) if name in Scale.__dataclass_fields__}
        s = self.with_(train=changes, **own)
        return [
            s.run(method, corpus, length, seed, label, evaluation or {})
            for seed in s.seeds for length in s.trains for corpus in s.corpora for method in methods
        ]  # fmt: skip

    def run(
        self, method: str, corpus: str, length: int, seed: int, label: str, evaluation: dict[str, Any]
    ) -> Run:
        train = {**self.train, **({"batch_size": max(1, self.tokens // length)} if self.tokens else {})}
        text = {"corpus": LIBRARY, "validation": "decoder,scanner"}
        if corpus in TEXTS:
            text = {"corpus": corpus, "validation": TEXTS[corpus].validation}
        return Run(
            TrainConfig(method=method, train_length=length, seed=seed, **text, **train),
            lengths=self.lengths or tuple(n * length for n in self.multiples),
            evaluation=Evaluation(last=self.last, windows=self.windows, longest=self.longest, **evaluation),
            corpus=corpus,
            label="" if label == "{}" else label.format(method),
        )


SCALES = {
    SMOKE: Scale(
        SMOKE, ("library",), (16,), windows=8, last=8, longest=256, multiples=(1, 4),
        train={"num_layers": 1, "hidden_size": 16, "num_heads": 2, "score_width": 4, "tokenizer": "bytes",
               "batch_size": 2, "steps": 3, "warmup_steps": 1},
    ),
    # The last 64 tokens are scored, all of the shortest window: there "1x" has no context.
    LAPTOP: Scale(
        LAPTOP, ("latex",), (128, 64), windows=128, last=64, longest=8192,
        train={"num_layers": 2, "hidden_size": 256, "num_heads": 4, "tokenizer": "bpe:2048", "batch_size": 16, "steps": 500,
               "warmup_steps": 40, "learning_rate": 2e-3, "final_learning_rate": 1e-4, "checkpoint_every": 200,
               "keep_checkpoints": 1},
    ),
    # The paper's configurations (Appendix G). It scores the last 256 tokens, other ones at every length; here the last 128
    # are scored, the same at every length, the shortest, 128, included.
    PAPER: Scale(
        PAPER, ("arxiv",), (128, 512), windows=640, last=128, longest=8192, lengths=(128, 256, 512, 1024, 2048, 4096, 8192),
        train={"preset": "125m", "tokenizer": "gpt2", "batch_size": 256, "steps": 50000, "warmup_steps": 500,
               "learning_rate": 6e-4, "final_learning_rate": 6e-5, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0,
               "precision": "fp16", "distributed": "ddp", "checkpoint_every": 1000},
    ),
}  # fmt: skip
# The setting of the headline: 256 x 8 tokens a step, 3,900 steps: 8.0 million tokens, 1.1 epochs of LaTeX, 2.8 of books.
LONG = SCALES[LAPTOP].with_(
    corpora=("latex13",), trains=(256,), seeds=(0, 1, 2), lengths=(128, 256, 512, 1024, 2048, 4096, 8192), windows=256,
    train={"batch_size": 8, "steps": 3900, "warmup_steps": 100},
)  # fmt: skip
BOTH = {LAPTOP: ("latex", "books"), PAPER: ("arxiv", "books3"), SMOKE: ("library",)}


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper: where it stands, what it shows, and its runs at a scale.

    source: section and figure. shows: one sentence. metric: what the figure draws.
    """

    name: str
    source: str
    title: str
    shows: str
    runs: Callable[[Scale], Sequence[Job]]
    metric: str = "loss"

    def at(self, scale: str) -> list[Job]:
        return list(self.runs(SCALES[scale]))

    def results(self, paper: str, scale: str, work: Path) -> Path:
        """Table of the results: those of the smoke scale are no evidence and stay with the runs."""
        if scale == SMOKE:
            return work / "results" / f"{self.name}.csv.gz"
        return HERE / paper / "results" / f"{self.name}{'' if scale == LAPTOP else '-paper'}.csv.gz"

    def run(
        self,
        paper: str,
        scale: str,
        work: Path,
        texts: Path | None,
        *,
        announce: Announce = silent,
        **options: Any,
    ) -> Outcome:
        """Train and evaluate what is missing; rows are saved after every run."""
        results = self.results(paper, scale, work)
        table = read_table(results) if results.exists() else make_table()
        jobs = [located(job, texts, work) if job.missing(table) else job for job in self.at(scale)]
        options |= {"results": results, "announce": announce, "title": self.title}
        return run_experiment(jobs, work, in_process=scale == SMOKE, **options)


def located(job: Job, texts: Path | None, work: Path) -> Job:
    """The run with the path of its text in place of its name."""
    if not isinstance(job, Run) or job.corpus not in TEXTS:
        return job
    path = TEXTS[job.corpus].locate(texts, work / "texts", job.corpus)
    return replace(job, config=replace(job.config, corpus=path))
