"""Our own models with another method: common weights are kept, encodings and processors are new."""

from __future__ import annotations

import copy
from typing import cast

from torch import nn

from dape.methods import canonical, parse_layers
from dape.models import DapeConfig, DapeForCausalLM
from dape.models.canon import Canon
from dape.rebuildable import constructor_parameters
from dape.retrofitting.attach import gentle_start
from dape.scores import SCORES


def replace_method(model: DapeForCausalLM, method: str, *, width: int = 32) -> DapeForCausalLM:
    """A model of the same sizes and weights with another method; processors that can begin as the identity do.

    The given model is not modified: it is the teacher of the new one.
    """
    config = cast(DapeConfig, copy.deepcopy(model.config))
    config.method, config.score_width, config.position_options = canonical(method), width, {}
    processors = {SCORES[layer.processor] for layer in parse_layers(config.method)}
    knows = all("zero_init" in constructor_parameters(processor) for processor in processors)
    config.score_options = {"zero_init": True} if knows else {}
    new = DapeForCausalLM(config)
    own = (".encodings.", ".attention.scores.", ".canon_")
    kept = {
        name: value for name, value in model.state_dict().items() if not any(part in name for part in own)
    }
    missing, unexpected = new.load_state_dict(kept, strict=False)
    assert not unexpected, unexpected
    assert all(any(part in name for part in own) for name in missing), missing
    for encoding in new.model.encodings:
        gentle_start(encoding)
    for module in new.modules():
        if isinstance(module, Canon):
            nn.init.zeros_(module.weight)
    like = next(model.parameters())
    nn.Module.to(new, like.device, like.dtype)
    return new.train(model.training)
