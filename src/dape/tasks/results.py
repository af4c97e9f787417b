"""results.json of a folder of runs: one entry a run, one record a length, written whole after every run."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from dape.files import write_atomically

Result = dict[str, Any]


class Results:
    """What a folder holds so far."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "results.json"
        self.content: dict[str, Any] = {
            "commands": [],
            "environment": environment(),
            "runs": [],
            "records": [],
        }
        if self.path.exists():
            self.content = json.loads(self.path.read_text())

    @property
    def runs(self) -> list[Result]:
        return self.content["runs"]

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.content["records"]

    def has(self, name: str, settings: dict[str, Any]) -> bool:
        """Whether the run is done; one of that name with other settings is an error."""
        for done in self.runs:
            if done["name"] == name:
                for setting, (before, now) in difference(done["settings"], settings):
                    raise ValueError(
                        f'{self.path} has "{name}" with {setting} {before}, not {now}: use another --out'
                    )
                return True
        return False

    def add(self, result: Result) -> None:
        """Take in a run's result, `accuracy` of which becomes records, and save."""
        rows = result["accuracy"]
        self.runs.append({name: value for name, value in result.items() if name != "accuracy"})
        about = {name: result[name] for name in ("task", "method", "seed", "num_layers")}
        samples = result["settings"]["protocol"]["samples"]
        self.records.extend({**about, **row, "samples": samples, "run": result["name"]} for row in rows)
        self.save()

    def note_command(self, command: str) -> None:
        if command not in self.content["commands"]:
            self.content["commands"].append(command)

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.content, indent=1) + "\n")


def difference(before: Any, now: Any, path: str = "") -> list[tuple[str, tuple[Any, Any]]]:
    """Where two JSON values differ: dotted names and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            entry
            for name in {**before, **now}
            for entry in difference(before.get(name), now.get(name), f"{path}.{name}".lstrip("."))
        ]
    return [] if before == now else [(path, (before, now))]


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    import numpy as np
    import transformers

    import dape

    return {
        "dape": dape.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformers": transformers.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
