"""Our own models with another method: shared weights stay, and the old model can teach the new one."""

import numpy as np
import pytest
import torch
from builders import decoder

from dape.models import DapeForCausalLM
from dape.retrofitting.matching import LayerMatching
from dape.retrofitting.replace_method import replace_method
from dape.retrofitting.tuning import Tuning


@pytest.mark.parametrize(
    "method", ["dape1x3-kerple", "kerple", "fox", "talking-alibi", "dape1x3-rope", "rope[canon=ac]"]
)
def test_the_weights_that_both_have_stay(method):
    base = decoder("rope", vocab_size=61)
    model = replace_method(base, method)
    assert model.config.method == method
    assert base.config.method == "rope"
    own = model.state_dict()
    for name, value in base.state_dict().items():
        if name in own and ".encodings." not in name:
            assert torch.equal(own[name], value), name
    ids = torch.randint(61, (2, 12))
    same = torch.allclose(model(ids).logits, base(ids).logits, atol=1e-5)
    assert same == (method in ("dape1x3-rope", "rope[canon=ac]"))


def test_an_exchanged_model_is_saved_and_loaded(tmp_path):
    model = replace_method(decoder("rope", vocab_size=61), "dape1x3-kerple")
    model.save_pretrained(tmp_path)
    ids = torch.randint(61, (2, 12))
    again = DapeForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_old_model_teaches_the_new_one():
    base = decoder("rope", vocab_size=61)
    for same in ("dape1x3-rope", "rope[canon=ac]"):
        assert LayerMatching(replace_method(base, same), base).loss(torch.arange(12)[None]) < 1e-8
    model = replace_method(base, "dape1x3-kerple")
    how = {"train_length": 16, "batch_size": 4, "match_steps": 30, "added_rate": 3.0}
    task = Tuning(model, np.arange(300) % 61, teacher=base, **how)
    assert len(task.rate_factors()) == 2 * (2 + 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        loss = task.loss(model, task.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:2])
