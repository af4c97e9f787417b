"""What all tests share: one thread, a fixed seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_configure() -> None:
    # The tensors are tiny: more threads would only wait for each other.
    torch.set_num_threads(1)
