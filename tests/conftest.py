"""What all tests share: one thread, here and in the processes that they start, and a fixed seed."""

import os
from collections.abc import Iterator

# Before torch is loaded. Threads that wait by spinning take ten times the CPU time where tests run side by side.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import pytest
import torch

from dape import POSITIONS, SCORES
from dape.ops.score_attention import native
from dape.plugins import LOADED


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> None:
    torch.manual_seed(0)
    # The tensors are tiny: more threads would only wait for each other.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _what_is_registered_is_gone_after_a_test() -> Iterator[None]:
    """Plug-ins too: the environment names them to later commands."""
    shared = [(table, dict(table)) for table in (os.environ, POSITIONS, SCORES, LOADED)]
    yield
    for table, before in shared:
        for name in [name for name in table if table[name] != before.get(name)]:
            del table[name]
        table.update(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that tests of the kernel were left out because it does not load."""
    if native.PROBLEM not in (None, native.NOT_BUILT):
        terminalreporter.write_line(native.PROBLEM, red=True)
