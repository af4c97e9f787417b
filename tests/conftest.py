"""What all tests share: one thread, here and in the processes that they start, and a fixed seed."""

import os

import pytest
import torch

from dape.ops.score_attention import native

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> None:
    torch.manual_seed(0)
    # The tensors are tiny: more threads would only wait for each other.
    torch.set_num_threads(1)


def pytest_configure() -> None:
    """A kernel that does not load ends the run: its tests would be left out in silence."""
    if native.PROBLEM not in (None, native.NOT_BUILT):
        raise pytest.UsageError(native.PROBLEM)
