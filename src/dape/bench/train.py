"""`dape bench train`: a training step of a model by method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dape.bench.attention import CLOCK, CLOCK_HELP, DTYPE, DTYPES, hardware
from dape.bench.report import Record
from dape.bench.timing import interleave
from dape.devices import device_name, find_device
from dape.settings import TOKENS, setting
from dape.training import initialise
from dape.training.loop import move
from dape.training.parallel import autocast

if TYPE_CHECKING:
    from dape.models import DapeConfig
    from dape.training.run import LanguageModelling

BASELINE = "kerple"
COLUMNS = (
    ("method", "method", ""),
    ("ms", "milliseconds", ".1f"),
    ("± (IQR)", "spread", ".1f"),
    ("× kerple", "ratio_to_kerple", ".4f"),
    ("tokens a second", "tokens_per_second", ",.0f"),
)


@dataclass(frozen=True)
class StepOptions:
    """Options of model, batch, device and timing."""

    preset: str = setting("tiny", help="tiny, 125m, 350m, 2.7b or 6.7b.")
    num_layers: int | None = setting(None, help="Layers. Default: the preset's.", low=1, high=10_000)
    hidden_size: int | None = setting(None, help="Width. Default: the preset's.", low=1, high=2**20)
    methods: str = setting(f"{BASELINE},dape1x3-kerple", help="Methods, separated by commas.", listed=str)
    length: int = setting(64, help="Tokens of an input.", **TOKENS)
    batch: int = setting(16, help="Batch size.", low=1, high=2**20)
    backend: str = setting("auto", help="Backend of the attention op.")
    device: str = setting("cpu", help="Device: cpu, or a GPU such as cuda or cuda:1.", test=device_name)
    dtype: DTYPE = setting("fp32", help="Dtype of the autocast; fp32 for none.")
    threads: int = setting(0, help="Threads of PyTorch; 0 for its default.", low=0, high=4096)
    rounds: int = setting(9, help="Rounds; the median is reported.", low=1, high=10**6)
    clock: CLOCK = setting("wall", help=CLOCK_HELP)
    json: Path | None = setting(None, help="Write one record per method.", writes="file")

    @property
    def title(self) -> str:
        config = self.config(BASELINE)
        sizes = (
            f"{config.num_hidden_layers} × {config.hidden_size}, batch {self.batch} × {self.length} tokens"
        )
        return f"{sizes}, {self.dtype}, {hardware(self.device)}"

    def prepare(self) -> torch.device:
        """The device; sets the number of threads."""
        if self.threads:
            torch.set_num_threads(self.threads)
        return find_device(self.device)

    def config(self, method: str) -> DapeConfig:
        """The model's configuration for a method."""
        from dape.models import preset

        sizes = {"num_hidden_layers": self.num_layers, "hidden_size": self.hidden_size}
        changes = {name: size for name, size in sizes.items() if size is not None}
        return preset(self.preset, method, backend=self.backend, **changes)

    def record(self) -> Record:
        """Fields of every record about the model and the machine."""
        own, config = ("preset", "length", "batch", "backend", "device", "clock"), self.config(BASELINE)
        return {
            **{name: getattr(self, name) for name in own},
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "dtype": str(DTYPES[self.dtype]),
            "hardware": hardware(self.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


@dataclass(frozen=True)
class Options(StepOptions):
    """Time a training step (forward, backward, fused AdamW on a fixed batch) for several methods, as ratios to kerple.

    For a column of the paper's table of costs: --preset 350m --length 512 --batch 1 --steps 1.
    """

    steps: int = setting(10, help="Training steps of a candidate in each round.", low=1, high=10**6)


def run(options: Options) -> list[Record]:
    """One record per method, kerple included."""
    device = options.prepare()
    methods = list(dict.fromkeys([BASELINE, *options.methods.split(",")]))
    steps = {method: repeated(training_step(method, options), options.steps) for method in methods}
    timings = interleave(steps, options.rounds, str(device), options.clock)
    baseline, tokens = timings[BASELINE].milliseconds, options.steps * options.batch * options.length
    return [
        {
            "method": method,
            **options.record(),
            "milliseconds": timing.milliseconds / options.steps,
            "spread": timing.spread / options.steps,
            "ratio_to_kerple": timing.milliseconds / baseline,
            "tokens_per_second": tokens / timing.milliseconds * 1e3,
        }
        for method, timing in timings.items()
    ]


def repeated(step: Callable[[], object], count: int) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(count):
            step()

    return steps


def language_task(method: str, options: StepOptions) -> LanguageModelling:
    """A new model on random tokens."""
    from dape.models import DapeForCausalLM
    from dape.training.run import LanguageModelling

    model = DapeForCausalLM(options.config(method))
    initialise(model, 0)
    ids = np.random.default_rng(0).integers(0, min(256, model.config.vocab_size), 1 << 20).astype(np.uint16)
    return LanguageModelling(model, ids, train_length=options.length, batch_size=options.batch)


def training_step(method: str, options: StepOptions) -> Callable[[], None]:
    """Forward, backward and fused AdamW on one batch; the model's attention is first checked against the reference."""
    device, task = find_device(options.device), language_task(method, options)
    batch, model = move(task.batch(0), device), torch.nn.Module.to(task.model, device).train()
    check_step(task.model, method, batch[:1, :64])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with autocast(options.dtype, device):
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def check_step(model: torch.nn.Module, method: str, tokens: torch.Tensor) -> None:
    """Raise unless the model's logits agree with those of the reference backend."""
    from dape.models import Attention

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    backend = layers[0].backend
    results = {}
    for name in ("reference", backend):
        for layer in layers:
            layer.backend = name
        results[name] = model(input_ids=tokens).logits
    logits, truth = results[backend], results["reference"]
    error = float((logits - truth).abs().max() / truth.abs().max())
    if not error <= 1e-3:
        raise ValueError(
            f'backend "{backend}" is wrong in {method}: logits off by {error:.1e} (nothing was timed)'
        )
