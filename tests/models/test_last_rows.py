"""The last rows alone are the last rows of everything, for every encoding, padded or not."""

import pytest
import torch

from dape.models import DapeForCausalLM, preset
from dape.positions import POSITIONS

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}


METHODS = [scores + position for scores in ("", "dape1x3-") for position in POSITIONS]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "dape3x3-kerple", "dape2x1-fire"])
def test_last_rows_are_those_of_all(method, padded):
    model = DapeForCausalLM(preset("tiny", method, **SIZES)).eval().model
    ids = torch.randint(0, 64, (2, 23))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    with torch.no_grad():
        everything = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        for rows in (1, 7, 23):
            last = model(ids, attention_mask=mask, use_cache=False, last_rows=rows).last_hidden_state
            assert last.shape == (2, rows, 32)
            torch.testing.assert_close(last, everything[:, -rows:], atol=1e-5, rtol=1e-5)
