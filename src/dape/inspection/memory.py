"""How much memory looking inside takes, known before it is taken."""

from __future__ import annotations

import torch

from dape.devices import check_fits
from dape.models import DapeConfig

# What a tile of rows may take, in all the forms in which it exists at a time.
TILE_BYTES = 256 * 2**20


def bytes_per_pair(config: DapeConfig) -> int:
    """Of one query and one key in a tile: channels of the convolutions and a number of maps a head, in float32."""
    return 4 * (4 * config.score_width + 20 * config.num_attention_heads)


def affordable_rows(config: DapeConfig, num_tokens: int) -> int:
    """Queries that make a tile."""
    return max(1, min(64, TILE_BYTES // (num_tokens * bytes_per_pair(config))))


def memory_needed(config: DapeConfig, num_tokens: int, *, num_maps: int, resolution: int, rows: int) -> int:
    """Bytes at the peak, roughly: the states of all layers, one layer at work, a tile, and the maps themselves."""
    assert config.intermediate_size is not None
    states = 4 * num_tokens * config.hidden_size * (config.num_hidden_layers + 1)
    working = 4 * num_tokens * (6 * config.hidden_size + 2 * config.intermediate_size)
    tile = rows * num_tokens * bytes_per_pair(config)
    pixels = min(resolution, num_tokens) ** 2
    # Sums in float64 while they are made; afterwards float32 and the page's picture.
    maps = pixels * (8 * config.num_attention_heads * 5 + 8 * num_maps)
    # A quarter more for what allocators keep.
    return (states + working + tile + maps) * 5 // 4


def check_memory(
    config: DapeConfig, num_tokens: int, device: torch.device, *, num_maps: int, resolution: int, rows: int
) -> None:
    """Raise, with what to do, where the memory there is would not do."""
    needed = memory_needed(config, num_tokens, num_maps=num_maps, resolution=resolution, rows=rows)
    check_fits(
        needed,
        f"looking at {num_tokens} tokens",
        advice=f"look at fewer tokens, or at fewer layers and heads, or at a lower resolution than {resolution}",
        device=device,
    )
