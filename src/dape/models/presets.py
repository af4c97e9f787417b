"""Model sizes: the paper's four, and one for a laptop."""

from __future__ import annotations

from typing import Any

from dape.models.config import DapeConfig

# Layers, width, heads. 125m and 350m as in the paper's appendix; 2.7b and 6.7b as in GPT-3's table, which it follows.
PRESETS = {
    "tiny": {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256},
    "125m": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "350m": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "2.7b": {"num_hidden_layers": 32, "hidden_size": 2560, "num_attention_heads": 32},
    "6.7b": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
}


def preset(name: str, method: str = "dape1x3-kerple", **changes: Any) -> DapeConfig:
    """The configuration of size `name`, with `changes` applied."""
    if name not in PRESETS:
        raise ValueError(f'unknown preset "{name}": choose one of {", ".join(PRESETS)}')
    return DapeConfig(method=method, **{**PRESETS[name], **changes})
