"""`dape bench`: interleaved timings of attention backends, decoding steps and whole models, as ratios."""

from __future__ import annotations

import importlib

from dape.bench.report import show
from dape.cli.parsing import parse
from dape.settings import check_choice

# Each is a module of dape.bench with Options, which have a title, COLUMNS, and run(options) -> records.
BENCHMARKS = {
    "attention": "every backend, against the paper's listing and PyTorch's own",
    "decode": "one query against a cache of keys, against PyTorch's own",
    "generate": "tokens a second of generation, against a Llama of transformers",
    "train": "a training step by method, against kerple",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, BENCHMARKS))
        lines = [f"  {name:<{width}}  {summary}" for name, summary in BENCHMARKS.items()]
        usage = ["usage: dape bench BENCHMARK [options]", "", *lines, "", "Each has its own --help."]
        print("\n".join(usage))
        return 0
    name, *rest = arguments
    check_choice("benchmark", name, BENCHMARKS)
    module = importlib.import_module(f"dape.bench.{name}")
    options = parse(module.Options, rest, prog=f"dape bench {name}")
    records = module.run(options)
    show(options.title, module.COLUMNS, records, options.json)
    return 0
