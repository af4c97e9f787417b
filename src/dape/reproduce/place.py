"""Where a reproduction happens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dape.compare.environment import threads_of
from dape.reproduce.corpora import NamedCorpus
from dape.reproduce.experiment import Experiment
from dape.reproduce.results import results_path


@dataclass(frozen=True)
class Place:
    """The papers' folder, the scale, the folder of runs at that scale, that of texts, and how much at a time."""

    papers: Path
    scale: str
    work: Path
    corpora: dict[str, NamedCorpus]
    texts: Path | None = None
    jobs: int = 1

    @property
    def scores(self) -> Path:
        """What every training was evaluated to: small files, kept with the results, so that nobody else need train
        it again; those of the smoke scale, which say nothing, stay with the runs."""
        return self.work / "scores" if self.scale == "smoke" else self.papers / "scores" / self.scale

    @property
    def threads(self) -> int:
        """Of each job."""
        return threads_of(self.jobs)

    def results(self, experiment: Experiment) -> Path:
        return results_path(experiment, self.scale, self.work)
