"""What all tests share: one thread a worker, no cache of kernels between runs, a fixed seed."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_configure() -> None:
    # Two workers on two cores: more threads would only fight.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
