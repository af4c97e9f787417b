"""The encoder: bidirectional, the same attention, padding that changes nothing."""

import pytest
import torch

from dape import POSITIONS, ScoreAttention, randomized_positions
from dape.lab.tasks import SHOWN
from dape.methods import PRESETS
from dape.models import Encoder

OTHERS = ("kerple[canon=a]", "rope[window=3]", "kerple/nope[normaliser=ssmax]", "stickbreaking/rope")
# Every encoding, also convolved, every processor and normaliser, every name of several layers, options of every method.
METHODS = list(dict.fromkeys([*SHOWN, *(f"dape1x3-{name}" for name in POSITIONS), *OTHERS]))
CAUSAL = {*PRESETS, *OTHERS} - {"kerple/nope[normaliser=ssmax]"}


def is_causal(method: str) -> bool:
    """Whether its formula needs an order of the tokens in which the future is hidden."""
    gated = ("selective-rope", "selfextend", "cope", "fox", "data-alibi")
    return method in CAUSAL or "window" in method or method.split("[")[0].endswith(gated)


def small(method: str) -> Encoder:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "score_width": 5}
    return Encoder(6, 3, method=method, **sizes).double().eval()


@pytest.mark.parametrize("method", METHODS)
def test_every_token_sees_every_other_or_the_method_says_why_not(method):
    if is_causal(method):
        with pytest.raises(
            ValueError, match=r'^"[^"]+" has no meaning where the future is visible: use a decoder$'
        ):
            small(method)
        return
    model, ids = small(method), torch.randint(0, 6, (1, 7))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 6
    assert ((model(ids) - model(changed)).abs().amax(-1) > 0).all()


def attended(method: str, v: torch.Tensor) -> torch.Tensor:
    """Output of a layer of one's own that sees the future, parameters and inputs the same in each call."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 4, 7, 8)
    return ScoreAttention(method, num_heads=4, head_dim=8)(
        q, k, v, is_causal=False, hidden=torch.ones(1, 7, 32)
    )


REFUSALS = (
    r"has no meaning where|window=\d+ is for causal|names the methods|canon=a acts|added to token embeddings"
)


@pytest.mark.parametrize("method", METHODS)
def test_so_do_layers_of_ones_own(method):
    v = torch.randn(1, 4, 7, 8)
    if is_causal(method) or "/" in method or "sinusoidal" in method:
        with pytest.raises(ValueError, match=REFUSALS):
            attended(method, v)
        return
    later = v.clone()
    later[:, :, -1] += 1
    assert not torch.equal(attended(method, v)[:, :, 0], attended(method, later)[:, :, 0])


def test_positions_are_data():
    model, ids = small("dape1x3-relative"), torch.randint(0, 6, (2, 7))
    told = model(ids, positions=torch.arange(7)[None])
    torch.testing.assert_close(told, model(ids), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(model(ids, positions=randomized_positions(7, 100)), told)


def test_the_published_shape():
    model = Encoder(5, 5)
    assert len(model.layers) == 5
    assert model.layers[0].attention.query.bias is None
    assert model.layers[0].up.out_features == 256
    assert model.layers[0].attention.num_heads == 8


def test_layers_with_methods_of_their_own():
    model = small("kerple/nope[normaliser=ssmax]")
    assert [type(encoding).__name__ for encoding in model.encodings] == ["Kerple", "NoPE"]
    assert model.layers[1].attention.scores.normaliser == "ssmax"
    with pytest.raises(ValueError, match="cannot be the encoding of some"):
        small("kerple/sinusoidal")
