"""TensorBoard and Weights & Biases, imported only when asked for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from dape.training.metrics import Record
from dape.training.settings import LoopSettings


class Tracker(Protocol):
    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_trackers(settings: LoopSettings, folder: Path) -> list[Tracker]:
    trackers: list[Tracker] = []
    if settings.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard"))
    if settings.wandb:
        trackers.append(WeightsAndBiases(settings, folder))
    return trackers


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("--tensorboard needs tensorboard: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(record["step"]))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, settings: LoopSettings, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("--wandb needs wandb: pip install wandb") from error
        # The name of the folder identifies the run, so that a resumed one goes on in the same chart.
        try:
            self._run: Any = wandb.init(
                project=settings.wandb,
                name=folder.name,
                id=folder.name,
                resume="allow",
                dir=str(folder),
                config=asdict(settings),
            )
        except wandb.Error as error:
            raise ValueError(f"--wandb {settings.wandb}: {' '.join(str(error).split())}") from error

    def log(self, record: Record) -> None:
        self._run.log(
            {name: value for name, value in record.items() if name != "step"}, step=int(record["step"])
        )

    def close(self) -> None:
        self._run.finish()
