"""`dape bench model`: a training step of a preset, or an evaluation, for several methods: the paper's time-cost table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dape.bench import report, steps
from dape.bench.attention import Placement
from dape.bench.steps import BASELINE
from dape.bench.timing import interleave
from dape.models import Attention, DapeForCausalLM
from dape.settings import setting

COLUMNS = (
    ("method", "method", ""),
    ("ms", "milliseconds", ".1f"),
    ("± (IQR)", "spread", ".1f"),
    ("× kerple", "ratio_to_kerple", ".4f"),
    ("tokens a second", "tokens_per_second", ",.0f"),
)


@dataclass(frozen=True)
class Options(steps.StepOptions):
    """Time a training step (forward, backward, AdamW) of a model for several methods, as ratios to kerple; or the forward
    pass that evaluates the last tokens of a window, as ratios to kerple's pass over all of it."""

    methods: str = setting(
        "rope,alibi,kerple,dape-kerple,dape1x3-kerple", help=steps.METHODS_HELP, listed=str
    )
    length: int = setting(512, help="Tokens of an input.", low=1, high=2**24)
    batch: int = setting(1, help="Batch size.", low=1, high=2**20)
    last: int = setting(0, help="Evaluate this many last tokens; 0: train.", low=0, high=2**24)
    rounds: int = setting(5, help="Rounds; the median is reported.", low=1, high=10**6)


def show(options: Options, records: list[report.Record]) -> None:
    steps.print_records(options, records, COLUMNS)


def run(options: Options) -> list[report.Record]:
    """One record per method."""
    options.prepare()
    methods = list(dict.fromkeys([*options.methods.split(","), BASELINE]))
    make = evaluation if options.last else training_step
    candidates = {method: make(method, options) for method in methods}
    timings = interleave(candidates, options.rounds, options.device, options.clock)
    baseline = timings[BASELINE].milliseconds
    return [
        {
            "method": method,
            **options.record(),
            "milliseconds": timing.milliseconds,
            "spread": timing.spread,
            "ratio_to_kerple": timing.milliseconds / baseline,
            "tokens_per_second": options.batch * options.length / timing.milliseconds * 1e3,
        }
        for method, timing in timings.items()
    ]


def checked(method: str, options: Options) -> tuple[DapeForCausalLM, torch.Tensor]:
    """A new model, whose attention was checked against the reference, and random tokens."""
    device = Placement.of(options.device, options.dtype).device
    torch.manual_seed(0)
    model = DapeForCausalLM(options.config(method))
    torch.nn.Module.to(model, device)
    tokens = torch.randint(model.config.vocab_size, (options.batch, options.length)).to(device)
    check_step(model, method, tokens[:1, :64])
    return model, tokens


def evaluation(method: str, options: Options) -> Callable[[], None]:
    """A forward pass for the last tokens; kerple's is for all."""
    model, tokens = checked(method, options)
    rows = None if method == BASELINE else options.last

    @torch.no_grad()
    def forward() -> None:
        model.model(input_ids=tokens, last_rows=rows, use_cache=False)

    return forward


def training_step(method: str, options: Options) -> Callable[[], None]:
    """A step of training on the same tokens."""
    model, tokens = checked(method, options)
    placement = Placement.of(options.device, options.dtype)
    kind, half = torch.device(placement.device).type, placement.dtype != torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast(kind, placement.dtype if half else None, enabled=half):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def check_step(model: DapeForCausalLM, method: str, tokens: torch.Tensor) -> None:
    """Raise unless the model's logits agree with those of the reference backend."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    backend = layers[0].backend
    results = {}
    for name in (backend, "reference"):
        for layer in layers:
            layer.backend = name
        results[name] = model(input_ids=tokens).logits
    for layer in layers:
        layer.backend = backend
    logits, truth = results[backend], results["reference"]
    error = float((logits - truth).abs().max() / truth.abs().max())
    if not error <= 1e-3:
        raise ValueError(
            f'backend "{backend}" is wrong in {method}: logits off by {error:.1e} (nothing was timed)'
        )
