"""Language modelling as a task of the loop: windows of packed tokens, the next token of each place."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.training.seeds import derive_seed


class LanguageModelling:
    """Mean cross-entropy of `train_length` next tokens in each of `batch_size` windows.

    ids: all documents end to end, an array that may be memory-mapped. A window starts anywhere, and so may
    reach over the end of a document. Which windows make up a step depends on seed and step alone.
    """

    def __init__(
        self, model: nn.Module, ids: np.ndarray, *, train_length: int, batch_size: int, seed: int = 0
    ) -> None:
        if len(ids) <= train_length:
            raise ValueError(
                f"the training split has {len(ids)} tokens, train_length={train_length} needs at least "
                f"{train_length + 1}: use a larger corpus or a shorter training length"
            )
        self._model, self.ids = model, ids
        self.train_length, self.batch_size, self.seed = train_length, batch_size, seed

    @property
    def model(self) -> nn.Module:
        return self._model

    def batch(self, step: int) -> Tensor:
        """Windows [batch_size, train_length + 1]."""
        draw = np.random.default_rng(derive_seed("windows", self.seed, step))
        starts = draw.integers(0, len(self.ids) - self.train_length, self.batch_size)
        windows = self.ids[starts[:, None] + np.arange(self.train_length + 1)]
        return torch.from_numpy(windows.astype(np.int64))

    def shard(self, batch: Tensor, rank: int, world: int) -> Tensor:
        return batch.tensor_split(world)[rank]

    def size(self, batch: Tensor) -> int:
        return batch.shape[0] * (batch.shape[1] - 1)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
