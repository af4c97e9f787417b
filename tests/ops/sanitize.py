"""Runs a sanitized library over the shape table; `make sanitize` starts it with the sanitizers loaded.

python tests/ops/sanitize.py LIBRARY [BUILD …]      some of its builds (avx512, avx512_short, avx2, portable) in place of all
"""

import sys
from itertools import product
from pathlib import Path

import torch
from op_cases import MORE, PROGRAMS, RAGGED, SHAPES, VISIBILITIES, build, kernel_table, wake_threads
from test_cpu_curve import CASES as CURVES
from test_cpu_halves import HALVES

from dape.ops.score_attention import native
from dev import stages


def main(path: str, *only: str) -> None:
    native.KERNEL, native.PROBLEM = native.load(Path(path).resolve()), None
    wake_threads()
    torch.set_num_threads(2)
    names, cases = [*PROGRAMS, *MORE], list(kernel_table())
    # The other direction as well, where every query has its key.
    cases += [case.but(causal=not case.causal) for case in cases if case.queries <= case.keys]
    cases += CURVES.values()
    # More threads than cores, so that some wait and put gradients aside.
    long = SHAPES["default widths"].but(head_dim=8, queries=300, keys=300, width=6, bias="distance")
    crowded = [long.but(kernel=kernel, batch=batch) for kernel in (None, 3) for batch in (1, 3)]
    sizes = zip(VISIBILITIES, (1, 5, 8, 3, 7, 2), (1, 613, 10, 613, 11, 613), strict=True)
    few = [
        RAGGED.but(queries=queries, keys=keys, program=name, bias=bias, visible=visible)
        for name, bias, (visible, queries, keys) in product(names, ("none", "distance", "dense"), sizes)
    ]
    for kernel in only or native.builds():
        with native.use_build(kernel):
            for case in cases:
                build(case, torch.float32).results("cpu")
            torch.set_num_threads(8)
            for case in crowded:
                for dtype in (torch.float32, torch.bfloat16):
                    build(case, dtype).results("cpu")
            torch.set_num_threads(2)
            for dtype in HALVES:
                for case in (*SHAPES.values(), *(RAGGED.but(program=name) for name in names)):
                    build(case, dtype).results("cpu")
                with torch.no_grad():
                    for name in names:
                        build(RAGGED.but(queries=3, program=name), dtype).attend("cpu")
            with torch.no_grad():
                for case in few:
                    build(case, torch.float32).attend("cpu")
            for width in (9, 16):
                stages.run(
                    stages.Options(length=100, heads=3, head_dim=5, width=width, build=kernel, rounds=1)
                )
        print(f"{kernel}: {len(cases)} calls, forward and backward, without a complaint")


if __name__ == "__main__":
    main(*sys.argv[1:])
