"""`python -m dev.methods`, the table of docs/methods.md: every method's reference, its cost and memory against plain attention, how far it reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import pandas as pd
import torch
from torch import Tensor

from dape.bench.attention import CLOCK, CLOCK_HELP
from dape.bench.report import Record, show
from dape.bench.timing import take_turns
from dape.cli.parsing import parse
from dape.evaluation.table import means, read_table
from dape.lab.tasks import SHORT, SHOWN
from dape.layers import Cache
from dape.methods import Method, parse_layers, split_outside_brackets
from dape.positions import Positions
from dape.settings import setting

BASELINE = "nope"
# Decoding steps in one measurement.
STEPS = 10
COLUMNS = (
    ("method", "method", ""),
    ("reference", "reference", ""),
    ("× plain, training", "training", ".2f"),
    ("× plain, decoding", "decoding", ".2f"),
    ("× plain, memory", "memory", ".2f"),
    ("× plain, cache", "cache", ".2f"),
    ("parameters", "parameters", ",d"),
    ("encoders", "encoders", ""),
    ("reads long", "reads long", ""),
)
PRESET_REFERENCES = {
    "swan": "Puvvada et al. 2025, arXiv 2504.08719",
    "rnope-swa": "Yang et al. 2025, arXiv 2501.18795",
}


@dataclass(frozen=True)
class Options:
    """Time an attention layer of each method, projections included, against one without positions, in turn: forward
    and backward, and one token against as many cached ones. Parameters are those beyond the projections, memory is what
    a backward pass needs."""

    methods: str = setting(
        "all", help="Methods, separated by commas; all: one for each encoding and processor."
    )
    length: int = setting(1024, help="Tokens.", low=2, high=2**20)
    hidden_size: int = setting(256, help="Width of the hidden states.", low=4, high=2**16)
    heads: int = setting(4, help="Heads of attention.", low=1, high=4096)
    rounds: int = setting(5, help="Rounds; the fastest is reported.", low=1, high=10**6)
    threads: int = setting(1, help="Threads of PyTorch.", low=1, high=4096)
    clock: CLOCK = setting("process", help=CLOCK_HELP)
    tasks: Path | None = setting(
        None, help="Folder of `dape tasks run`: accuracy at its training lengths and at four times those."
    )
    json: Path | None = setting(None, help="Write one record per method.", writes="file")

    @property
    def title(self) -> str:
        return f"{self.length} tokens, {self.heads} heads"


def run(options: Options) -> list[Record]:
    """One record per method."""
    torch.set_num_threads(options.threads)
    names = SHOWN if options.methods == "all" else split_outside_brackets(options.methods, ",")
    layers = {
        name: [Layer(method, options) for method in parse_layers(name)]
        for name in dict.fromkeys([BASELINE, *names])
    }
    steps: dict[str, Callable[[], object]] = {}
    for name, of_name in layers.items():
        steps[f"{name} train"] = partial(_each, of_name, Layer.train)
        steps[f"{name} decode"] = partial(_each, of_name, Layer.decode)
    accuracies = {} if options.tasks is None else reading(options.tasks / "results.csv.gz")
    # The least disturbed round counts.
    taken = {
        name: min(times) / len(layers[name.rpartition(" ")[0]])
        for name, times in take_turns(steps, options.rounds, clock=options.clock).items()
    }
    (plain,) = layers[BASELINE]
    return [
        {
            "method": name,
            "reference": PRESET_REFERENCES.get(name, layers[name][0].method.reference),
            "training": taken[f"{name} train"] / taken[f"{BASELINE} train"],
            "decoding": taken[f"{name} decode"] / taken[f"{BASELINE} decode"],
            "memory": mean(layer.kept_bytes() for layer in layers[name]) / plain.kept_bytes(),
            "cache": mean(layer.cached_numbers() for layer in layers[name]) / plain.cached_numbers(),
            "parameters": sum(layer.num_parameters() for layer in layers[name]),
            "encoders": "yes" if all(layer.method.direction == "both" for layer in layers[name]) else "no",
            "reads long": accuracies.get(SHORT.get(name, name), ""),
            "milliseconds": taken[f"{name} train"],
            "length": options.length,
        }
        for name in names
    ]


def reading(results: Path) -> dict[str, str]:
    """Accuracy in percent at the longest training length and at four times that, mean of the tasks, by method."""
    table = read_table(results)
    by_task = [means(rows, "accuracy").T.sort_index() for _, rows in table.groupby("corpus")]
    short, long = (pd.concat([rows.iloc[n] for rows in by_task], axis=1).mean(axis=1) for n in (0, 2))
    return {str(method): f"{100 * short[method]:.0f} → {100 * long[method]:.0f}" for method in short.index}


def _each(layers: list[Layer], step: Callable[[Layer], None]) -> None:
    for layer in layers:
        step(layer)


class Layer:
    """An attention layer with its encoding on random hidden states, its cache filled."""

    def __init__(self, method: Method, options: Options) -> None:
        from dape.models import Attention, Context

        self.method = method
        head_dim = options.hidden_size // options.heads
        self.encoding = method.build_position(
            num_heads=options.heads, head_dim=head_dim, hidden_size=options.hidden_size
        )
        self.attention = Attention(
            options.hidden_size,
            options.heads,
            scores=method.build_scores(options.heads),
            window=method.window,
        )
        self.x = torch.randn(1, options.length, options.hidden_size)
        self.cache = Cache()
        self.whole = Context(Positions.of(options.length))
        with torch.no_grad():
            self.attention(self.x, self.encoding, self.whole, self.cache)
        self.filled = dict(self.cache.layers)
        length = options.length
        self.last = Context(
            Positions(torch.tensor([[length]]), torch.arange(length + 1)[None], consecutive=True)
        )

    def train(self) -> None:
        self.attention(self.x, self.encoding, self.whole).sum().backward()

    @torch.no_grad()
    def decode(self) -> None:
        for _ in range(STEPS):
            # Later steps read no more than the first.
            self.cache.layers = dict(self.filled)
            self.attention(self.x[:, :1], self.encoding, self.last, self.cache)

    def kept_bytes(self) -> int:
        """Memory of the tensors that autograd keeps for the backward pass."""
        kept: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            self.attention(self.x, self.encoding, self.whole)
        return sum(kept.values())

    def cached_numbers(self) -> int:
        return sum(part.numel() for parts in self.filled.values() for part in parts)

    def num_parameters(self) -> int:
        modules = (self.encoding, self.attention.scores)
        return sum(parameter.numel() for module in modules for parameter in module.parameters())


def main(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="python -m dev.methods")
    show(options.title, COLUMNS, run(options), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
