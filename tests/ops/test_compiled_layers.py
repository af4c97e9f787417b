"""Layers of one's own around the op: one graph, forward and backward, and exports whose length is open."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import dape
from dape.ops.score_attention import cpu


class Layer(nn.Module):
    def __init__(self, scores, encoding):
        super().__init__()
        self.scores, self.encoding = scores, encoding

    def forward(self, x):
        q, k, v = x.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        positions = dape.Positions.of(x.shape[1], device=x.device)
        bias = None
        if self.encoding is not None:
            bias = self.encoding.bias(q, k, positions, scale=q.shape[-1] ** -0.5)
        return dape.attention(q, k, v, self.scores, bias=bias).transpose(1, 2).flatten(2)


def layers():
    torch.manual_seed(0)
    return {
        "kerple": Layer(dape.ScoreConv(4), dape.POSITIONS["kerple"](num_heads=4)),
        "no bias": Layer(dape.ScoreConv(4, bias_channels=False), None),
        "plain": Layer(None, dape.POSITIONS["alibi"](num_heads=4)),
        "nope": Layer(None, None),
        "rows": Layer(dape.ScoreConv(4, query_kernel_size=3), dape.POSITIONS["kerple"](num_heads=4)),
    }


# Inductor's import warns of PyTorch's own.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["kerple", "no bias", "plain"])
def test_a_layer_is_one_graph_of_inductor(name):
    layer = layers()[name]
    x = torch.randn(2, 40, 3 * 32, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="inductor")
    results = []
    for call in (layer, compiled):
        gradients = torch.autograd.grad(call(x).square().sum(), [x, *layer.parameters()])
        results.append((call(x).detach(), *gradients))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("name", ["kerple", "no bias", "plain", "nope", "rows"])
def test_one_graph_serves_every_length(name):
    """One graph without a break: with sizes left open from the start, or from the second length on."""
    layer = layers()[name]
    for dynamic, most in ((True, 1), (None, 2)) if name == "kerple" else ((True, 1),):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for length in (64, 33, 300):
            x = torch.randn(2, length, 3 * 32, requires_grad=True)
            eager, graph = (
                torch.autograd.grad(call(x).square().sum(), [x, *layer.parameters()])
                for call in (layer, compiled)
            )
            torch.testing.assert_close(graph, eager)
        assert counters["stats"]["unique_graphs"] <= most
        assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", ["kerple", "no bias", "plain"])
def test_an_exported_layer_takes_other_lengths(name, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(cpu, "unsupported", lambda problem: "there is no compiled kernel")
    layer = layers()[name].eval()
    example = torch.randn(2, 40, 3 * 32)
    length = torch.export.Dim("length", min=9, max=4096)
    with torch.no_grad():
        exported = torch.export.export(layer, (example,), dynamic_shapes=({1: length},)).module()
    for length in (12, 333, 700):
        x = torch.randn(2, length, 3 * 32)
        torch.testing.assert_close(exported(x), layer(x))
