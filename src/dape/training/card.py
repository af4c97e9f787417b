"""The model card of a trained run: README.md beside its weights, as model hubs show it."""

from __future__ import annotations

from collections.abc import Sequence

from dape import __version__
from dape.training.config import TrainConfig
from dape.training.metrics import Record

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [dape, length-extrapolation]
---
# {method}

A causal language model trained with [dape](https://arxiv.org/abs/2410.04798) {version}.

| | |
|---|---|
| method | `{method}` |
| layers × width, heads | {layers} × {width}, {heads} |
| parameters | {parameters:,} |
| training length | {length} tokens |
| training | {steps} steps of {batch} windows on `{corpus}`, seed {seed} |
| tokenizer | `{tokenizer}` |
| loss of the last step | {loss} |

Perplexity by input length is not part of training: `dape eval FOLDER --lengths {length},{longer}` measures it on held-out
text, at the training length and beyond it.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # needs dape installed
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```
"""


def model_card(
    config: TrainConfig, sizes: tuple[int, int, int], parameters: int, metrics: Sequence[Record]
) -> str:
    """The card of a run whose model has `sizes` (layers, width, heads)."""
    layers, width, heads = sizes
    method = config.method if isinstance(config.method, str) else "/".join(config.method)
    return CARD.format(
        method=method,
        version=__version__,
        layers=layers,
        width=width,
        heads=heads,
        parameters=parameters,
        length=config.train_length,
        longer=4 * config.train_length,
        steps=config.steps,
        batch=config.batch_size,
        corpus=config.corpus,
        seed=config.seed,
        tokenizer=config.tokenizer,
        loss=f"{metrics[-1]['loss']:.3f}" if metrics else "unknown",
    )
