"""`python -m dev.gpu_estimate`: compiled resources and simulated clocks of the Triton kernels. No GPU is needed.

Estimated, not measured: resources are the compiler's own numbers, clocks come from a simulation (gpu_simulator.py).
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dape.bench import report
from dape.bench.report import Record
from dape.cli.parsing import parse
from dape.files import read_json
from dape.ops.score_attention.triton.launch import Launch, declared
from dape.settings import setting, split_numbers
from dev.gpu import inspect, record_launches
from dev.gpu_simulator import MACHINES, clocks_per_trip, disassemble, main_loop, resident_blocks

SHAPES: dict[str, dict[str, int]] = {
    "125m": {"num_heads": 12, "head_dim": 64},
    "350m": {"num_heads": 16, "head_dim": 64},
    "2.7b": {"num_heads": 32, "head_dim": 80},
    "6.7b": {"num_heads": 32, "head_dim": 128},
    "llama-3-8b": {"num_heads": 32, "num_groups": 8, "head_dim": 128},
}
# Multiprocessors of an A100, A40, H100 and B200.
MULTIPROCESSORS = {80: 108, 86: 84, 90: 132, 100: 148}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

COLUMNS = (
    ("kernel", "kernel", ""),
    ("regs", "registers", "d"),
    ("spills", "spills", "d"),
    ("shared", "shared", "d"),
    ("blocks", "blocks", "d"),
    ("tensor", "tensor_instructions", ".2f"),
    ("instr.", "instructions", ".2f"),
    ("clocks", "clocks", ".2f"),
    ("× plain", "ratio", ".1f"),
)


@dataclass(frozen=True)
class Options:
    """Compile the Triton kernels and print registers, spilled bytes, shared memory, blocks on a multiprocessor,
    instructions of a warp and simulated clocks, each for a visible pair of query and key (all heads).

    Estimated, not measured. A total is the sum of the kernels of a pass, against plain attention in the same
    simulation: forward, a kernel in the manner of FlashAttention-2; backward, ours without a convolution. Launches are
    those of our kernels for one sequence, forward or backward, without PyTorch's own kernels before and after.
    """

    shapes: str = setting(
        "125m,350m,2.7b,6.7b,llama-3-8b", help=f"Model shapes: {', '.join(SHAPES)}.", listed=str
    )
    capabilities: str = setting(
        "80,86,90,100", help="GPU generations, compute capability times ten.", listed=int, low=80, high=120
    )
    dtype: str = setting("fp16", help="Dtype of the inputs: fp16, bf16 or fp32.")
    width: int = setting(32, help="Hidden channels between the two convolutions.", low=1, high=128)
    kernel: int = setting(3, help="Kernel size of the convolutions.", low=1, high=15)
    backward: bool = setting(True, help="Also the kernels of the backward pass.")
    read: str | None = setting(
        None,
        help="Files written by --json, separated by commas: print these instead of compiling.",
        listed=str,
    )
    json: Path | None = setting(None, help="Write one record per kernel.", writes="file")
    markdown: Path | None = setting(
        None, help="Write the tables between the markers <!-- gpu-estimate --> of a page.", writes="file"
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dev.gpu_estimate")
    records = run(options)
    print_tables(records)
    if options.json is not None:
        report.write_json(options.json, records)
    if options.markdown is not None:
        fill_page(options.markdown, records)
    return 0


# Numbers of keys for which launches are counted.
LENGTHS = (2048, 8192)


def print_tables(records: list[Record]) -> None:
    """Print one table per pass, each within 80 columns."""
    print("estimated, not measured; numbers per visible pair of query and key")
    groups = dict.fromkeys((x["shape"], x["capability"], x["pass"]) for x in records)
    for group in groups:
        some = [x for x in records if (x["shape"], x["capability"], x["pass"]) == group]
        shape, capability, which = group
        report.print_table(f"\n{shape}, sm_{capability}, {which}{launch_words(some[-1])}", COLUMNS, some)


def launch_words(total: Record) -> str:
    """Number of kernel launches, from the record of a whole pass."""
    counts = total.get("launches", {})
    words = " and ".join(f"{count:,} at {int(length):,}" for length, count in counts.items())
    return f": {words} keys, started kernels" if words else ""


def run(options: Options) -> list[Record]:
    if options.dtype not in DTYPES:
        raise ValueError(f'dtype="{options.dtype}": choose {", ".join(DTYPES)}')
    records: list[Record] = []
    if options.read:
        return [record for name in options.read.split(",") for record in read_json(name, list)]
    for name in options.shapes.split(","):
        if name not in SHAPES:
            raise ValueError(f'unknown shape "{name}": choose from {", ".join(SHAPES)}')
        shape: dict[str, Any] = {"dtype": DTYPES[options.dtype], **SHAPES[name]}
        for capability in split_numbers("capabilities", options.capabilities):
            records += estimate(name, shape, capability, options)
    return records


def estimate(name: str, shape: dict[str, Any], capability: int, options: Options) -> list[Record]:
    """A record for every kernel of a shape, and one for each pass as a whole."""
    from dev import gpu_baseline

    convolved = shape | {"width": options.width, "kernel_size": options.kernel, "length": 2048}
    plain = shape | {"width": None, "bias": "none", "length": 2048}
    flash = best([_record(launch, capability) for launch in gpu_baseline.launches(**shape)])
    launches_of = count_launches(options.backward, **convolved)
    passes = {"forward": first_chunk(record_launches(**convolved, backward=False))}
    baseline = {"forward": [flash["clocks"]]}
    if options.backward:
        passes["backward"] = backward_kernels(convolved)
        baseline["backward"] = [x["clocks"] for x in _records(backward_kernels(plain), capability)]
    records = []
    for which, launches in passes.items():
        kernels = _records(launches, capability)
        total, known = sum_or_none([x["clocks"] for x in kernels]), sum_or_none(baseline[which])
        kernels.append({
            "kernel": "all", "launches": launches_of[which], "clocks": total, "plain_clocks": known, "spills": sum(x["spills"] for x in kernels),
            "shared": max(x["shared"] for x in kernels), "ratio": total / known if total and known else None,
            "tensor_instructions": sum(x["tensor_instructions"] for x in kernels),
            "instructions": sum(x["instructions"] for x in kernels),
        })  # fmt: skip
        records += [{"shape": name, "capability": capability, "pass": which, **x} for x in kernels]
    return records


@functools.cache
def count_launches(backward: bool, **shape: Any) -> dict[str, dict[str, int]]:
    """Kernel launches of a forward and a backward pass, by the number of keys: the same on every GPU."""
    launches: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
    for length in LENGTHS:
        forward = len(record_launches(**shape | {"length": length}, backward=False))
        launches["forward"][str(length)] = forward
        if backward:
            both = len(record_launches(**shape | {"length": length}))
            launches["backward"][str(length)] = both - forward
    return launches


def backward_kernels(shape: dict[str, Any]) -> list[Launch]:
    """Kernels of a backward pass, including those that repeat the forward pass."""
    forward = len(record_launches(**shape, backward=False))
    return first_chunk(record_launches(**shape)[forward:])


def best(records: list[Record]) -> Record:
    """The record with the fewest clocks among those without spills."""
    clean = [x for x in records if not x["spills"]] or records
    return min(clean, key=lambda x: math.inf if x["clocks"] is None else x["clocks"])


def sum_or_none(numbers: list[float | None]) -> float | None:
    known = [x for x in numbers if x is not None]
    return sum(known) if len(known) == len(numbers) else None


def first_chunk(launches: list[Launch]) -> list[Launch]:
    """Launches of a pass's first chunk of rows: up to the repetition of its scores."""
    starts = [n for n, launch in enumerate(launches) if launch.kernel.__name__ == "scores_kernel"]
    return launches[: starts[1]] if len(starts) > 1 else launches


_known: dict[tuple, Record] = {}


def _records(launches: list[Launch], capability: int) -> list[Record]:
    return [_record(launch, capability) for launch in launches]


def _record(launch: Launch, capability: int) -> Record:
    """Record of a launch, cached for launches with the same code, loop and grid."""
    given = launch.arguments | launch.variants[0]
    constants = [given[name] for name in declared(launch.kernel).constants]
    dtypes = [x.dtype for x in given.values() if torch.is_tensor(x)]
    key = (capability, launch.kernel.__name__, launch.grid, *constants, *dtypes)
    if key not in _known:
        _known[key] = _examine(launch, capability)
    return dict(_known[key])


def _examine(launch: Launch, capability: int) -> Record:
    """Record of a launch, in numbers per query–key pair, over all heads."""
    compiled = inspect(launch, capability)
    given = launch.arguments | compiled.variant
    trips = trips_per_pair(launch, given)
    loop = main_loop(*disassemble(compiled.cubin))
    warps, programs = given["num_warps"], math.prod(launch.grid)
    blocks = resident_blocks(compiled.registers, compiled.shared, warps, capability)
    clocks = None
    if capability in MACHINES:
        # As many blocks at a time as the grid has for a multiprocessor; some see no pixel.
        seen = 1.0
        if "walk" in declared(launch.kernel).names:
            seen -= (given["row_stop"] - given["row_start"]) / 2 / given["columns"]
        busy = min(blocks, programs * seen / MULTIPROCESSORS[capability])
        clocks = clocks_per_trip(loop, warps, math.ceil(busy), capability) / busy * trips
    finish = "kept" if given.get("KEEP") else given.get("FINISH", "none")
    if launch.kernel.__name__ == "products_kernel":
        finish = "keys" if given["KEYS"] else "queries"
    return {
        "kernel": launch.kernel.__name__.removesuffix("_kernel")
        + ("" if finish == "none" else f" ({finish})"),
        "registers": compiled.registers,
        "spills": compiled.spills,
        "shared": compiled.shared,
        "blocks": blocks,
        "tensor_instructions": sum(x.is_tensor for x in loop) * warps * trips,
        "instructions": len(loop) * warps * trips,
        "clocks": clocks,
        "programs": programs,
    }


def trips_per_pair(launch: Launch, given: dict[str, Any]) -> float:
    """Trips of the main loop per query–key pair, over all heads and parts of channels."""
    name = launch.kernel.__name__
    if name == "rows_kernel":
        return 0.0
    if name == "convolve_kernel":
        return (given["walk"] + given["K1"] + given["K2"] - 2) / given["walk"] / given["BLOCK_R"]
    if name == "diagonals_kernel":
        rows = given["row_stop"] - given["row_start"]
        # Lanes enter a diagonal and leave it.
        return launch.grid[1] * (rows + given["BLOCK_D"] - 1) / rows / given["BLOCK_D"] / given["UNROLL"]
    if name == "taps_kernel":
        return launch.grid[1] * launch.grid[2] / given["BLOCK_R"]
    if name == "stage_kernel":
        return given["OUT_PARTS"] / given["BLOCK_R"]
    return given["H"] / (given.get("ROWS", given["BLOCK_R"]) * given["BLOCK_K"])


MARKER = "<!-- gpu-estimate -->"

# FlashAttention-2's backward pass of 12 heads of 64 on sm_80, in clocks per pair.
FLASH_BACKWARD = 9.0


def fill_page(page: Path, records: list[Record]) -> None:
    """Write the tables between the page's two markers."""
    before, _, after = page.read_text().split(MARKER)
    page.write_text(f"{before}{MARKER}\n{tables(records)}\n{MARKER}{after}")


def limits(records: list[Record]) -> list[tuple[str, str, str]]:
    """Requirements of the kernels: name, limit, and estimate, for the available records."""
    totals = {(x["shape"], x["capability"], x["pass"]): x for x in records if x["kernel"] == "all"}
    requirements = []
    for shape, most in (("125m", 6), ("llama-3-8b", 3)):
        if x := totals.get((shape, 80, "forward")):
            name = f"forward, {shape}, sm_80, against FlashAttention-2"
            requirements.append((name, f"≤ {most}×", f"{x['ratio']:.1f}×"))
    if x := totals.get(("125m", 80, "backward")):
        name = f"backward, 125m, sm_80, against {FLASH_BACKWARD:g} clocks"
        requirements.append((name, "≤ 8×", f"{x['clocks'] / FLASH_BACKWARD:.1f}×"))
    for capability in (80, 90):
        if some := [x for key, x in totals.items() if key[1] == capability]:
            shapes = len({x["shape"] for x in some})
            name = f"spilled bytes, all kernels of {shapes} shape{'s' * (shapes > 1)}, sm_{capability}"
            requirements.append((name, "0", str(sum(x["spills"] for x in some))))
    if consumer := [x["shared"] for key, x in totals.items() if key[1] == 86]:
        requirements.append(("most shared memory of a block, sm_86", "≤ 101,376", f"{max(consumer):,}"))
    return requirements


def tables(records: list[Record]) -> str:
    """Requirements, totals by shape, then the kernels of the first shape, as Markdown."""
    totals = [x for x in records if x["kernel"] == "all"]
    lines = ["| | target | estimated |", "|---|---|---|"]
    lines += [f"| {name} | {demand} | {estimate} |" for name, demand, estimate in limits(records)]
    lines += [
        "",
        "| shape | GPU | pass | clocks | plain | × plain | spilled bytes | most shared memory | launches, "
        + ", ".join(f"{length:,} keys" for length in LENGTHS)
        + " |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for x in totals:
        lines.append(
            f"| {x['shape']} | sm_{x['capability']} | {x['pass']} | {_number(x['clocks'])} | "
            f"{_number(x['plain_clocks'])} | {_number(x['ratio'])} | {x['spills']} | {x['shared']:,} | "
            + ", ".join(f"{count:,}" for count in x["launches"].values())
            + " |"
        )
    first = records[0]
    lines += ["", f"The kernels of {first['shape']} on sm_{first['capability']}:", ""]
    lines += [
        "| pass | kernel | registers | spilled | shared | blocks | tensor | instructions | clocks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for x in records:
        if (x["shape"], x["capability"]) == (first["shape"], first["capability"]) and x["kernel"] != "all":
            lines.append(
                f"| {x['pass']} | {x['kernel']} | {x['registers']} | {x['spills']} | {x['shared']:,} | {x['blocks']} | "
                f"{x['tensor_instructions']:.2f} | {x['instructions']:.2f} | {_number(x['clocks'])} |"
            )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
