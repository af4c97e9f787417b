"""`dape bench train`: a training step of a model by method, and the cost of the training loop beside it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dape.bench import report
from dape.bench.attention import CLOCK, CLOCK_HELP, DTYPE, DTYPES, hardware
from dape.bench.timing import interleave
from dape.devices import device_name, find_device
from dape.settings import TOKENS, setting
from dape.training import LoopSettings, initialise
from dape.training.loop import Loop, StopRequest, move
from dape.training.parallel import Parallel, autocast

if TYPE_CHECKING:
    from dape.models import DapeConfig
    from dape.training.run import LanguageModelling

BASELINE = "kerple"
STEPS_A_ROUND = 10
COLUMNS = (
    ("method", "method", ""),
    ("ms", "milliseconds", ".1f"),
    ("± (IQR)", "spread", ".1f"),
    ("× kerple", "ratio_to_kerple", ".4f"),
    ("tokens a second", "tokens_per_second", ",.0f"),
    ("loop / step", "loop_ratio", ".3f"),
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

    def record(self) -> report.Record:
        """Fields of every record about the model and the machine."""
        own, config = ("preset", "length", "batch", "backend", "device", "clock"), self.config(BASELINE)
        machine = {
            "hardware": hardware(self.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        sizes = {"layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
        return {
            **{name: getattr(self, name) for name in own},
            **sizes,
            "dtype": str(DTYPES[self.dtype]),
            **machine,
        }


@dataclass(frozen=True)
class Options(StepOptions):
    """Time a training step (forward, backward, fused AdamW on a fixed batch) for several methods, as ratios to kerple,
    and a step of `dape train` (data, loss, clipping, optimizer, metrics) as a ratio to it; or the forward pass that
    evaluates the last tokens of a window, as a ratio to kerple's pass over all of it.

    For a column of the paper's table of costs: --preset 350m --length 512 --batch 1 --steps 1 --no-loop.
    """

    steps: int = setting(
        STEPS_A_ROUND, help="Training steps of a candidate in each round.", low=1, high=10**6
    )
    last: int = setting(0, help="Evaluate this many last tokens; 0: train.", low=0, high=2**24)
    loop: bool = setting(True, help="--no-loop: time bare steps alone.")


def show(
    options: StepOptions, records: Sequence[report.Record], columns: Sequence[report.Column] = COLUMNS
) -> None:
    """Print the table and write the file."""
    config = options.config(BASELINE)
    title = f"{config.num_hidden_layers} × {config.hidden_size}, batch {options.batch} × {options.length} tokens, "
    title += f"{options.dtype}, {hardware(options.device)}"
    report.print_table(title, columns, records)
    if options.json is not None:
        report.write_json(options.json, records)


def run(options: Options) -> list[report.Record]:
    """One record per method, kerple included."""
    device = options.prepare()
    methods = list(dict.fromkeys([BASELINE, *options.methods.split(",")]))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, candidates = Path(name), dict[str, Callable[[], object]]()
        for method in methods:
            step = evaluation(method, options) if options.last else training_step(method, options)
            candidates[f"{method} bare"] = repeated(step, options.steps)
            if options.loop and not options.last:
                settings = LoopSettings(
                    steps=10**6, log_every=options.steps, precision=options.dtype, device=options.device
                )
                candidates[f"{method} loop"] = loop_steps(
                    language_task(method, options), folder / method, stack, settings, options.steps
                )
        timings = interleave(candidates, options.rounds, str(device), options.clock)
    bare, baseline = {m: timings[f"{m} bare"] for m in methods}, timings[f"{BASELINE} bare"].milliseconds
    return [
        {
            "method": method,
            **options.record(),
            "milliseconds": bare[method].milliseconds / options.steps,
            "spread": bare[method].spread / options.steps,
            "ratio_to_kerple": bare[method].milliseconds / baseline,
            "tokens_per_second": options.steps
            * options.batch
            * options.length
            / bare[method].milliseconds
            * 1e3,
            "loop_ratio": timings[f"{method} loop"].milliseconds / bare[method].milliseconds
            if f"{method} loop" in timings
            else None,
        }
        for method in methods
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


def evaluation(method: str, options: Options) -> Callable[[], None]:
    """A forward pass for the last tokens; kerple's is for all."""
    device, task = find_device(options.device), language_task(method, options)
    tokens, model = move(task.batch(0), device)[:, :-1], torch.nn.Module.to(task.model, device)
    check_step(model, method, tokens[:1, :64])
    base: Any = model.model
    rows = None if method == BASELINE else options.last

    @torch.no_grad()
    def forward() -> None:
        base(input_ids=tokens, last_rows=rows, use_cache=False)

    return forward


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


def loop_steps(
    task: LanguageModelling,
    folder: Path,
    stack: contextlib.ExitStack,
    settings: LoopSettings,
    count: int = STEPS_A_ROUND,
) -> Callable[[], None]:
    """`count` steps of the training loop including metrics, without checkpoints, on the device of the settings."""
    folder.mkdir()
    parallel = Parallel("none", 0, 1, find_device(settings.device))
    loop = Loop(task, settings, folder, parallel, StopRequest())
    loop.open_logs(stack, progress=False)

    def steps() -> None:
        repeated(loop.take_step, count)()
        loop.flush()

    return steps
