"""Worker process of a job, or several under torchrun: execute the job spec in a file."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from dape.files import exclusive, read_json, write_atomically
from dape.plugins import load_plugins


def main(arguments: list[str]) -> int:
    """Execute the job spec; 0 on success, 1 with the reason in a file on failure."""
    parser = argparse.ArgumentParser(prog="python -m dape.lab.worker", description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument(
        "--alone", action="store_true", help="not started by a runner: do not end with the parent process"
    )
    options = parser.parse_args(arguments)
    spec = read_json(options.spec)
    if not options.alone:
        threading.Thread(target=end_with_parent, daemon=True).start()
        torch.set_num_threads(spec["threads"])
    try:
        load_plugins()
        if "RANK" in os.environ:
            work(spec)
        else:
            # A worker of a killed runner may still be saving here.
            with exclusive(f"{options.spec}.lock"):
                work(spec)
    except Exception as error:
        traceback.print_exc()
        write_atomically(spec["failure"], sentence(error))
        return 1
    return 0


def work(spec: dict[str, Any]) -> None:
    """Execute a job by its kind."""
    from dape.lab.kinds import kind_named

    kind_named(spec["kind"]).work(spec)


def sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def end_with_parent() -> None:
    """Request this process to save and end when its standard input is closed."""
    # Not sys.stdin, whose lock a thread must not hold when Python shuts down.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
