"""`dape bench methods`: every method's reference, its cost against plain attention, and what its cache keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dape.bench import report
from dape.bench.attention import CLOCK_HELP
from dape.bench.timing import check_clock, take_turns
from dape.files import write_atomically
from dape.methods import PRESETS, Method, all_methods, parse_method, split_outside_brackets
from dape.models.attention import Attention, Context
from dape.positions import POSITIONS, Positions
from dape.settings import setting

BASELINE = "nope"
# Decoding steps in one measurement.
STEPS = 10
KERNELS = (None, (1, 1), (1, 3), (6, 11))
# One method for each encoding, processor, normaliser and preset.
SHOWN = [
    *(name for name in POSITIONS if name not in ("kerple", "relative")),
    *dict.fromkeys(m.name for m in all_methods() if m.position == "kerple" and m.kernel in KERNELS),
    *("keyshift-rope", "rope[window=128]"),
    *(f"nope[normaliser={name}]" for name in ("sink", "ssmax", "entmax", "asentmax")),
    *PRESETS,
]
COLUMNS = (
    ("method", "method", ""),
    ("reference", "reference", ""),
    ("× plain, training", "training", ".2f"),
    ("× plain, decoding", "decoding", ".2f"),
    ("× plain, cache", "cache", ".2f"),
    ("parameters", "parameters", ",d"),
    ("encoders", "encoders", ""),
)
PRESET_REFERENCES = {"rope-id": "Wertheimer et al. 2026, arXiv 2603.18017"}
START, END = "<!-- methods -->", "<!-- /methods -->"


@dataclass(frozen=True)
class Options:
    """Time an attention layer of each method, projections included, against one without positions, in turn: forward
    and backward, and one token against as many cached ones. Parameters are those beyond the projections."""

    methods: str = setting(
        "all", help="Methods, separated by commas; all: one for each encoding and processor."
    )
    length: int = setting(1024, help="Tokens.", low=2, high=2**20)
    hidden_size: int = setting(256, help="Width of the hidden states.", low=4, high=2**16)
    heads: int = setting(4, help="Heads of attention.", low=1, high=4096)
    rounds: int = setting(5, help="Rounds; the fastest is reported.", low=1, high=10**6)
    threads: int = setting(1, help="Threads of PyTorch.", low=1, high=4096)
    clock: str = setting("process", help=CLOCK_HELP)
    json: Path | None = setting(None, help="Write one record per method.", writes="file")
    page: Path | None = setting(
        None, help=f"Write the table into this Markdown file, between {START} and {END}."
    )


def show(options: Options, records: list[report.Record]) -> None:
    report.print_table(f"{options.length} tokens, {options.heads} heads", COLUMNS, records)
    if options.json is not None:
        report.write_json(options.json, records)
    if options.page is not None:
        before, _, rest = options.page.read_text("utf-8").partition(START)
        _, _, after = rest.partition(END)
        if not rest:
            raise ValueError(f"{options.page} has no line {START}")
        write_atomically(options.page, f"{before}{START}\n{markdown(records)}\n{END}{after}")


def markdown(records: list[report.Record]) -> str:
    lines = ["| " + " | ".join(heading for heading, *_ in COLUMNS) + " |"]
    lines.append("|" + "|".join("--:" if form else "---" for _, _, form in COLUMNS) + "|")
    for record in records:
        cells = [format(record[key], form) for _, key, form in COLUMNS]
        lines.append("| " + " | ".join([f"`{cells[0]}`", *cells[1:]]) + " |")
    return "\n".join(lines)


def run(options: Options) -> list[report.Record]:
    """One record per method."""
    check_clock(options.clock)
    torch.set_num_threads(options.threads)
    names = SHOWN if options.methods == "all" else split_outside_brackets(options.methods, ",")
    layers = {name: Layer(parse_method(name), options) for name in dict.fromkeys([BASELINE, *names])}
    steps: dict[str, Callable[[], object]] = {f"{name} train": layer.train for name, layer in layers.items()}
    steps |= {f"{name} decode": layer.decode for name, layer in layers.items()}
    # The least disturbed round counts.
    taken = {
        name: min(times) for name, times in take_turns(steps, options.rounds, clock=options.clock).items()
    }
    return [
        {
            "method": name,
            "reference": PRESET_REFERENCES.get(name, layers[name].method.reference),
            "training": taken[f"{name} train"] / taken[f"{BASELINE} train"],
            "decoding": taken[f"{name} decode"] / taken[f"{BASELINE} decode"],
            "cache": layers[name].cached_numbers() / layers[BASELINE].cached_numbers(),
            "parameters": layers[name].num_parameters(),
            "encoders": "yes" if layers[name].method.direction == "both" else "no",
            "milliseconds": taken[f"{name} train"],
            "length": options.length,
        }
        for name in names
    ]


class Layer:
    """An attention layer with its encoding on random hidden states, its cache filled."""

    def __init__(self, method: Method, options: Options) -> None:
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
        self.cache = _Filled()
        self.whole = Context(Positions.of(options.length))
        with torch.no_grad():
            self.attention(self.x, self.encoding, self.whole, self.cache)
        self.cache.filled = True
        length = options.length
        self.last = Context(
            Positions(torch.tensor([[length]]), torch.arange(length + 1)[None], consecutive=True)
        )

    def train(self) -> None:
        self.attention(self.x, self.encoding, self.whole).sum().backward()

    @torch.no_grad()
    def decode(self) -> None:
        for _ in range(STEPS):
            self.attention(self.x[:, :1], self.encoding, self.last, self.cache)

    def cached_numbers(self) -> int:
        return sum(part.numel() for part in self.cache.parts)

    def num_parameters(self) -> int:
        modules = (self.encoding, self.attention.scores)
        return sum(parameter.numel() for module in modules for parameter in module.parameters())


class _Filled:
    """A cache that takes the first call's keys and values, and shows them to all later ones."""

    filled = False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if not self.filled:
            self.parts = key_states, value_states
            return self.parts
        keys, values = self.parts
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
