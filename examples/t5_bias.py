"""T5 with its position bias trained in O(T) memory: attn_implementation="dape" and nothing else.

T5 builds its bias for all pairs of tokens, [heads, T, T]. Through our op it comes by distance, 2 T numbers a head.

python examples/t5_bias.py --length 2048
"""

import argparse
import sys
import time

import torch
from transformers import T5Config, T5ForConditionalGeneration

import dape.hf


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a T5, mT5 or Switch checkpoint; by default a small one without training"
    )
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    if given.model:
        model = T5ForConditionalGeneration.from_pretrained(given.model)
    else:
        config = T5Config(
            vocab_size=1000,
            d_model=128,
            d_kv=32,
            d_ff=256,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
    model.eval()
    ids = torch.randint(3, 1000, (1, given.length))
    labels = torch.randint(3, 1000, (1, 16))
    # Without this, the first pass still builds the bias of all pairs.
    dape.hf.use_distances(model)
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    gradients = {}
    for name in ("eager", "dape"):
        model.set_attn_implementation(name)
        model.zero_grad()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        gradients[name] = table.grad.clone()
        print(
            f"{name}: loss {loss.item():.6f}, forward and backward {time.perf_counter() - start:.2f} s",
            flush=True,
        )
    difference = (gradients["dape"] - gradients["eager"]).abs().max().item()
    print(f"gradients of the bias differ by at most {difference:.1e}")
    return difference / gradients["eager"].abs().max().item()


if __name__ == "__main__":
    main(sys.argv[1:])
