"""Write trained runs as the models that the repository ships: bfloat16, with tokenizer, card and losses by length.

    python dev/ship_models.py models runs/code/runs/*

Each becomes models/METHOD. The card's losses are measured on the shipped weights, on the held-out documents of the run.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dape.checksums import write_checksums
from dape.data.python_corpus import PACKAGES, listed
from dape.evaluation import losses_by_length
from dape.evaluation.statistics import perplexity
from dape.models.export import export
from dape.training import load_run

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LAST, WINDOWS = 64, 64
CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: apache-2.0
tags: [dape, length-extrapolation]
---
# {method}

{description}: {parameters:,} parameters, {layers} layers of width {width}, {heads} heads, trained from scratch for
{steps:,} steps on {batch} windows of {length} tokens (seed {seed}). It shows how a method reads beyond its training
length; it is far too small for anything else.

Text: the corpus `python` of dape, long source files of {packages}; its tokenizer has {vocabulary:,} tokens and was
trained on the same text. Perplexity on {documents} files of packages that were held out whole ({held}), the last {last}
tokens of {windows} windows, errors over documents; weights in bfloat16:

| tokens of input | {heads_row} |
|---|{rule}
| perplexity | {ppl} |
| loss | {loss} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("models/{method}", trust_remote_code=True)  # needs dape installed
tokenizer = AutoTokenizer.from_pretrained("models/{method}")
```
"""


def ship(folder: Path, out: Path) -> None:
    run = load_run(folder)
    config, data = run.config, run.data()
    model = run.model()
    torch.nn.Module.to(model, torch.bfloat16)
    model.config.max_position_embeddings = config.train_length
    target = out / config.method
    export(model, target, tokenizer=AutoTokenizer.from_pretrained(folder / "model"))
    shipped = type(model).from_pretrained(target, dtype=torch.float32).eval()
    measured = losses_by_length(shipped, data.validation, LENGTHS, last=LAST, windows=WINDOWS)
    at = [measured.at(n) for n in LENGTHS]
    held = data.manifest["recipe"]["validation"]
    text = CARD.format(
        method=config.method,
        description=f"A language model with `{config.method}` attention",
        parameters=sum(p.numel() for p in model.parameters()),
        layers=model.config.num_hidden_layers,
        width=model.config.hidden_size,
        heads=model.config.num_attention_heads,
        steps=config.steps,
        batch=config.batch_size,
        length=config.train_length,
        seed=config.seed,
        packages=", ".join(f"{p} {listed()[1][p]} ({PACKAGES[p]})" for p in PACKAGES if f"{p}/" not in held),
        vocabulary=data.manifest["tokenizer"]["vocab_size"],
        documents=len(set(measured.windows.documents.tolist())),
        held=", ".join(name.rstrip("/") for name in held),
        last=LAST,
        windows=len(measured.windows),
        heads_row=" | ".join(map(str, LENGTHS)),
        rule="---|" * len(LENGTHS),
        ppl=" | ".join(f"{perplexity(loss.value):.2f}" for loss in at),
        loss=" | ".join(f"{loss.value:.3f} ± {loss.error:.3f}" for loss in at),
    )
    (target / "README.md").write_text(text, "utf-8")
    write_checksums(target)
    first, longest = (perplexity(at[index].value) for index in (0, -1))
    print(f"{target}: perplexity {first:.2f} at {LENGTHS[0]}, {longest:.2f} at {LENGTHS[-1]}")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        ship(Path(name), Path(sys.argv[1]))
