"""The encoder: bidirectional, the same attention, padding that changes nothing."""

import pytest
import torch

from dape import POSITIONS, randomized_positions
from dape.models import Encoder

BOTH = [
    prefix + name
    for name, encoding in POSITIONS.items()
    if encoding.direction == "both"
    for prefix in ("", "dape-", "dape1x3-")
]


def small(method: str) -> Encoder:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "score_width": 5}
    return Encoder(6, 3, method=method, **sizes).double().eval()


@pytest.mark.parametrize("method", BOTH)
def test_every_token_sees_every_other(method):
    model, ids = small(method), torch.randint(0, 6, (1, 7))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 6
    assert ((model(ids) - model(changed)).abs().amax(-1) > 0).all()


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


def test_an_encoding_without_meaning_here_is_refused():
    with pytest.raises(ValueError, match='"cope" has no meaning where the future is visible'):
        Encoder(5, 5, method="cope")
