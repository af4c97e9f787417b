"""Common parts of the benchmarks of training steps: options, the table's title, and the fields of a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dape.bench import report
from dape.bench.attention import CLOCK_HELP, DTYPES, hardware
from dape.bench.timing import check_clock
from dape.devices import device_name
from dape.models import DapeConfig, preset
from dape.settings import setting

BASELINE = "kerple"
METHODS_HELP = f"Methods, separated by commas; {BASELINE} is always included."


@dataclass(frozen=True)
class StepOptions:
    """Options of model, batch, device and timing."""

    preset: str = setting("tiny", help="tiny, 125m, 350m, 2.7b or 6.7b.")
    num_layers: int | None = setting(None, help="Layers. Default: the preset's.", low=1, high=10_000)
    hidden_size: int | None = setting(None, help="Width. Default: the preset's.", low=1, high=2**20)
    methods: str = setting(f"{BASELINE},dape1x3-kerple", help=METHODS_HELP, listed=str)
    length: int = setting(64, help="Tokens of an input.", low=1, high=2**24)
    batch: int = setting(16, help="Batch size.", low=1, high=2**20)
    backend: str = setting("auto", help="Backend of the attention op.")
    device: str = setting("cpu", help="Device: cpu, or a GPU such as cuda or cuda:1.", test=device_name)
    dtype: str = setting("fp32", help="Dtype of the autocast: fp32 (none), fp16 or bf16.")
    threads: int = setting(0, help="Threads of PyTorch; 0 for its default.", low=0, high=4096)
    rounds: int = setting(9, help="Rounds; the median is reported.", low=1, high=10**6)
    clock: str = setting("wall", help=CLOCK_HELP)
    json: Path | None = setting(None, help="Write one record per method.", writes="file")

    def prepare(self) -> None:
        """Set the number of threads; raise for a clock that there is not."""
        check_clock(self.clock)
        if self.threads:
            torch.set_num_threads(self.threads)

    def config(self, method: str, **changes: Any) -> DapeConfig:
        """The model's configuration for a method."""
        sizes = {"num_hidden_layers": self.num_layers, "hidden_size": self.hidden_size}
        changes |= {name: size for name, size in sizes.items() if size is not None}
        return preset(self.preset, method, backend=self.backend, **changes)

    def record(self) -> report.Record:
        """Fields of every record about the model and the machine."""
        config = self.config(BASELINE)
        return {
            "preset": self.preset,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "length": self.length,
            "batch": self.batch,
            "backend": self.backend,
            "device": self.device,
            "hardware": hardware(self.device),
            "dtype": str(DTYPES[self.dtype]),
            "threads": torch.get_num_threads(),
            "clock": self.clock,
            "torch": torch.__version__,
        }


def print_records(
    options: StepOptions, records: Sequence[report.Record], columns: Sequence[report.Column]
) -> None:
    """Print the table and write the file."""
    config = options.config(BASELINE)
    title = f"{config.num_hidden_layers} × {config.hidden_size}, batch {options.batch} × {options.length} tokens, "
    title += f"{options.dtype}, {hardware(options.device)}"
    report.print_table(title, columns, records)
    if options.json is not None:
        report.write_json(options.json, records)
