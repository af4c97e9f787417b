"""`dape generate`: streamed text from a model."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from dape.cli.parsing import parse
from dape.devices import device_name, find_device
from dape.settings import COUNT, SEED, setting


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a model, also beyond its training length.

    dape generate runs/dape1x3-kerple-tiny-64-0 --prompt 'def main(' --tokens 1000
    """

    model: str = setting(
        help="A run, a model's folder, an adapter, a GGUF file, or hf:NAME of the Hugging Face hub.",
        positional=True,
    )
    prompt: str = setting("\n", help="Prompt to continue; - reads it from standard input.")
    tokens: int = setting(256, help="Number of tokens to generate.", **COUNT)
    temperature: float = setting(0.8, help="Sampling temperature; 0 for greedy decoding.", low=0, high=1e6)
    top_k: int | None = setting(None, help="Sample from this many likeliest tokens only.", low=1, high=2**31)
    top_p: float | None = setting(
        None, help="Sample from the likeliest tokens with this total probability only.", above=0, high=1
    )
    seed: int = setting(0, help="Seed of the sampling.", **SEED)
    device: str = setting("auto", help="auto takes the GPU if there is one.", test=device_name)


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape generate")
    # transformers takes seconds to import, and --help does not need it.
    import torch

    from dape.data import load_tokenizer
    from dape.generation import generate_text
    from dape.loading import load_named
    from dape.retrofitting.attach import is_retrofitted, record

    named = load_named(options.model, dtype=torch.float32)
    model = named.model.to(find_device(options.device))  # type: ignore[arg-type]  # as in harness.py
    tokenizer = load_tokenizer(named.tokenizer)
    about = f"a window of {named.window}"
    if named.run is not None:
        about = f"trained on windows of {named.window}"
    elif is_retrofitted(model):
        about = f"retrofitted with {record(model).method}"
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    write(prompt)
    start = time.perf_counter()
    names = ("tokens", "temperature", "top_k", "top_p", "seed")
    sampling: dict[str, Any] = {name: getattr(options, name) for name in names}
    generate_text(model, tokenizer, prompt, **sampling, write=write)
    write("\n")
    speed = options.tokens / (time.perf_counter() - start)
    total = len(tokenizer.encode(prompt)) + options.tokens
    print(f"[{total} tokens in all, {about}; {speed:.0f} tokens/s]", file=sys.stderr)
    return 0
