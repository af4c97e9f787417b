"""A bias that is a curve (FIRE) in the C++ kernel, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import EPSILON, needs_kernel
from torch import Tensor

from dape.ops.score_attention import TileBias, Visible, attention, by_tiles, conv_program, cpu, native
from dape.ops.score_attention.types import Bias
from dape.positions.base import Positions
from dape.positions.fire import FIRE

pytestmark = needs_kernel

CASES = {
    "plain": {},
    "two tiles, ragged": {"queries": 61, "keys": 75},
    "both directions": {"queries": 50, "keys": 57, "causal": False},
    "padding": {"batch": 3, "first": [0, 7, 39]},
    "convolutions": {"queries": 61, "keys": 75, "conv": True, "first": [3, 0]},
    "convolutions without the bias beside them": {"conv": True, "residual": "scores"},
    "knots far apart": {"width": 3, "queries": 100, "keys": 100},
}


def call(
    dtype: torch.dtype,
    *,
    batch: int = 2,
    heads: int = 3,
    queries: int = 40,
    keys: int = 40,
    width: int = 16,
    causal: bool = True,
    conv: bool = False,
    residual: str = "scores+bias",
    first: list[int] | None = None,
) -> tuple[dict[str, Tensor], dict]:
    """Leaves by name, and the arguments of attention."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

    leaves = {
        "q": draw(batch, heads, queries, 8),
        "k": draw(batch, heads, keys, 8),
        "v": draw(batch, heads, keys, 8),
    }
    torch.manual_seed(1)
    # A threshold in the middle: some queries are measured by it, some by their own place.
    fire = FIRE(heads, width=width, threshold=keys / 2).to(dtype)
    leaves |= dict(fire.named_parameters())
    program = None
    if conv:
        weights = {
            "w1": draw(9, 2 * heads, 1, 3, scale=0.2), "b1": draw(9, scale=0.3),
            "w2": draw(heads, 9, 1, 3, scale=0.2), "b2": draw(heads, scale=0.3),
        }  # fmt: skip
        leaves |= weights
        program = conv_program(*weights.values(), 1, residual)  # type: ignore[arg-type]  # the literal is a string here
    starts = None if first is None else torch.tensor(first)[:, None]
    visible = Visible(first=starts)
    place = torch.arange(keys).expand(1 if first is None else batch, -1)
    place = place if starts is None else (place - starts).clamp(min=0)
    positions = Positions(place[:, keys - queries :], place, causal, visible, consecutive=True)
    bias = fire.bias(leaves["q"], leaves["k"], positions, scale=1.0)
    return leaves, {"program": program, "bias": bias, "causal": causal, "visible": visible}


def gradient_of_output(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(2))


def results(dtype: torch.dtype, backend: str, case: dict) -> dict[str, Tensor]:
    leaves, arguments = call(dtype, **case)
    out = attention(leaves["q"], leaves["k"], leaves["v"], backend=backend, **arguments)
    grads = torch.autograd.grad(out, list(leaves.values()), gradient_of_output(out).to(dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def check(case: dict) -> None:
    """At most twice the error of the float32 reference, against float64."""
    exact, plain = (results(dtype, "reference", case) for dtype in (torch.float64, torch.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_tiles, "attend", lambda *arguments: pytest.fail("evaluated by tiles"))
        ours = results(torch.float32, "cpu", case)
    for key, truth in exact.items():
        floor = 16 * EPSILON * max(1.0, float(truth.abs().max()))
        if key.startswith("mlp") or key in ("rate", "threshold_factor", "b2"):
            # Sums over the whole map, most of whose terms cancel: the rounding of as many terms as there are gradients.
            floor += EPSILON * float(gradient_of_output(exact["out"]).abs().sum())
        allowed = 2 * float((plain[key] - truth).abs().max()) + floor
        assert float((ours[key] - truth).abs().max()) <= allowed, key


@pytest.fixture(autouse=True)
def _same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", native.builds())
@pytest.mark.parametrize("case", CASES)
def test_error_is_at_most_twice_the_references(case, name):
    with native.use_build(name):
        check(CASES[case])


def test_the_same_on_any_number_of_threads():
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([results(torch.float32, "cpu", CASES["padding"]) for _ in range(2)])
    for one, again in found:
        assert all(torch.equal(one[name], again[name]) for name in one)
    for name, value in found[0][0].items():
        torch.testing.assert_close(found[2][0][name], value, rtol=1e-4, atol=1e-4)


def test_tiles_where_the_kernel_has_no_curve(monkeypatch):
    """A few queries, other programs and positions that are not consecutive take the bias by tiles."""
    tiles = []
    attend = by_tiles.attend
    monkeypatch.setattr(by_tiles, "attend", lambda *a: tiles.append(1) or attend(*a))
    _, arguments = call(torch.float32, queries=5)
    bias: Bias = arguments["bias"]
    assert isinstance(bias, TileBias)
    for queries, curve, expected in ((5, bias.curve, 1), (40, None, 1), (40, bias.curve, 0)):
        leaves, arguments = call(torch.float32, queries=queries)
        changed = TileBias(arguments["bias"].tile, 1, curve and arguments["bias"].curve)
        tiles.clear()
        out = attention(leaves["q"], leaves["k"], leaves["v"], bias=changed, backend="cpu")
        wanted = attention(leaves["q"], leaves["k"], leaves["v"], bias=changed, backend="reference")
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        assert len(tiles) == expected
    assert not cpu.takes_curve(call_problem(queries=40, heads=2, program="other"))


def call_problem(*, program: str, **case: int):
    from dape.ops.score_attention import ScoreProgram, Stage
    from dape.ops.score_attention.api import make_problem

    leaves, arguments = call(torch.float32, **case)
    other = ScoreProgram((Stage(torch.zeros(2, 2, 1, 1)),)) if program == "other" else None
    return make_problem(leaves["q"], leaves["k"], leaves["v"], other, bias=arguments["bias"])
