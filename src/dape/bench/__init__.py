"""`dape bench`: interleaved timings of attention backends, decoding steps and whole models, as ratios."""

from __future__ import annotations

import importlib

from dape.settings import check_choice

COMMANDS = {
    "attention": "every backend, against the paper's listing and PyTorch's own",
    "decode": "one query against a cache of keys, against PyTorch's own",
    "model": "a training step of a preset for several methods, against kerple",
    "train": "a step of the loop against a bare one, methods against kerple",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    check_choice("benchmark", name, COMMANDS)
    return importlib.import_module(f"dape.bench.{name}").main(rest)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["usage: dape bench BENCHMARK [options]", "", *lines, "", "Each has its own --help."])
