"""`dape bench`: interleaved timings of attention backends, decoding steps and whole models, as ratios."""

from __future__ import annotations

import importlib

from dape.settings import check_choice

COMMANDS = {
    "attention": "forward and backward of every backend, against the paper's listing and PyTorch's own attention",
    "stages": "each stage of the C++ kernel separately, as a share of the core's multiply-add peak",
    "decode": "one query against a cache of keys, against PyTorch's own attention",
    "model": "a training step of a preset for several methods, against kerple",
    "train": "a step of the training loop against a bare one, and methods against kerple",
    "data": "packing text into tokens, against a plain copy and the tokenizer alone",
    "eval": "time and peak memory of evaluating a preset by length",
    "gpu-estimate": "resources and simulated clocks of the Triton kernels, estimated without a GPU",
    "tasks": "sampling batches of the generated tasks, against a training step on them",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    check_choice("benchmark", name, COMMANDS)
    return importlib.import_module(f"dape.benchmarks.{name.replace('-', '_')}").main(rest)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["usage: dape bench BENCHMARK [options]", "", *lines, "", "Each has its own --help."])
