"""Bidirectional encoder with the same attention, for tasks that label the tokens of an input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dape.methods import check_embeddings, encoding_index, layer_methods
from dape.models.attention import Attention, Context
from dape.ops.score_attention import Visible
from dape.ops.score_attention.types import EVERYTHING
from dape.positions import Positions


class EncoderLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + MLP(x)), ReLU inside."""

    def __init__(
        self, attention: Attention, hidden_size: int, intermediate_size: int, dropout: float
    ) -> None:
        super().__init__()
        self.attention = attention
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.dropout = nn.Dropout(dropout)


class Encoder(nn.Module):
    """Token ids [B, T] to logits [B, T, num_labels], every token seeing every other (Ruoss et al. 2023's shape).

    Defaults: 5 layers of width 64, 8 heads, MLP 256, post-LayerNorm, dropout 0.1, bias-free q, k, v.

    method: of all layers, or names separated by "/", which are cycled over the layers.
    """

    def __init__(
        self,
        vocab_size: int,
        num_labels: int,
        *,
        method: str = "dape1x3-kerple",
        hidden_size: int = 64,
        num_layers: int = 5,
        num_heads: int = 8,
        intermediate_size: int = 256,
        dropout: float = 0.1,
        score_width: int = 32,
        score_options: dict[str, object] | None = None,
        position_options: dict[str, object] | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        methods = layer_methods(method, num_layers)
        check_embeddings(methods)
        for parsed in methods:
            if parsed.direction == "causal":
                raise ValueError(f'"{parsed.name}" has no meaning where the future is visible: use a decoder')
        self.encoding_index = encoding_index(methods)
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.encodings = nn.ModuleList(
            methods[self.encoding_index.index(number)].build_position(
                num_heads=num_heads,
                head_dim=hidden_size // num_heads,
                hidden_size=hidden_size,
                **(position_options or {}),
            )
            for number in range(max(self.encoding_index) + 1)
        )
        self.layers = nn.ModuleList(
            EncoderLayer(
                Attention(
                    hidden_size,
                    num_heads,
                    scores=methods[layer].build_scores(
                        num_heads, width=score_width, layer=layer, **(score_options or {})
                    ),
                    qkv_bias=False,
                    backend=backend,
                    layer=layer,
                ),
                hidden_size,
                intermediate_size,
                dropout,
            )
            for layer in range(num_layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(hidden_size, num_labels)

    def forward(
        self, ids: Tensor, *, positions: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Logits for ids [B, T].

        positions: [1 or B, T], by default 0, 1, 2, … from the first token of each row.
        padding_mask: [B, T], ones for tokens and zeros for padding at the ends of rows.
        """
        visible = EVERYTHING if padding_mask is None else Visible.from_padding(padding_mask)
        tokens = Positions.of(ids.shape[1], causal=False, device=ids.device).queries
        if visible.first is not None and bool(visible.first.any()):
            tokens = (tokens - visible.first).clamp(min=0)
        both = Positions(tokens, tokens, False, visible, consecutive=True)
        if positions is not None:
            tokens, both = positions, Positions(positions, positions, False, visible)
        x = self.dropout(self.encodings[0].embed(self.embed(ids), tokens))  # type: ignore[operator]  # a ModuleList forgets types
        context = Context(both)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            encoding = self.encodings[self.encoding_index[index]]
            x = layer.attention_norm(x + layer.dropout(layer.attention(x, encoding, context)))
            x = layer.mlp_norm(x + layer.dropout(layer.down(F.relu(layer.up(x)))))
        return self.classify(x)
