"""Give a pretrained model positions and a score convolution that reach further, and tune it on text.

python examples/retrofit.py HuggingFaceTB/SmolLM2-135M --texts my_texts/*.txt --length 512 --steps 200
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dape
from dape.retrofitting import parameter_groups


def small_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            max_position_embeddings=64,
        )
    )


def train(model: torch.nn.Module, ids: Tensor, length: int, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(parameter_groups(model, rate, added_rate=5.0))
    model.train()
    for step in range(steps):
        starts = torch.randint(len(ids) - length, (8, 1))
        window = ids[starts + torch.arange(length)]
        loss = model(input_ids=window, labels=window).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 5) == 0:
            print(f"  step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()


@torch.no_grad()
def losses(model: torch.nn.Module, ids: Tensor, length: int) -> list[float]:
    """Loss of the same last tokens, with 1, 2, 4 and 8 times `length` tokens of input."""
    longest, last = 8 * length, length // 2
    windows = ids[: len(ids) // longest * longest].view(-1, longest)[:16]
    found = []
    for times in (1, 2, 4, 8):
        window = windows[:, -times * length :]
        labels = window.clone()
        labels[:, :-last] = -100
        found.append(model(input_ids=window, labels=labels).loss.item())
    return found


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="a causal language model; by default a small Llama, trained first"
    )
    parser.add_argument("--texts", nargs="+", type=Path, required=True)
    parser.add_argument("--method", default="dape1x3-kerple")
    parser.add_argument("--length", type=int, default=64, help="tokens in a window")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("retrofitted"))
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    text = "\n\n".join(path.read_text("utf-8") for path in given.texts)
    if given.model:
        model = AutoModelForCausalLM.from_pretrained(given.model)
        ids = AutoTokenizer.from_pretrained(given.model)(text, return_tensors="pt")["input_ids"][0]
    else:
        model, ids = small_llama(), torch.tensor(list(text.encode()))
    cut = len(ids) * 4 // 5
    if not given.model:
        print("a small Llama learns the text")
        train(model, ids[:cut], given.length, given.steps, 3e-3)
    model.eval()
    base = losses(model, ids[cut:], given.length)
    # An input cut to what the base was trained on costs nothing: a retrofit has to beat the first row.
    table = {f"base, cut to {given.length}": base[:1] * 4, "base": base}
    print(f"retrofit with {given.method}")
    dape.retrofit(model, given.method)
    train(model, ids[:cut], given.length, given.steps, 1e-3)
    table[given.method] = losses(model, ids[cut:], given.length)
    print("loss at 1, 2, 4, 8 × the length:")
    for name, values in table.items():
        print(f"  {name:18}", *(f"{value:.3f}" for value in values))
    model.save_pretrained(given.out)
    dape.load_retrofitted(given.out)
    print(f"saved; dape.load_retrofitted({str(given.out)!r}) loads it")
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
