"""Multi-token attention (Golovneva et al. 2025): scores convolved over queries and keys, weights mixed across heads."""

from __future__ import annotations

from dape.ops.score_attention import ScoreProgram
from dape.scores.base import ScoreProcessor, linear_stage
from dape.scores.keyconv import identity_conv
from dape.settings import check_counts


class MultiTokenAttention(ScoreProcessor):
    """Logits conv(S) + B with one kq×k kernel per head, then weights mixed linearly in groups of heads.

    kernel_size, query_kernel_size: keys (centred on a key's own) and queries (a query's own and those before it).
    head_group:     number of heads that mix after the softmax; 1 for none.
    mix_before:     also mix heads, in the same groups, before the softmax.
    convolve_after: also convolve the weights, before heads mix.

    Starts as the identity. The paper's normalisation and gate of each head's output belong to the attention block
    (`head_norm` and `head_gate` of DapeConfig).
    """

    summary = "heads convolved over queries and keys, then mixed in groups"
    reference = "Golovneva et al. 2025, arXiv 2504.00927"
    bare_kernel = (6, 11)
    listed = ((6, 11),)

    def __init__(
        self,
        num_heads: int,
        *,
        kernel_size: int = 11,
        query_kernel_size: int = 6,
        head_group: int = 2,
        mix_before: bool = False,
        convolve_after: bool = False,
    ) -> None:
        super().__init__()
        check_counts(
            num_heads=num_heads,
            kernel_size=kernel_size,
            query_kernel_size=query_kernel_size,
            head_group=head_group,
        )
        if num_heads % head_group:
            raise ValueError(f"head_group={head_group} does not divide num_heads={num_heads}")
        self.num_heads, self.groups, self.left = num_heads, num_heads // head_group, kernel_size // 2
        kernel = (query_kernel_size, kernel_size)
        self.conv = identity_conv(num_heads, kernel, num_heads, self.left)
        self.conv_after = identity_conv(num_heads, kernel, num_heads, self.left) if convolve_after else None
        self.mix_before = identity_conv(num_heads, (1, 1), self.groups, 0) if mix_before else None
        self.mix = identity_conv(num_heads, (1, 1), self.groups, 0) if head_group > 1 else None

    def program(self) -> ScoreProgram:
        before, mixed = (linear_stage(mix, groups=self.groups) for mix in (self.mix_before, self.mix))
        conv, after = (linear_stage(x, self.left, self.num_heads) for x in (self.conv, self.conv_after))
        return ScoreProgram(before + conv, after + mixed, residual="bias")
