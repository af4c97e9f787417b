"""What a user's project does with us; a type checker must take it as it is."""

import torch

import dape
from dape.models import DapeConfig, DapeForCausalLM

q = torch.randn(1, 4, 8, 16)
conv: dape.ScoreConv = dape.ScoreConv(num_heads=4, kernel_size=3)
encoding: dape.PositionEncoding = dape.POSITIONS["kerple"](num_heads=4)
bias = encoding.bias(q, q, dape.Positions.of(8), scale=0.25)
out: torch.Tensor = dape.attention(q, q, q, conv, bias=bias)
config = DapeConfig(
    method="dape1x3-kerple", vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
)
model = DapeForCausalLM(config)
logits: torch.Tensor = model(torch.zeros(1, 4, dtype=torch.long)).logits
