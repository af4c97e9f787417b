"""`dape generate`: streamed text from a trained run."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dape.cli.parsing import parse
from dape.data import load_tokenizer
from dape.devices import device_name, find_device
from dape.generation import generate_text
from dape.loading import tokenizer_source
from dape.retrofitting.attach import record
from dape.retrofitting.files import describes_retrofit, load_retrofitted
from dape.settings import setting
from dape.training.run import load_run


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained run, also beyond its training length.

    dape generate runs/dape1x3-kerple-tiny-64-0 --prompt 'def main(' --tokens 1000
    """

    run: Path = setting(
        help="Folder of a run, a retrofitted model or an adapter.", reads="folder", positional=True
    )
    prompt: str = setting("\n", help="Prompt to continue; - reads it from standard input.")
    tokens: int = setting(256, help="Number of tokens to generate.", low=1, high=10**9)
    temperature: float = setting(
        0.8,
        help="Sampling temperature; 0 for greedy decoding.",
        low=0,
        high=1e6,
    )
    top_k: int | None = setting(None, help="Sample from this many likeliest tokens only.", low=1, high=2**31)
    top_p: float | None = setting(
        None, help="Sample from the likeliest tokens with this total probability only.", above=0, high=1
    )
    seed: int = setting(0, help="Seed of the sampling.", low=0, high=2**63 - 1)
    device: str = setting("auto", help="auto takes the GPU if there is one.", test=device_name)


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape generate")
    loaded, tokenizer_path, about = load_generator(options.run)
    model = loaded.to(find_device(options.device))  # type: ignore[arg-type]  # as in harness.py
    tokenizer = load_tokenizer(tokenizer_path)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    write(prompt)
    start = time.perf_counter()
    generate_text(
        model,
        tokenizer,
        prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        write=write,
    )
    write("\n")
    speed = options.tokens / (time.perf_counter() - start)
    total = len(tokenizer.encode(prompt)) + options.tokens
    print(
        f"[{total} tokens in all, {about}; {speed:.0f} tokens/s]",
        file=sys.stderr,
    )
    return 0


def load_generator(folder: Path) -> tuple[PreTrainedModel, str, str]:
    """Model of a run or a retrofitted one, path of its tokenizer, and a description."""
    if describes_retrofit(folder):
        model = load_retrofitted(folder, dtype=torch.float32).eval()
        return model, tokenizer_source(folder, model), f"retrofitted with {record(model).method}"
    run = load_run(folder)
    return run.model(), str(run.folder / "model"), f"trained on windows of {run.config.train_length}"
