"""A small vision transformer: the scores of patches, biased by their distance in the image, then convolved.

python examples/vit.py --method dape1x3-kerple
python examples/vit.py --method nope            # the same without: patches are a bag
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dape

SIDE, PATCH = 32, 4


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int, method: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.attend = dape.ScoreAttention(method, num_heads=num_heads, head_dim=width // num_heads)
        if self.attend.encoding.additive:
            # Distances in two dimensions; one class token before the patches.
            self.attend.encoding = dape.positions.Grid(self.attend.encoding, prefix=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, is_causal=False).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images [B, 1, height, width] to logits; any size, because positions are distances."""

    def __init__(self, num_classes: int, width: int, num_layers: int, num_heads: int, method: str) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.layers = nn.ModuleList(Layer(width, num_heads, method) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.summary.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def strokes(count: int, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Noisy images of two bright patches, and their class: side by side, one above the other, or apart."""
    cells = side // PATCH
    labels = torch.randint(3, (count,))
    row, column = torch.randint(cells - 1, (2, count))
    far = torch.randint(2, cells - 1, (count,))
    other_row = torch.where(labels == 1, row + 1, torch.where(labels == 2, (row + far) % cells, row))
    other_column = torch.where(
        labels == 0, column + 1, torch.where(labels == 2, (column + far) % cells, column)
    )
    grid, image = torch.zeros(count, cells, cells), torch.arange(count)
    grid[image, row, column] = grid[image, other_row, other_column] = 1.0
    return grid.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[:, None] + 0.1 * torch.randn(
        count, 1, side, side
    ), labels


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="dape1x3-kerple")
    for name, value in {"steps": 300, "batch": 64, "width": 64, "layers": 2, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = ViT(3, given.width, given.layers, given.heads, given.method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(given.steps):
        images, labels = strokes(given.batch)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, given.steps // 10) == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    right = {}
    with torch.no_grad():
        for side in (SIDE, SIDE + 16):
            images, labels = strokes(512, side)
            right[side] = (model(images).argmax(-1) == labels).float().mean().item()
            print(f"accuracy on images of {side} × {side}: {right[side]:.1%}")
    return right[SIDE]


if __name__ == "__main__":
    main(sys.argv[1:])
