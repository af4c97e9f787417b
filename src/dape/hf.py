"""`attn_implementation="dape"` for any model of transformers whose attention goes through its interface.

Importing this module registers it. `use_distances(model)` lets T5 and its relatives pass their position bias by distance,
O(T) numbers, from the first forward pass on; without it, from the second.
"""

from dape.models.interface import NAME, attend, interval_mask, use_distances

__all__ = ["NAME", "attend", "interval_mask", "use_distances"]
