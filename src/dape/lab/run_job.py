"""Worker process of a run, or several under torchrun: execute the job spec in a file."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

from dape.errors import sentence
from dape.files import exclusive, write_atomically
from dape.lab.runs import job_of
from dape.plugins import load_plugins


def main(arguments: list[str]) -> int:
    """Execute the job spec FOLDER/jobs/NAME.json; 0 on success, 1 with the reason in a file on failure.

    --alone: not started by a runner, so it does not end with the parent process.
    """
    spec = Path(arguments[-1]).absolute()
    folder = spec.parent.parent
    if "--alone" not in arguments:
        threading.Thread(target=end_with_parent, daemon=True).start()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        load_plugins()
        job = job_of(spec.read_text("utf-8"))
        if "RANK" in os.environ:
            job.work(folder)
        else:
            # A worker of a killed runner may still be saving here.
            with exclusive(folder / "jobs" / f"{job.training}.lock"):
                job.work(folder)
    except Exception as error:
        traceback.print_exc()
        write_atomically(spec.with_suffix(".failure"), sentence(error))
        return 1
    return 0


def end_with_parent() -> None:
    """Request this process to save and end when its standard input is closed."""
    # Not sys.stdin, whose lock a thread must not hold when Python shuts down.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
