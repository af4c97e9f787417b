"""Processes that tests start: fresh interpreters, and copies of one that has imported torch and transformers already.

The imports take five seconds of CPU, so they are done once (multiprocessing's fork server) and none of them is of dape.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["transformers.modeling_utils", "transformers.models.auto.modeling_auto", "torch.distributed.fsdp", "pandas"]
)  # fmt: skip


def python(*arguments: object, **environment: str) -> str:
    """What a fresh interpreter prints, offline."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def start(function: Callable[..., Any], *arguments: object, output: Path, **environment: str) -> Any:
    """Start a copy that calls the function; what it prints is appended to the file `output`."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    process = SERVER.Process(target=_call, args=(env, str(output), function, arguments))
    # The server itself, which the first one starts, is offline too.
    with patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        process.start()
    return process


def _call(
    env: dict[str, str], output: str, function: Callable[..., Any], arguments: tuple[object, ...]
) -> None:
    os.environ.clear()
    os.environ.update(env)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        code = function(*arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.exit(code)


def script(path: str, arguments: tuple[str, ...]) -> None:
    """Run a script, or code, as `python` would."""
    sys.argv = [path, *arguments]
    if path.endswith(".py"):
        sys.path.insert(0, str(Path(path).parent))
        runpy.run_path(path, run_name="__main__")
    else:
        exec(path, {"__name__": "__main__"})


def copies(path: object, *arguments: object, world: int = 1, **environment: str) -> str:
    """What a script, or code, prints in a copy, or in `world` copies that are ranks of one run."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        ranks = [
            {**address, "RANK": str(n), "WORLD_SIZE": str(world)} if world > 1 else {} for n in range(world)
        ]
        output, words = Path(folder, "output"), tuple(map(str, arguments))
        running = [start(script, str(path), words, output=output, **rank, **environment) for rank in ranks]
        for process in running:
            process.join(600)
        said = output.read_text()
        assert [process.exitcode for process in running] == [0] * world, said
        return said.strip()


@dataclass
class Worker:
    """A run of an experiment in a copy, in place of a worker of the launcher `Local`."""

    process: Any

    @staticmethod
    def start_for(launcher: Any, job: Any, at_once: int) -> "Worker":
        """For `Local.start`."""
        from dape.lab.experiment import note, write_spec

        arguments = ["--alone", str(write_spec(job, launcher.folder))]
        return Worker(start(_work, arguments, output=note(job, launcher.folder, "log")))

    def poll(self) -> int | None:
        return self.process.exitcode

    def end(self) -> None:
        self.process.join()


def _work(arguments: list[str]) -> int:
    from dape.lab import run_job

    return run_job.main(arguments)
