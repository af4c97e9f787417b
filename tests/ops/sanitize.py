"""Runs a sanitized build of the kernel over the shape table; `make sanitize` starts it with the sanitizers loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from cpu_cases import SHAPES, Case, evaluate, tensors

from dape.ops.score_attention import native

BIASES = ("none", "distance", "shared", "dense")
VISIBLE = ("all", "padded", "window", "cache", "nothing")


def main(path: str) -> None:
    native.KERNEL = native.load(Path(path).resolve())
    torch.set_num_threads(2)
    cases = [
        shape.but(bias=bias, causal=causal)
        for shape in SHAPES.values()
        for bias in BIASES
        for causal in (True, False)
    ]
    small = Case(batch=2, queries=50, keys=61, width=6)
    cases += [
        small.but(heads=heads, width=width, bias=bias, visible=visible)
        for heads, width in ((4, 6), (8, 9))
        for bias in BIASES
        for visible in VISIBLE
    ]
    for build in native.builds():
        with native.use_build(build):
            for case in cases:
                evaluate(case, tensors(case), torch.float32, "cpu")
        print(f"{build}: {len(cases)} calls, forward and backward, without a complaint")


if __name__ == "__main__":
    main(sys.argv[1])
