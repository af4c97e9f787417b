"""Conformance properties of methods, each a function that raises if a method violates it.

Each is checked on one attention layer with its encoding, in float64, for any method of the package or of users. The
tests run every property over every pair of encoding and processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from dape.layers import Cache
from dape.methods import Method
from dape.models.attention import Attention, Context
from dape.ops.score_attention import Visible
from dape.positions import PositionEncoding, Positions, randomized_positions

HIDDEN, HEADS, KEY_VALUE_HEADS, TOKENS = 16, 4, 2, 9

Property = Callable[[Method, bool], None]


class Layer(nn.Module):
    """One attention layer with its encoding, from embeddings to output, with parameters that do not hide mistakes."""

    def __init__(
        self, method: Method, dtype: torch.dtype = torch.float64, backend: str = "auto", seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoding: PositionEncoding = method.build_position(
                num_heads=HEADS, head_dim=HIDDEN // HEADS, hidden_size=HIDDEN
            )
            self.attention = Attention(
                HIDDEN,
                HEADS,
                scores=method.build_scores(HEADS, width=8),
                num_key_value_heads=KEY_VALUE_HEADS,
                window=method.window,
                backend=backend,
            )
            # Encodings that start at zero, and processors that start as the identity, would hide mistakes.
            for parameter in self.encoding.parameters():
                nn.init.uniform_(parameter, 0.1, 1.0)
            with torch.no_grad():
                for parameter in self.attention.scores.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
        self.to(dtype)

    def forward(self, x: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        x = self.encoding.embed(x, positions.queries)
        return self.attention(x, self.encoding, Context(positions), cache)


def tokens(batch: int = 1, count: int = TOKENS, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Hidden states [batch, count, HIDDEN]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)


def in_chunks(layer: Layer, x: Tensor, tokens_at: Tensor, sizes: list[int], *, consecutive: bool) -> Tensor:
    """Output of a causal layer on successive chunks of `sizes` tokens."""
    cache, outputs, seen = Cache(), [], 0
    for size in sizes:
        rows = slice(seen, seen + size)
        positions = Positions(tokens_at[:, rows], tokens_at[:, : rows.stop], consecutive=consecutive)
        outputs.append(layer(x[:, rows], positions, cache))
        seen += size
    return torch.cat(outputs, 1)


def same(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def nothing_leaks_from_the_future(method: Method, causal: bool) -> None:
    layer, x = Layer(method), tokens()
    before = layer(x, Positions.of(TOKENS))
    for t in range(1, TOKENS):
        changed = x.clone()
        changed[:, t] += 1 + t
        after = layer(changed, Positions.of(TOKENS))
        same(after[:, :t], before[:, :t], 0)
        assert not torch.equal(after[:, t:], before[:, t:]), f"token {t} changes nothing at all"


def a_row_does_not_depend_on_what_follows_it(method: Method, causal: bool) -> None:
    layer, x = Layer(method), tokens()
    whole = layer(x, Positions.of(TOKENS))
    for count in (1, 2, 5, 8):
        same(layer(x[:, :count], Positions.of(count)), whole[:, :count])


def prefill_equals_decoding_equals_any_chunking(method: Method, causal: bool) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        layer, x = Layer(method, dtype), tokens(2, dtype=dtype)
        positions = Positions.of(TOKENS)
        whole = layer(x, positions)
        for sizes in ([1] * TOKENS, [4, 1, 1, 3], [2, 7]):
            same(in_chunks(layer, x, positions.queries, sizes, consecutive=True), whole, tolerance)


def a_left_padded_batch_equals_each_row_alone(method: Method, causal: bool) -> None:
    layer, x = Layer(method), tokens(3)
    padding = torch.tensor([[0], [2], [5]])
    positions = (torch.arange(TOKENS) - padding).clamp(min=0)
    together = layer(x, Positions(positions, positions, causal, Visible(first=padding)))
    for row, hidden in enumerate(padding[:, 0].tolist()):
        alone = layer(x[row : row + 1, hidden:], Positions.of(TOKENS - hidden, causal=causal))
        same(together[row : row + 1, hidden:], alone)


def a_right_padded_batch_equals_each_row_alone(method: Method, causal: bool) -> None:
    layer, x = Layer(method), tokens(2)
    lengths = torch.tensor([[TOKENS], [6]])
    positions = torch.arange(TOKENS)[None]
    together = layer(x, Positions(positions, positions, causal, Visible(last=lengths - 1)))
    for row, length in enumerate(lengths[:, 0].tolist()):
        alone = layer(x[row : row + 1, :length], Positions.of(length, causal=causal))
        same(together[row : row + 1, :length], alone)


def packed_documents_equal_each_alone(method: Method, causal: bool) -> None:
    layer, x = Layer(method), tokens()
    positions, first = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), torch.tensor([[0] * 4 + [4] * 5])
    last = None if causal else torch.tensor([[3] * 4 + [8] * 5])
    together = layer(x, Positions(positions, positions, causal, Visible(first, last)))
    for rows in (slice(0, 4), slice(4, 9)):
        same(together[:, rows], layer(x[:, rows], Positions.of(rows.stop - rows.start, causal=causal)))


def positions_are_data(method: Method, causal: bool) -> None:
    """Explicit consecutive positions give the same output as `consecutive=True`."""
    layer, x = Layer(method), tokens(2)
    positions = Positions.of(TOKENS, causal=causal)
    same(layer(x, replace(positions, consecutive=False)), layer(x, positions))


def positions_may_differ_by_batch_entry(method: Method, causal: bool) -> None:
    """With randomized positions each batch entry gives the same output as alone, decoded or not."""
    layer, x = Layer(method), tokens(2)
    positions = randomized_positions(TOKENS, 500, batch=2, generator=torch.Generator().manual_seed(1))
    together = layer(x, Positions(positions, positions, causal))
    for row in range(2):
        entry = positions[row : row + 1]
        alone = layer(x[row : row + 1], Positions(entry, entry, causal))
        same(together[row : row + 1], alone)
        if causal:
            decoded = in_chunks(layer, x[row : row + 1], entry, [3] + [1] * (TOKENS - 3), consecutive=False)
            same(decoded, alone)


def a_state_dict_carries_everything(method: Method, causal: bool) -> None:
    layer, other, x = Layer(method), Layer(method, seed=5), tokens()
    other.load_state_dict(layer.state_dict())
    same(other(x, Positions.of(TOKENS)), layer(x, Positions.of(TOKENS)), 0)


def gradients_are_those_of_finite_differences(method: Method, causal: bool) -> None:
    layer = Layer(method, backend="tiled")
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x = tokens(1, 4).requires_grad_()

    def output(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, given, (x, Positions.of(4, causal=causal)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert torch.autograd.gradcheck(output, (x, *parameters), fast_mode=True)


def backends_agree(method: Method, causal: bool) -> None:
    layer, x = Layer(method), tokens(2)
    positions, outputs = Positions.of(TOKENS, causal=causal), []
    for backend in ("reference", "tiled"):
        layer.attention.backend = backend
        outputs.append(layer(x, positions))
    same(*outputs)


def the_weights_shown_are_the_weights_used(method: Method, causal: bool) -> None:
    layer, x = Layer(method), tokens(2)
    positions = Positions.of(TOKENS, causal=causal)
    inputs = layer.encoding.embed(x, positions.queries)
    weights = layer.attention.weights(inputs, layer.encoding, positions)
    values = layer.attention.inputs(inputs, layer.encoding, Context(positions)).v
    mixed = weights @ values.repeat_interleave(HEADS // values.shape[1], 1)
    same(layer.attention.out(mixed.transpose(1, 2).flatten(2)), layer(x, positions))


# Properties of causal attention alone, and of both directions if the encoding supports them.
CAUSAL: tuple[Property, ...] = (
    nothing_leaks_from_the_future,
    a_row_does_not_depend_on_what_follows_it,
    prefill_equals_decoding_equals_any_chunking,
    a_state_dict_carries_everything,
)
BOTH: tuple[Property, ...] = (
    a_left_padded_batch_equals_each_row_alone,
    a_right_padded_batch_equals_each_row_alone,
    packed_documents_equal_each_alone,
    positions_are_data,
    positions_may_differ_by_batch_entry,
    gradients_are_those_of_finite_differences,
    backends_agree,
    the_weights_shown_are_the_weights_used,
)


def properties(method: Method) -> list[tuple[str, Property, bool]]:
    """Properties of a method: name, test, and whether attention is causal."""
    checks = [(check.__name__, check, True) for check in (*CAUSAL, *BOTH)]
    if method.direction == "both":
        checks += [(f"{check.__name__}_in_both_directions", check, False) for check in BOTH]
    return checks


def failures(method: Method) -> dict[str, str]:
    """The properties that a method violates, each with its error."""
    errors = {}
    for name, check, causal in properties(method):
        try:
            check(method, causal)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors
