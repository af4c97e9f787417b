"""The last rows alone are the last rows of everything, for every encoding, padded or not."""

import pytest
import torch

from dape.models import DapeForCausalLM, preset
from dape.positions import POSITIONS

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scores", ["", "dape1x3-"])
@pytest.mark.parametrize("position", POSITIONS)
def test_last_rows_are_those_of_all(position, scores, padded):
    model = DapeForCausalLM(preset("tiny", scores + position, **SIZES)).eval().model
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
