"""A whole GPT with processed scores: train on text files, compile, generate with a cache.

python examples/gpt.py my_texts/*.txt --method dape1x3-kerple --steps 500
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dape


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, method: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.attend = dape.ScoreAttention(method, num_heads=num_heads, head_dim=width // num_heads)

    def forward(self, x: Tensor, cache: dape.Cache | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, cache=cache).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes to logits [B, T, 256]."""

    def __init__(self, width: int, num_layers: int, num_heads: int, method: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, method) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: Tensor, cache: dape.Cache | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, ids: Tensor, num_tokens: int, temperature: float = 0.8) -> Tensor:
        cache, new = dape.Cache(), ids
        for _ in range(num_tokens):
            logits = self(new, cache)[:, -1] / temperature
            new = torch.multinomial(logits.softmax(-1), 1)
            ids = torch.cat([ids, new], 1)
        return ids


def read(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Bytes for training, and the last tenth for evaluation."""
    files = files or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    data = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def windows(data: Tensor, count: int, length: int) -> Tensor:
    starts = torch.randint(len(data) - length, (count, 1))
    return data[starts + torch.arange(length + 1)]


def loss_of(model: nn.Module, ids: Tensor, last: int | None = None) -> Tensor:
    """Mean loss of the last tokens; all by default."""
    logits, targets, rows = model(ids[:, :-1]), ids[:, 1:], slice(-last if last else None, None)
    return F.cross_entropy(logits[:, rows].flatten(0, 1), targets[:, rows].flatten())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="texts; by default Python's own library")
    parser.add_argument("--method", default="dape1x3-kerple")
    sizes = {"steps": 300, "length": 64, "batch": 16, "width": 128, "layers": 3, "heads": 4, "tokens": 100}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    training, held_out = read(given.files)
    model = GPT(given.width, given.layers, given.heads, given.method)
    run = torch.compile(model, fullgraph=True) if given.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=given.steps, pct_start=0.1)
    for step in range(given.steps):
        loss = loss_of(run, windows(training, given.batch, given.length))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, given.steps // 10) == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        for times in (1, 2, 4, 8):
            torch.manual_seed(1)
            ids = windows(held_out, 32, 8 * given.length)[:, -times * given.length - 1 :]
            print(f"{times} × the training length: loss {loss_of(model, ids, given.length // 2).item():.3f}")
    text = model.generate(training[None, : given.length], given.tokens)[0]
    print(bytes(text.tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
