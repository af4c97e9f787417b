"""A simulation of one GPU multiprocessor that runs the main loop of a compiled kernel: clocks per trip.

The assembler encodes in every instruction how long to stall after it and which scoreboards to wait for. The simulation
replays these for all warps of the resident blocks, with throughputs and latencies from public micro-benchmarks. It
models one multiprocessor without bank conflicts, with a constant L2 bandwidth; asynchronous tensor products (WGMMA)
occupy the tensor cores for their number of multiplications, and those of sm_100, which use a memory of their own, are
not modelled. Ratios between two kernels are therefore meaningful to 10 or 15 %; times are not.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from dev.gpu import tools


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: its operation, and the stalls encoded by the assembler."""

    text: str
    operation: str
    stall: int
    sets_written: int
    sets_read: int
    waits: int

    @cached_property
    def name(self) -> str:
        """The operation without its modifiers."""
        return self.operation.split(".")[0]

    @cached_property
    def is_tensor(self) -> bool:
        return self.name in ("HMMA", "HGMMA", "QGMMA", "IMMA", "UTCHMMA")


@dataclass(frozen=True)
class Machine:
    """Clocks between issues by kind of instruction on one of the four schedulers, and latencies."""

    multiply: int = 2
    integer: int = 2
    special: int = 8
    tensor: float = 8
    # Multiplications per clock of one scheduler's tensor core, for asynchronous products.
    tensor_rate: float = 256
    tensor_latency: int = 32
    uniform: int = 2
    memory: int = 2
    shared_latency: int = 23
    matrix_latency: int = 29
    shuffle_latency: int = 24
    global_latency: int = 35
    special_latency: int = 20
    barrier_latency: int = 16
    async_latency: int = 280
    # L2 bandwidth of one multiprocessor, in bytes per clock.
    bandwidth: float = 45.0


MACHINES = {
    80: Machine(),
    # Professional cards: half the tensor cores of sm_80; gaming cards have half of that again with float32 sums.
    86: Machine(multiply=1, tensor=16, bandwidth=26.0),
    90: Machine(multiply=1, tensor=6.4, tensor_rate=512, async_latency=300, bandwidth=32.0),
}

# Resources of a multiprocessor: registers, bytes of shared memory, warps.
REGISTERS = 65_536
SHARED = {75: 65_536, 80: 167_936, 86: 102_400, 89: 102_400, 90: 233_472, 100: 233_472}
WARPS = {75: 32, 80: 64, 86: 48, 89: 48, 90: 64, 100: 64}

MULTIPLY = frozenset(
    ["FFMA", "FMUL", "FADD", "IMAD", "FFMA2", "FMUL2", "FADD2", "HFMA2", "HADD2", "HMUL2", "HSETP2", "HMNMX2"]
)
INTEGER = frozenset(
    [
        "LOP3",
        "IADD3",
        "SEL",
        "FSEL",
        "FMNMX",
        "FSETP",
        "ISETP",
        "PRMT",
        "SHF",
        "LEA",
        "F2FP",
        "PLOP3",
        "MOV",
        "VIADD",
        "IMNMX",
        "VIMNMX",
        "FSET",
        "SGXT",
        "IABS",
        "P2R",
        "R2P",
        "CS2R",
        "BMSK",
        "LOP",
        "IADD",
        "VIADDMNMX",
        "FMNMX3",
        "FCHK",
        "POPC",
        "FLO",
    ]
)
MEMORY = frozenset(
    ["LDS", "LDSM", "STS", "STSM", "SHFL", "LDG", "STG", "LDGSTS", "LDL", "STL", "MOVM", "LD", "ST"]
)


def disassemble(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and the index of every label."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools() / "nvdisasm"), "-c", "-hex", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    text = ""
    for line in map(str.strip, lines):
        if label := re.match(r"(\.L[\w$]*):", line):
            labels[label[1]] = len(instructions)
        elif first := re.match(r"/\*[0-9a-f]{4,}\*/\s+(.*?);?\s*/\* 0x[0-9a-f]{16} \*/", line):
            text = first[1].strip().rstrip(";").strip()
        elif text and (second := re.match(r"/\* (0x[0-9a-f]{16}) \*/", line)):
            control = int(second[1], 16)
            operation = re.sub(r"^\{?\s*(@!?U?P\w+\s+)?", "", text).split()[0]
            instructions.append(
                Instruction(
                    text,
                    operation,
                    stall=control >> 41 & 15,
                    sets_written=control >> 46 & 7,
                    sets_read=control >> 49 & 7,
                    waits=control >> 52 & 63,
                )
            )
            text = ""
    return instructions, labels


def main_loop(instructions: list[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """The loop with the most tensor instructions, the shortest of several: the one without masks.

    Without tensor instructions, of the loops that hold no other, the one with the most loads, the shortest of several.
    """
    spans = []
    for index, instruction in enumerate(instructions):
        target = re.search(r"`\((\.L\w+)\)", instruction.text) if instruction.name == "BRA" else None
        if target and labels.get(target[1], len(instructions)) <= index:
            spans.append((labels[target[1]], index + 1))
    if not spans:
        return instructions
    loops = [instructions[start:stop] for start, stop in spans]
    most = max(sum(x.is_tensor for x in loop) for loop in loops)
    if most == 0:
        inner = [
            instructions[a:b]
            for a, b in spans
            if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)
        ]
        return min(inner, key=lambda loop: (-sum(x.name == "LDG" for x in loop), len(loop)))
    return min((loop for loop in loops if sum(x.is_tensor for x in loop) == most), key=len)


def resident_blocks(registers: int, shared: int, warps: int, capability: int) -> int:
    """Number of blocks of a kernel resident on a multiprocessor."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = SHARED[capability] // (shared + 1024)
    return max(1, min(by_registers, by_shared, WARPS[capability] // warps, 16))


@dataclass
class _Warp:
    """State of a warp: its instruction and the events it waits for."""

    block: int
    index: int = 0
    trips: int = 0
    ready: float = 0.0
    # Clock at which its next instruction is ready.
    wakes: float = 0.0
    at_barrier: bool = False
    copies: float = 0.0
    products: float = 0.0
    groups: list[float] = field(default_factory=list)
    boards: list[list[float]] = field(default_factory=lambda: [[] for _ in range(6)])
    ends: list[float] = field(default_factory=list)


def clocks_per_trip(
    loop: list[Instruction], warps: int, blocks: int, capability: int, trips: int = 5
) -> float:
    """Clocks between two trips of a loop, all warps of all blocks running it."""
    machine = MACHINES[capability]
    costs = [_pipe(instruction, machine) for instruction in loop]
    team = [_Warp(block=number // warps) for number in range(warps * blocks)]
    pipes: list[Counter[str]] = [Counter() for _ in range(4)]
    waiting: dict[int, list[_Warp]] = {}
    unit = memory = 0.0
    clock = running = 0
    running = len(team)
    while running and clock < 10**7:
        issued, soonest = False, float("inf")
        for scheduler in range(4):
            chosen: tuple[int, _Warp, str | None, float] | None = None
            for warp in team[scheduler::4]:
                if warp.trips >= trips or warp.at_barrier:
                    continue
                pipe, cost = costs[warp.index]
                ready = warp.wakes
                if pipe:
                    ready = max(ready, pipes[scheduler][pipe])
                if pipe == "memory" and unit - clock > 32:
                    # The queue of the load and store unit is full.
                    ready = max(ready, unit - 32)
                if ready > clock:
                    soonest = min(soonest, ready)
                    continue
                age = warp.trips * len(loop) + warp.index
                if chosen is None or age < chosen[0]:
                    chosen = (age, warp, pipe, cost)
            if chosen is None:
                continue
            _, warp, pipe, cost = chosen
            instruction, issued = loop[warp.index], True
            if pipe:
                pipes[scheduler][pipe] = clock + cost  # type: ignore[assignment]  # some costs are fractions
            warp.ready = clock + max(1, instruction.stall)
            written, read = clock + 14.0, clock + 8.0
            if pipe == "memory":
                waves = _waves(instruction)
                start = max(unit, clock + 4)
                unit = start + waves
                written, read = start + waves + _latency(instruction, machine), start + waves
                if instruction.name == "LDGSTS":
                    memory = max(memory, start) + waves * 128 / machine.bandwidth
                    warp.copies = max(warp.copies, memory + machine.async_latency)
            elif pipe == "special" or instruction.name in ("S2R", "S2UR", "R2UR"):
                written = clock + machine.special_latency
            elif instruction.name == "HGMMA":
                warp.products = clock + cost + machine.tensor_latency
            if instruction.name == "LDGDEPBAR":
                warp.groups = [end for end in warp.groups if end > clock] + [warp.copies]
            for board in range(6):
                warp.boards[board] = [end for end in warp.boards[board] if end > clock]
            if instruction.sets_written < 6:
                warp.boards[instruction.sets_written].append(written)
            if instruction.sets_read < 6:
                warp.boards[instruction.sets_read].append(read)
            if instruction.name == "BAR" and "SYNC" in instruction.operation:
                warp.at_barrier = True
                waiting.setdefault(warp.block, []).append(warp)
                if len(waiting[warp.block]) == warps:
                    for other in waiting.pop(warp.block):
                        other.at_barrier = False
                        other.ready = max(other.ready, clock + machine.barrier_latency)
                        other.wakes = max(other.wakes, other.ready)
            warp.index += 1
            if warp.index == len(loop):
                warp.index, warp.trips = 0, warp.trips + 1
                warp.ends.append(clock)
                running -= warp.trips >= trips
            warp.wakes = max([warp.ready, *_awaited(loop[warp.index], warp)])
        clock = clock + 1 if issued or soonest == float("inf") else max(clock + 1, int(-(-soonest // 1)))
    # The first trips fill the pipes.
    return sum(warp.ends[-1] - warp.ends[1] for warp in team) / len(team) / (trips - 2)


def _pipe(instruction: Instruction, machine: Machine) -> tuple[str | None, float]:
    name = instruction.name
    if name in MULTIPLY:
        return "multiply", machine.multiply
    if name in INTEGER:
        return "integer", machine.integer
    if name in ("MUFU", "F2F", "I2F", "F2I"):
        return "special", machine.special
    if instruction.is_tensor:
        if size := re.search(r"HGMMA\.(\d+)x(\d+)x(\d+)", instruction.operation):
            # Four warps share the work.
            return "tensor", int(size[1]) * int(size[2]) * int(size[3]) / 4 / machine.tensor_rate
        half = "1688" in instruction.operation and "TF32" not in instruction.operation
        return "tensor", machine.tensor * (0.5 if half else 1.0)
    if name in MEMORY:
        return "memory", machine.memory
    return ("uniform", machine.uniform) if name.startswith("U") else (None, 0)


def _awaited(instruction: Instruction, warp: _Warp) -> list[float]:
    """Clocks at which the operands of an instruction are ready."""
    ends = [end for board in range(6) if instruction.waits >> board & 1 for end in warp.boards[board]]
    if instruction.name == "DEPBAR":
        allowed = re.search(r"SB0,\s*(0x[0-9a-f]+)", instruction.text)
        pending = int(allowed[1], 16) if allowed else 0
        ends += sorted(warp.groups)[: max(0, len(warp.groups) - pending)]
    if instruction.operation.startswith("WARPGROUP.DEPBAR"):
        ends.append(warp.products)
    return ends


def _waves(instruction: Instruction) -> int:
    """Trips through the load and store unit that an instruction of a warp takes."""
    if instruction.name in ("LDSM", "STSM"):
        return int(instruction.operation[-1]) if instruction.operation[-1] in "24" else 1
    return 4 if ".128" in instruction.operation else 2 if ".64" in instruction.operation else 1


def _latency(instruction: Instruction, machine: Machine) -> int:
    return {
        "LDS": machine.shared_latency - 5,
        "LDSM": machine.matrix_latency - 5,
        "SHFL": machine.shuffle_latency - 5,
        "LDG": machine.global_latency,
        "LDL": machine.global_latency,
    }.get(instruction.name, 0)
