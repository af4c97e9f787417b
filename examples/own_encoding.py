"""A position encoding of your own, with every score processor, checked and trained.

python examples/own_encoding.py --method dape1x3-gaussian
"""

import argparse
import sys

import torch
from gpt import main as train_gpt
from torch import Tensor, nn

import dape
from dape.conformance import properties
from dape.positions import DistanceEncoding


class Gaussian(DistanceEncoding):
    """−(distance / width)²: each head looks as far as it learns to."""

    summary = "−(distance / width)², a learned width per head"

    def __init__(self, num_heads: int, *, farthest: float = 64.0) -> None:
        super().__init__()
        self.farthest = farthest
        self.log_width = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            heads = torch.arange(1, len(self.log_width) + 1)
            self.log_width.copy_(torch.log(self.farthest ** (heads / len(heads))))

    def at(self, distance: Tensor, *, causal: bool) -> Tensor:
        """Bias [heads, *distance.shape] at integer distances of any shape."""
        (log_width,) = self(distance.device)
        return -((distance / log_width.exp().view(-1, *[1] * distance.dim())) ** 2)


dape.register_position("gaussian", Gaussian)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="dape1x3-gaussian[farthest=32]")
    given, further = parser.parse_known_args(arguments)
    method = dape.parse_method(given.method)
    for name, holds, causal in properties(method):
        if "compiled" not in name:
            holds(method, causal)
            print(f"checked: {name.replace('_', ' ')}", flush=True)
    train_gpt(["--method", given.method, *further])


if __name__ == "__main__":
    main(sys.argv[1:])
