"""Normalisers other than the softmax, around any score processor: sinks, scales by length, stick-breaking, entmax."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.ops.score_attention import ScoreProgram
from dape.scores.base import ScoreProcessor

Normaliser = Literal["softmax", "sink", "ssmax", "logn", "stickbreaking", "entmax", "asentmax"]

CAN_START_AS_SOFTMAX = ("softmax", "sink", "ssmax")
REFERENCES = {
    "sink": "OpenAI 2025, arXiv 2508.10925",
    "ssmax": "Nakanishi 2025, arXiv 2501.19399",
    "logn": "Puvvada et al. 2025, arXiv 2504.08719",
    "stickbreaking": "Tan et al. 2024, arXiv 2410.17980",
    "entmax": "Peters et al. 2019, arXiv 1905.05702",
    "asentmax": "Vasylenko et al. 2025, arXiv 2506.16640",
}
# Initial root of a sink with `zero_init`: its square is below the resolution of float32 at 1.
SMALL_ROOT = 1e-4
# Keeps the logarithm finite for a root of 0.
TINY = 1e-12


class Normalised(ScoreProcessor):
    """A score processor with another normaliser than the softmax; n is the number of keys that a query sees.

    sink:  exp(lᵢ) / (Σ exp(lⱼ) + a²), one learnable a per head: a head may attend to nothing (gpt-oss, which learns
           log a²). It starts at 1.
    ssmax: softmax(s · log n · l), one learnable s per head (Nakanishi 2025); it starts at 1 / log `length`, so that with
           `length` keys it is the softmax.
    logn:  softmax(log(a + n) / log a · l) in evaluation, the softmax in training (SWAN, Puvvada et al. 2025, appendix D).
           a is `length`; the paper fits it to a trained model.
    stickbreaking: βⱼ Π (1 − βₗ) over j < l ≤ i, β = σ(logits) (Tan et al. 2024): near keys first, no positions needed.
           Causal attention only. A query's own key takes part and what is left of the stick is dropped, as with
           `attend_current` in the authors' kernels; their models leave the own key out and add what is left times the
           own value (the first) or times a learned vector, before a normalisation of each head (the last).
    entmax: α-entmax with α = 1.5: exact zeros (Peters et al. 2019).
    asentmax: entmax of (1 + β (log(n + 1))^γ) · l (Vasylenko et al. 2025), β = softplus(b), γ = 2 tanh(c), one learnable b
           and c per head, both 0 at first. In the paper's models b and c are linear maps of each query's token; the
           authors' code can also learn β and γ per head, as they are.
    zero_init: start as the softmax: a sink with a² = 10⁻⁸, whose gradient is not as small (that of its logit would be);
           SSMax as (s · log n + b) · l with s = 0 and a learnable b = 1.
    """

    def __init__(
        self,
        processor: ScoreProcessor,
        num_heads: int,
        normaliser: Normaliser,
        *,
        length: int = 512,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        if normaliser not in get_args(Normaliser):
            raise ValueError(f'normaliser="{normaliser}", expected one of {", ".join(get_args(Normaliser))}')
        if zero_init and normaliser not in CAN_START_AS_SOFTMAX:
            raise ValueError(f'normaliser="{normaliser}" cannot start as the softmax: pass zero_init=False')
        if length < 2:
            raise ValueError(f"length={length} must be at least 2: its logarithm divides")
        self.processor, self.length, self.zero_init = processor, length, zero_init
        self.normaliser = normaliser
        self.before_rotation, self.heads_per_value = processor.before_rotation, processor.heads_per_value
        self.norm_scale = processor.norm_scale
        fixed = {"length_scale": 1 / math.log(length)}
        # Initial values of the vectors over heads.
        self.starts = {
            "sink": {"sink_root": SMALL_ROOT if zero_init else 1.0},
            "ssmax": {"length_scale": 0.0, "length_offset": 1.0} if zero_init else fixed,
            "logn": fixed,
            "asentmax": {"length_scale": 0.0, "length_power": 0.0},
        }.get(normaliser, {})
        for name, start in self.starts.items():
            vector = torch.full((num_heads,), start)
            if normaliser == "logn":
                self.register_buffer(name, vector, persistent=False)
            else:
                self.register_parameter(name, nn.Parameter(vector))

    def reset_parameters(self) -> None:
        self.processor.reset_parameters()
        for name, start in self.starts.items():
            nn.init.constant_(getattr(self, name), start)

    def program(self) -> ScoreProgram:
        program = self.processor.program()
        own: dict[str, Tensor] = {name: getattr(self, name) for name in self.starts}
        if self.normaliser == "sink":
            # In float32 or finer: half precision would round the square to 0.
            root = own["sink_root"].to(torch.promote_types(own["sink_root"].dtype, torch.float32))
            return replace(program, sink=torch.log(root.square() + TINY))
        if self.normaliser == "ssmax":
            return replace(program, **own)  # type: ignore[arg-type]  # vectors
        if self.normaliser == "asentmax":
            scale, power = own["length_scale"], own["length_power"]
            return replace(
                program,
                length_scale=F.softplus(scale),
                length_offset=torch.ones_like(scale),
                length_power=2 * torch.tanh(power),
                length_shift=1.0,
                normaliser="entmax",
            )
        if self.normaliser == "logn":
            shift = float(self.length)
            return program if self.training else replace(program, **own, length_shift=shift)  # type: ignore[arg-type]
        return replace(program, normaliser=self.normaliser)
