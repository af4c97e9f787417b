"""Runs a sanitized library over the shape table; `make sanitize` starts it with the sanitizers loaded.

python tests/ops/sanitize.py LIBRARY [BUILD …]      some of its builds (avx512, avx512_short, avx2, portable) in place of all
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from cpu_cases import SHAPES, Case, evaluate, tensors
from op_cases import PROGRAMS, build
from test_cpu_curve import CASES as CURVES
from test_cpu_curve import results as curve_results
from test_cpu_halves import HALVES
from test_cpu_program import BIASES as PROGRAM_BIASES
from test_cpu_program import MORE, RAGGED, RUNS, replace
from test_cpu_program import VISIBLE as PROGRAM_VISIBLE

from dape.ops.score_attention import native
from dev import stages

BIASES = ("none", "distance", "shared", "dense")
VISIBLE = ("all", "padded", "window", "cache", "nothing")


def main(path: str, *only: str) -> None:
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
    # More threads than cores, so that some wait and put gradients aside.
    long = Case(heads=12, groups=12, head_dim=8, queries=300, keys=300, bias="distance")
    crowded = [long.but(width=width, batch=batch) for width in (0, 6) for batch in (1, 3)]
    PROGRAMS.update(MORE)
    names = [*RUNS, *MORE]
    programs = [
        replace(RAGGED, program=name, bias=bias, causal=causal)
        for name in names
        for bias in PROGRAM_BIASES
        for causal in (True, False)
    ]
    # As many queries as keys: the first stage begins from a table by distance.
    programs += [replace(RAGGED, queries=RAGGED.keys, program=name, bias="distance") for name in names]
    programs += [replace(RAGGED, program=name, visible=seen) for name in names for seen in PROGRAM_VISIBLE]
    few = [
        replace(RAGGED, queries=queries, keys=keys, program=name, bias=bias, visible=seen)
        for name in names
        for bias in ("none", "distance", "dense")
        for seen, queries, keys in zip(PROGRAM_VISIBLE, (1, 5, 8, 3, 7), (1, 613, 10, 613, 11), strict=True)
    ]
    for name in only or native.builds():
        with native.use_build(name):
            for case in cases:
                evaluate(case, tensors(case), torch.float32, "cpu")
            torch.set_num_threads(8)
            for case in crowded:
                evaluate(case, tensors(case), torch.float32, "cpu")
                evaluate(case, tensors(case), torch.bfloat16, "cpu")
            torch.set_num_threads(2)
            for case in programs:
                build(case, torch.float32).results("cpu")
            for dtype in HALVES:
                for shape in SHAPES.values():
                    evaluate(shape, tensors(shape), dtype, "cpu")
                for program in names:
                    build(replace(RAGGED, program=program), dtype).results("cpu")
                    with torch.no_grad():
                        build(replace(RAGGED, queries=3, program=program), dtype).attend("cpu")
            for curve in CURVES.values():
                curve_results(torch.float32, "cpu", curve)
            with torch.no_grad():
                for case in few:
                    build(case, torch.float32).attend("cpu")
            for width in (9, 16):
                stages.run(stages.Options(length=100, heads=3, head_dim=5, width=width, build=name, rounds=1))
        print(f"{name}: {len(cases) + len(programs)} calls, forward and backward, without a complaint")


if __name__ == "__main__":
    main(*sys.argv[1:])
