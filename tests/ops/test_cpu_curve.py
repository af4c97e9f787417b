"""A bias that is a curve (FIRE) in the C++ kernel, against the definition in float64."""

import pytest
import torch
from op_cases import RAGGED, Case, assert_as_exact, assert_equal, build, needs_kernel, replace

from dape.ops.score_attention import TileBias, by_tiles, cpu, native
from dape.ops.score_attention.api import make_problem

pytestmark = needs_kernel

PLAIN = Case(queries=40, keys=40, head_dim=8, width=16, kernel=None, bias="curve")
CASES = {
    "plain": PLAIN,
    "two tiles, ragged": PLAIN.but(queries=61, keys=75),
    "both directions": PLAIN.but(queries=50, keys=57, causal=False),
    "padding": PLAIN.but(batch=3, visible="left padding"),
    "convolutions": PLAIN.but(queries=61, keys=75, kernel=3, width=9, visible="left padding"),
    "convolutions without the bias beside them": PLAIN.but(kernel=3, width=9, residual="scores"),
    "knots far apart": PLAIN.but(width=3, queries=100, keys=100),
}


@pytest.fixture
def _no_tiles(monkeypatch):
    attend = by_tiles.attend

    def refused(problem, bias, tile):
        assert tile is not cpu._attend, "evaluated by tiles"
        return attend(problem, bias, tile)

    monkeypatch.setattr(by_tiles, "attend", refused)


@pytest.mark.usefixtures("_no_tiles")
@pytest.mark.parametrize("name", native.builds())
@pytest.mark.parametrize("case", CASES)
def test_error_is_at_most_twice_the_references(case, name):
    with native.use_build(name):
        assert_as_exact(CASES[case], "cpu")


def test_tiles_where_the_kernel_has_no_curve(monkeypatch):
    """A few queries, other programs and positions that are not consecutive take the bias by tiles."""
    tiles, attend = [], by_tiles.attend
    monkeypatch.setattr(by_tiles, "attend", lambda *given: tiles.append(1) or attend(*given))
    for queries, curve, expected in ((5, True, 1), (40, False, 1), (40, True, 0)):
        call = build(PLAIN.but(queries=queries), torch.float32)
        assert isinstance(call.bias, TileBias)
        call.bias = TileBias(call.bias.tile, 1, call.bias.curve if curve else None)
        tiles.clear()
        out = call.attend("cpu")
        assert len(tiles) == expected
        assert_equal({"out": out.detach()}, {"out": call.attend("reference").detach()}, 1e-4)
    other = build(RAGGED.but(program="talking"), torch.float32).program
    four = build(replace(PLAIN, heads=4, groups=4), torch.float32)
    assert not cpu.takes_curve(make_problem(four.q, four.k, four.v, other, bias=four.bias))
