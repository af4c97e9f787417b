"""What is decided once for all calls of one signature: that the arguments fit, which backend runs, the operator's plan.

A signature holds all that decisions depend on, but no values and no number of keys: shapes, dtypes, options, what needs
a gradient. Calls of the C++ kernel have plans; a call without one is checked and decided by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention import cpu, native, op
from dape.ops.score_attention.program import ScoreProgram
from dape.ops.score_attention.types import EVERYTHING, Bias, DistanceBias, Problem, Visible

# With more signatures than that, their sizes are not those of one model: all are forgotten.
MOST_PLANS = 1024

# Names of the tensors, the operator's plan, and a prepared call of one decoding step.
Plan = tuple[tuple[str, ...], dict[str, Any], cpu.DecodeCall | None]


# A call's signature, its tensors in the order of the operator's, its lowest distance, and whether any gradient is wanted.
Signed = tuple[tuple, list[Tensor], int, bool]


class Plans:
    """Plans by signature; None where a signature has no plan."""

    def __init__(self) -> None:
        self.known: dict[tuple, Plan | None] = {}

    def run(self, signed: Signed) -> Tensor | None:
        """The output by the plan of that signature, or None."""
        signature, tensors, lowest, wanted = signed
        known = self.known.get(signature)
        if known is None:
            return None
        names, plan, step = known
        if step is not None and not wanted and (out := step.run(tensors, lowest)) is not None:
            return out
        return op.run_unwatched("cpu", names, plan, lowest, tensors, wanted)

    def add(self, signed: Signed, problem: Problem, backend: object) -> None:
        """Keep the plan of a checked call that this backend runs."""
        signature, *_ = signed
        if signature in self.known:
            return
        if len(self.known) >= MOST_PLANS:
            self.known.clear()
        self.known[signature] = _plan(problem) if backend is cpu else None


PLANS = Plans()


def _plan(problem: Problem) -> Plan | None:
    tensors, plan, _ = cpu.describe(problem)
    names = tuple(name for name, tensor in tensors.items() if tensor is not None)
    # Tensors that are computed from arguments, tables or another dtype for instance, need the description each time.
    visible, bias = problem.visible, problem.bias
    own = {"q": problem.q, "k": problem.k, "v": problem.v, "first": visible.first, "last": visible.last}
    own |= dict(problem.program.tensors()) | (
        {"values": bias.values} if isinstance(bias, DistanceBias) else {}
    )
    present = [tensor for tensor in tensors.values() if tensor is not None]
    if not all(tensor is own.get(name) for name, tensor in zip(names, present, strict=True)):
        return None
    serves = cpu.DecodeCall.serves(names, plan, problem.q.shape[2])
    return names, plan, cpu.DecodeCall(names, plan, present) if serves else None


def sign(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    program: ScoreProgram,
    bias: Bias,
    causal: bool,
    visible: Visible | None,
    scale: float | None,
    dropout: float,
    backend: str,
) -> Signed | None:
    """The call's signature; None for a call that has no plan, among them those whose lengths do not fit."""
    if torch.compiler.is_compiling() or op.watching():
        return None
    tensors, lowest = [q, k, v], 0
    if type(bias) is DistanceBias:
        tensors.append(bias.values)
        lowest = bias.lowest
    elif bias is not None:
        return None
    if visible is None:
        visible = EVERYTHING
    elif type(visible) is not Visible:
        return None
    for bound in (visible.first, visible.last):
        if bound is not None:
            tensors += (bound,)
    for _, tensor in program.tensors():
        tensors += (tensor,)
    # Loops without calls: this is done in every layer and step.
    described: list[object] = []
    wanted, enabled = False, torch.is_grad_enabled()
    for x in tensors:
        # A tensor of another class decides itself what happens to it.
        if type(x) not in op.PLAIN_CLASSES or not x.is_cpu:
            return None
        needs = x.requires_grad
        described += x.dtype, needs
        wanted = wanted or (enabled and needs)
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (bias is not None and bias.values.ndim != 2):
        return None
    batch, num_heads, num_queries, head_dim = q.shape
    entries, groups, num_keys, key_width = k.shape
    # A call without numbers, with too few keys or distances, is refused or special.
    if not batch * num_heads * num_queries * head_dim or num_keys < num_queries:
        return None
    if bias is not None:
        nearest = 0 if causal else 1 - num_queries
        if lowest > nearest or lowest + bias.values.shape[1] < num_keys:
            return None
    # Keys, values and biases without their lengths.
    described += entries, groups, key_width, None if bias is None else bias.values.shape[0]
    for x in tensors[3 if bias is None else 4 :]:
        described += (x.shape,)
    signature = (
        program.signature, q.shape, causal, scale, dropout, backend, visible.first is None, visible.last is None,
        wanted, native.PROBLEM, *described,
    )  # fmt: skip
    return signature, tensors, lowest, wanted
