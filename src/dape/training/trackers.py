"""Experiment trackers, each imported only if `--track` names it: TensorBoard, Weights & Biases, Trackio, MLflow, your own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from dape.errors import sentence
from dape.files import write_atomically
from dape.settings import split_names
from dape.training.config import LoopSettings


class Tracker(Protocol):
    """Destination of a run's metrics. `--track module:Class` calls Class(folder=…, project=…, config=…).

    folder:  of the run; its name identifies the run, so that a resumed one continues the same curves.
    project: that runs are grouped by.
    config:  the run's settings as plain JSON values.
    """

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```")

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        import wandb

        name = folder.name
        self.run: Any = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(folder), config=config
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio(WeightsAndBiases):
    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        import trackio

        self.run: Any = trackio.init(project=project, name=folder.name, config=config, resume="allow")


class MLflow:
    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        experiment = mlflow.set_experiment(project).experiment_id
        known = folder / "mlflow_run_id"
        if known.exists():
            mlflow.start_run(run_id=known.read_text("utf-8"), nested=True)
        else:
            run = mlflow.start_run(experiment_id=experiment, run_name=folder.name, nested=True)
            mlflow.log_params(config)
            write_atomically(known, run.info.run_id)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(metrics, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


# A tracker's class, the module that it needs, and the package that has it.
TRACKERS: dict[str, tuple[Callable[..., Tracker], str, str]] = {
    "tensorboard": (TensorBoard, "torch.utils.tensorboard", "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb", "wandb"),
    "trackio": (Trackio, "trackio", "trackio"),
    "mlflow": (MLflow, "mlflow", "mlflow"),
}


class Trackers:
    """The trackers that the settings name; raises a sentence if one does not open.

    One that fails later is dropped with a message: metrics.jsonl has everything, training goes on.
    """

    def __init__(self, settings: LoopSettings, folder: Path, say: Callable[[str], None] = print) -> None:
        config = json.loads(json.dumps(asdict(settings), default=str))
        self.opened: dict[str, Tracker] = {}
        self.say = say
        for name, build in find_trackers(settings.track).items():
            try:
                self.opened[name] = build(folder=folder, project=settings.track_project, config=config)
            except Exception as error:
                raise ValueError(f"--track {name}: {sentence(error)}") from error

    def log(self, records: Iterable[Mapping[str, float]]) -> None:
        for record in records:
            metrics = {name: value for name, value in record.items() if name != "step"}
            for name, tracker in list(self.opened.items()):
                try:
                    tracker.log(metrics, step=int(record["step"]))
                except Exception as error:
                    del self.opened[name]
                    self.say(f"--track {name} stopped at step {record['step']}: {sentence(error)}")

    def close(self) -> None:
        for name, tracker in self.opened.items():
            try:
                tracker.close()
            except Exception as error:
                self.say(f"--track {name}: {sentence(error)}")


def find_trackers(names: str | None) -> dict[str, Callable[..., Tracker]]:
    """Classes of the trackers, by name; raises if a package is missing."""
    return {name: find_tracker(name) for name in split_names(names or "")}


def find_tracker(name: str) -> Callable[..., Tracker]:
    if name in TRACKERS:
        built_in, module, package = TRACKERS[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"--track {name} needs the package {package}: pip install {package}") from error
        return built_in
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"--track {name}: choose among {', '.join(TRACKERS)}, or name a class as module:Class"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--track {name}: {sentence(error)}; --import FILE loads a file of yours") from error
