"""The C++ kernel on every score program, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import needs_kernel
from op_cases import PROGRAMS, Call, Case, build, distances, replace

from dape.ops.score_attention import (
    ScoreProgram,
    SeparableBias,
    Stage,
    TileBias,
    attention,
    by_tiles,
    cpu,
    native,
    op,
)

pytestmark = needs_kernel

RUNS = list(PROGRAMS)
BIASES = ("none", "dense", "dense of the batch", "distance", "separable", "tile")
VISIBLE = ("all", "left padding", "window", "documents", "rows that see nothing")
RAGGED = Case(heads=4, groups=2, queries=61, keys=75, head_dim=9, width=9)


# Sums over the whole image, most of whose terms cancel: their errors are those of the rows.
SUMS = ("b1", "b2", "b3", "row", "sink", "length_scale", "length_offset")


def tame(call: Call) -> Call:
    """The same call with weights that keep the size of what they read, so that no softmax is a step."""
    for name, leaf in call.leaves.items():
        if name.startswith("w"):
            leaf.data.mul_(leaf[0].numel() ** -0.5)
    # Its square is the bias.
    if isinstance(call.bias, TileBias):
        call.leaves["bias"].data.mul_(0.5)
    return call


def check(case: Case) -> None:
    """At most twice the error of the float32 reference, against float64."""
    truth = tame(build(case)).results("reference")
    single = tame(build(case, torch.float32))
    ours, theirs = (distances(single.results(name), truth) for name in ("cpu", "reference"))
    epsilon = torch.finfo(torch.float32).eps
    for name, error in ours.items():
        floor = 4 * case.batch * case.queries * epsilon if name in SUMS else 16 * epsilon
        assert error <= 2 * theirs[name] + floor, (name, error, theirs[name])


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("program", RUNS)
def test_every_program_with_every_bias(program, bias, causal):
    check(replace(RAGGED, program=program, bias=bias, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("visible", VISIBLE[1:])
@pytest.mark.parametrize("program", RUNS)
def test_every_program_with_every_visibility(program, visible, causal):
    check(replace(RAGGED, program=program, visible=visible, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("program", RUNS)
def test_a_bias_by_tiles_in_several_tiles(program, causal, monkeypatch):
    """Tiles bring the rows before their own along, and rows stand where they stood in the whole call."""
    monkeypatch.setattr(by_tiles, "TILE_NUMBERS", 4 * RAGGED.keys * 17)
    for visible in ("all", "documents"):
        check(replace(RAGGED, program=program, bias="tile", visible=visible, causal=causal))


def conv(c: Case, draw, kernel: tuple[int, int], left: int, depth: int = 2) -> ScoreProgram:
    channels = c.heads * (1 if c.bias == "none" else 2)
    stages = []
    for n in range(depth):
        outputs = c.heads if n == depth - 1 else c.width
        weight = draw(f"w{n}", outputs, channels, *kernel)
        slope = 1.0 if n == depth - 1 else 0.01
        stages.append(Stage(weight, draw("b2" if n == depth - 1 else f"b{n}", outputs), left, slope=slope))
        channels = outputs
    return ScoreProgram(tuple(stages))


MORE = {
    "3x3": lambda c, draw: conv(c, draw, (3, 3), 1),
    "2x5 to the left": lambda c, draw: conv(c, draw, (2, 5), 4),
    "2x4 to the right": lambda c, draw: conv(c, draw, (2, 4), 0),
    "1x3, three deep": lambda c, draw: conv(c, draw, (1, 3), 1, depth=3),
    "3x2, three deep": lambda c, draw: conv(c, draw, (3, 2), 1, depth=3),
    "6x11 by heads": lambda c, draw: ScoreProgram(
        (Stage(draw("w1", c.heads, 1, 6, 11), left=5, groups=c.heads),), residual="bias"
    ),
    "12 rows": lambda c, draw: ScoreProgram((Stage(draw("w1", c.heads, 1, 12, 2), left=1, groups=c.heads),)),
    "capped 3x3": lambda c, draw: replace(conv(c, draw, (3, 3), 1), softcap=0.7),
    "capped, loosely": lambda c, draw: ScoreProgram(softcap=50.0),
    "steeper below zero": lambda c, draw: ScoreProgram(
        (Stage(draw("w1", c.heads, c.heads, 1, 3), draw("b2", c.heads), 1, slope=2.5),), residual="scores"
    ),
    "activated logits": lambda c, draw: ScoreProgram(
        (Stage(draw("w1", c.heads, c.heads, 1, 3), draw("b2", c.heads), 1, slope=0.3),), residual="scores"
    ),
    "after the softmax by heads": lambda c, draw: ScoreProgram(
        post=(
            Stage(draw("w1", c.heads, 1, 3, 3), left=2, groups=c.heads),
            Stage(draw("w2", c.heads, 2, 1, 1), groups=c.heads // 2),
        )
    ),
}


@pytest.mark.parametrize("visible", ["all", "documents"])
@pytest.mark.parametrize("bias", ["none", "distance", "separable"])
@pytest.mark.parametrize("program", MORE)
def test_kernels_over_queries_and_keys(program, bias, visible, monkeypatch):
    monkeypatch.setitem(PROGRAMS, program, MORE[program])
    check(replace(RAGGED, program=program, bias=bias, visible=visible))


@pytest.mark.parametrize("program", [*RUNS, *MORE])
@pytest.mark.parametrize("kind", ["whole tiles", "shorter than a tile", "heads by themselves"])
def test_a_bias_by_distance_is_a_table(program, kind, monkeypatch):
    """As many queries as keys, nothing hidden: the first stage begins from a table by distance."""
    monkeypatch.setitem(PROGRAMS, program, {**PROGRAMS, **MORE}[program])
    tokens = 5 if kind == "shorter than a tile" else 101
    case = replace(RAGGED, queries=tokens, keys=tokens, program=program, bias="distance")
    if kind == "heads by themselves":
        monkeypatch.setitem(PROGRAMS, program, _by_heads)
    check(case)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("program", [*RUNS, *MORE])
def test_a_few_queries(program, bias, causal, monkeypatch):
    """As in decoding, by a kernel whose lanes are keys: several chunks of them, split over threads."""
    monkeypatch.setitem(PROGRAMS, program, {**PROGRAMS, **MORE}[program])
    torch.set_num_threads(3)
    for number, visible in enumerate(VISIBLE):
        queries = (1, 5, 8, 3, 7)[number]
        keys = 613 if number % 2 else queries + number
        case = replace(RAGGED, queries=queries, keys=keys, program=program, bias=bias, causal=causal)
        case = replace(case, visible=visible)
        with torch.no_grad():
            truth = {"out": tame(build(case)).attend("reference")}
            single = tame(build(case, torch.float32))
            ours, theirs = (distances({"out": single.attend(name)}, truth) for name in ("cpu", "reference"))
        assert ours["out"] <= 2 * theirs["out"] + 16 * torch.finfo(torch.float32).eps, (case, ours, theirs)


def test_training_on_a_few_queries():
    """Both passes compute the same logits, bit for bit, where gradients are wanted."""
    check(replace(RAGGED, queries=7, keys=7, program="ssmax"))


@torch.no_grad()
def test_a_few_queries_that_a_dense_bias_hides():
    q, bias = torch.randn(1, 4, 2, 8), torch.zeros(1, 4, 2, 30)
    bias[:, :, 1] = -torch.inf
    k = torch.randn(1, 4, 30, 8)
    for program in (ScoreProgram(sink=torch.zeros(4)), build(replace(RAGGED, program="talking")).program):
        out = attention(q, k, k, program.to(torch.float32), bias=bias, backend="cpu")
        assert out[:, :, 0].isfinite().all()
        assert (out[:, :, 1] == 0).all()


def _by_heads(c: Case, draw) -> ScoreProgram:
    weight = draw("w1", c.heads, 2, 2, 5)
    return ScoreProgram((Stage(weight, draw("b2", c.heads), 2, c.heads, 0.2),))


@pytest.mark.parametrize("program", ["talking", "mta", "grouped", "post", "3x3"])
@pytest.mark.parametrize("build_name", native.builds())
def test_every_build(build_name, program, monkeypatch):
    monkeypatch.setitem(PROGRAMS, "3x3", MORE["3x3"])
    with native.use_build(build_name):
        check(replace(RAGGED, program=program, visible="documents"))
        check(replace(RAGGED, program=program, heads=8, groups=8, width=12))


@pytest.mark.parametrize(("left", "taps"), [(left, taps) for taps in (1, 2, 3, 5) for left in range(taps)])
def test_every_reach_at_every_place_in_a_chunk(left, taps, monkeypatch):
    """Nothing is lost at the end of the walks, wherever the last key falls in a chunk of keys."""

    def program(c: Case, draw) -> ScoreProgram:
        pre = (
            Stage(draw("w1", 2, 1, 2, taps), draw("b1", 2), left),
            Stage(draw("w2", 1, 2, 1, taps), draw("b2", 1), left),
        )
        return ScoreProgram(pre, (Stage(draw("w3", 1, 1, 1, taps), draw("b3", 1), left),))

    monkeypatch.setitem(PROGRAMS, "reach", program)
    for keys in range(24, 48):
        case = Case(batch=1, heads=1, groups=1, queries=keys, keys=keys, head_dim=2, bias="none")
        case = replace(case, program="reach", causal=keys % 2 == 0)
        exact, ours = build(case).results("reference"), build(case, torch.float32).results("cpu")
        for name, value in ours.items():
            torch.testing.assert_close(
                value.double(), exact[name], rtol=1e-3, atol=1e-3, msg=f"{name}, {keys}"
            )


@pytest.mark.parametrize("bias", ["dense", "distance", "separable"])
@pytest.mark.parametrize("program", ["mta", "post", "grouped"])
def test_threads(program, bias):
    case = replace(RAGGED, program=program, bias=bias)
    results = {}
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results[threads], again = (build(case, torch.float32).results("cpu") for _ in range(2))
        for name, value in results[threads].items():
            assert torch.equal(value, again[name]), f"{name} differs between two runs on {threads} threads"
    for name, value in results[1].items():
        torch.testing.assert_close(results[5][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("program", RUNS)
def test_every_output_is_written(program, monkeypatch):
    """Outputs start as NaN: what the kernel fails to write shows."""
    monkeypatch.setattr(
        native, "allocate", lambda *shape, dtype=torch.float32: torch.full(shape, torch.nan, dtype=dtype)
    )
    case = replace(RAGGED, program=program, visible="rows that see nothing")
    for name, value in build(case, torch.float32).results("cpu").items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("sink", [-200.0, 0.0, 200.0])
def test_sinks_of_any_size(sink):
    q = torch.randn(1, 2, 30, 4)
    program = ScoreProgram(sink=torch.full((2,), sink))
    expected = attention(q.double(), q.double(), q.double(), program.to(torch.float64), backend="reference")
    torch.testing.assert_close(attention(q, q, q, program, backend="cpu"), expected.float())


def test_plain_attention_with_a_separable_bias_makes_no_tiles(monkeypatch):
    q = torch.randn(2, 4, 60, 8, requires_grad=True)
    bias = SeparableBias(torch.randn(2, 4, 60, requires_grad=True), torch.randn(1, 4, 60, requires_grad=True))
    expected = attention(q, q, q, bias=bias, backend="reference")
    monkeypatch.setattr(by_tiles, "attend", None)
    out = attention(q, q, q, bias=bias)
    torch.testing.assert_close(out, expected)
    leaves = (q, bias.row, bias.column)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_opcheck():
    call = build(replace(RAGGED, program="sink", visible="window"), torch.float32)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_watched", lambda tensors: True)
        patch.setattr(op, "_forward", lambda *args: seen.append(args) or (call.q, None))
        call.attend("cpu")
    torch.library.opcheck(op._forward, seen[0])


def test_second_derivative_is_refused():
    call = build(replace(RAGGED, program="talking"), torch.float32)
    (grad,) = torch.autograd.grad(call.attend("cpu").square().sum(), call.q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        grad.sum().backward()


def deep(**options: object) -> ScoreProgram:
    return ScoreProgram((Stage(torch.zeros(3, 1, 2, 1), groups=3, **options),))


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (ScoreProgram(deep().pre, leak_future=True), "leak_future"),
        (ScoreProgram(deep().pre * 12), "the program reads 12"),
        (ScoreProgram((Stage(torch.zeros(3, 3, 1, 1)),) * 13), "at most 12 stages, got 13"),
    ],
)
def test_says_why_it_cannot_run(program, sentence):
    call = build(Case(bias="none", kernel=None), torch.float32)
    with pytest.raises(ValueError, match='backend="cpu" cannot run this call: ') as error:
        attention(call.q, call.k, call.v, program, backend="cpu")
    assert sentence in str(error.value)
    attention(call.q, call.k, call.v, program, causal=True)


def test_chosen_for_every_program():
    from dape.ops.score_attention.api import choose, make_problem

    for program in RUNS:
        for bias in ("separable", "tile"):
            call = build(replace(RAGGED, program=program, bias=bias), torch.float32)
            problem = make_problem(call.q, call.k, call.v, call.program, bias=call.bias)
            assert choose(problem) is cpu, (program, bias)
