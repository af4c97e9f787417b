"""`dape generate`: text from a trained run, as it is written."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from dape.data import load_tokenizer
from dape.generation import generate_text
from dape.training.parallel import find_device
from dape.training.run import load_run


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained run, for as long as you like: past its training length too.

    dape generate runs/dape1x3-kerple-tiny-64-0 --prompt 'def main(' --tokens 1000
    """

    run: tyro.conf.Positional[Path]
    """The folder that `dape train` wrote."""
    prompt: str = "\n"
    """What to continue; - reads it from standard input."""
    tokens: int = 256
    """How many tokens to write."""
    temperature: float = 0.8
    """Below 1 likelier tokens gain, above 1 they lose; 0 takes the likeliest each time."""
    top_k: int | None = None
    """Draw from this many likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability only."""
    seed: int = 0
    """The same seed, the same text."""
    device: str = "auto"
    """auto takes the GPU if there is one."""


def main(arguments: list[str]) -> int:
    options = tyro.cli(Options, args=arguments, prog="dape generate")
    run = load_run(options.run)
    model = run.model().to(find_device(options.device))  # type: ignore[arg-type]  # as in harness.py
    tokenizer = load_tokenizer(run.folder / "model")
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
        f"[{total} tokens in all, trained on windows of {run.config.train_length}; {speed:.0f} tokens/s]",
        file=sys.stderr,
    )
    return 0
