"""Base classes of position encodings (four hooks, each without effect by default) and their positions argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.ops.score_attention.types import EVERYTHING, Bias, DistanceBias, TileBias, Visible
from dape.rebuildable import Rebuildable

# Token states of an encoding that has them.
State = Tensor | None
UNKNOWN = (
    "earlier queries of a cache are read again, but which keys each of them saw is not known: use padding, or "
    "pass the whole input without a cache (use_cache=False)"
)


@dataclass(frozen=True)
class Positions:
    """Positions of queries and keys, and the mask between them.

    queries: [1 or B, Tq] and keys: [1 or B, Tk], integer positions; only their order must agree with
             the order of the tokens, so offsets, padding and randomized positions are all data.
    consecutive: promises that the positions of a query and a visible key differ as their indices do, counted from the
             last query at the last key, and those of a query and any key by no more; a bias by distance is
             then a vector. Optimisation hint; never affects results.
    preallocated: free slots of a cache come after the last query's own key.
    """

    queries: Tensor
    keys: Tensor
    causal: bool = True
    visible: Visible = EVERYTHING
    consecutive: bool = False
    preallocated: bool = False

    @staticmethod
    def of(num_tokens: int, *, causal: bool = True, device: torch.device | str | None = None) -> Positions:
        """Positions 0 … num_tokens − 1, for queries and keys alike."""
        positions = torch.arange(num_tokens, device=device)[None]
        # By name, because torch.compile knows no default values that are objects.
        return Positions(positions, positions, causal, EVERYTHING, consecutive=True)

    @property
    def num_queries(self) -> int:
        return self.queries.shape[1]

    @property
    def num_keys(self) -> int:
        return self.keys.shape[1]

    @property
    def batch(self) -> int:
        """B if any position differs between batch entries, else 1."""
        return max(self.queries.shape[0], self.keys.shape[0])

    def check(self, q: Tensor, k: Tensor) -> None:
        """Raise if the shapes or dtypes do not fit q [B, H, Tq, D] and k [B, G, Tk, D]."""
        for name, given, x in (("queries", self.queries, q), ("keys", self.keys, k)):
            if given.dim() != 2 or given.shape[0] not in (1, x.shape[0]) or given.shape[1] != x.shape[2]:
                raise ValueError(
                    f"positions.{name} has shape {tuple(given.shape)}, but {name[0]} has {x.shape[2]} tokens: expected "
                    f"[1 or {x.shape[0]}, {x.shape[2]}]"
                )
            if given.is_floating_point() or given.dtype == torch.bool:
                raise TypeError(f"positions.{name} holds positions (integers), got {given.dtype}")

    def last(self, count: int) -> Positions:
        """The last `count` queries, with all keys."""
        if count == self.queries.shape[1]:
            return self
        bounds = (self.visible.first, self.visible.last)
        first, last = (x if x is None or x.shape[1] == 1 else x[:, -count:] for x in bounds)
        return replace(self, queries=self.queries[:, -count:], visible=Visible(first, last))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Positions:
        """The same positions on `device`; tools that move a layer's inputs between devices call this method."""

        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        first, last = (None if x is None else moved(x) for x in (self.visible.first, self.visible.last))
        return replace(self, queries=moved(self.queries), keys=moved(self.keys), visible=Visible(first, last))

    def before(self, count: int) -> Positions:
        """These queries and the `count` before them, whose keys are cached."""
        if count == 0:
            return self
        start = self.num_keys - self.num_queries
        earlier = self.keys[:, start - count : start].expand(self.queries.shape[0], -1)
        bounds = (self.visible.first, self.visible.last)
        if any(x is not None and x.shape[1] > 1 for x in bounds):
            raise ValueError(UNKNOWN)
        return replace(self, queries=torch.cat([earlier, self.queries], 1))

    def before_in_room(self, count: int) -> tuple[Positions, Tensor]:
        """As `before`, for a preallocated cache with room after its keys; and the index of each query's own key.

        The index, [1 or B, count + Tq], is negative for queries before the first token, which see nothing.
        No shape depends on the number of cached tokens, so one compiled step serves all.
        """
        if self.visible.first is not None and self.visible.first.shape[1] > 1:
            raise ValueError(UNKNOWN)
        steps = torch.arange(-count, self.num_queries, device=self.queries.device)
        index = self.query_index()[:, :1] + steps
        batch = max(self.batch, index.shape[0])
        earlier = self.keys.expand(batch, -1).gather(1, index[:, :count].clamp(min=0).expand(batch, -1))
        queries = torch.cat([earlier, self.queries.expand(batch, -1)], 1)
        visible = Visible(self.visible.first, index)
        return replace(self, queries=queries, visible=visible, consecutive=False), index

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """First and last visible key of each query."""
        sizes = (self.num_queries, self.num_keys)
        return self.visible.bounds(*sizes, causal=self.causal, device=self.queries.device)

    def query_index(self) -> Tensor:
        """Index of each query's own key, [1 or B, Tq]: the last one visible to a causal query."""
        return self._bounds()[1].clamp(min=0)

    def lengths(self) -> Tensor:
        """Number of tokens in each query's row or document, without padding: its last position plus one, [1 or B, Tq].

        A document begins at a query that sees no key before its own.
        """
        first, last = self._bounds()
        batch = max(self.batch, first.shape[0], last.shape[0])
        first, own = first.expand(batch, -1), last.clamp(min=0).expand(batch, -1)
        end = self.keys.expand(batch, -1).gather(1, own)
        if self.causal:
            start = own.masked_fill(first < own, 0).cummax(-1).values
            none = torch.zeros_like(self.keys).expand(batch, -1)
            end = none.scatter_reduce(1, start, end, "amax").gather(1, start)
        return end + 1

    def windowed(self, size: int) -> Positions:
        """The same, but each causal query sees its own key and the size − 1 before it at most."""
        if not self.causal:
            raise ValueError(f"window={size} is for causal attention, but the future is visible")
        first = (self.query_index() - size + 1).clamp(min=0)
        if self.visible.first is not None:
            first = torch.maximum(first, self.visible.first)
        return replace(self, visible=Visible(first, self.visible.last))

    def starts(self) -> Tensor:
        """Whether a key is the first of its row or document, [1 or B, Tk].

        So is a key whose position does not come after the one before it, and the first that all queries see; of
        queries that see different keys, as in windows, one that sees no key before its own.
        """
        start = F.pad(self.keys[:, 1:] <= self.keys[:, :-1], (1, 0), value=True)
        first = self.visible.first
        if first is None:
            return start
        if self.causal and first.shape[1] > 1:
            first = first.masked_fill(first != self.query_index(), self.num_keys)
        index = first.long().clamp(0, self.num_keys)
        batch = max(start.shape[0], index.shape[0])
        marked = F.pad(start, (0, 1)).expand(batch, -1).scatter(1, index.expand(batch, -1), True)
        return marked[:, :-1]

    def distances(self, rows: slice, num_keys: int) -> Tensor:
        """Query position minus key position, [1 or B, rows, num_keys], exact integers."""
        return self.queries[:, rows, None] - self.keys[:, None, :num_keys]

    def shown(self, rows: slice, num_keys: int) -> Tensor:
        """visible(i, j) as booleans [1 or B, 1, rows, num_keys]."""
        first, last = self._bounds()
        key = torch.arange(num_keys, device=self.queries.device)
        return ((key >= first[:, rows, None]) & (key <= last[:, rows, None]))[:, None]


class Parameters(nn.Module):
    """A module whose `forward` returns its own parameters.

    Tools that offload, shard or move a module act in `forward`: parameters read without it could be on the wrong
    device, or absent.
    """

    def forward(self, device: torch.device) -> tuple[Tensor, ...]:
        """The parameters on `device`, in order of definition, in float32 or finer."""
        # Not self.parameters(), whose generators take longer than a decoding step's bias.
        own: list[Tensor] = []
        for parameter in self._parameters.values():
            if parameter is not None:
                moved = parameter.to(device)
                own.append(moved if moved.dtype is torch.float32 else at_least_float32(moved))
        return tuple(own)


class LinearMap(Parameters):
    """Weight [out, in] and bias [out] of a linear map inside an encoding.

    Deliberately not an nn.Linear: quantisers would round it to 8 bits, and `target_modules="all-linear"` adapt it.
    """

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        # As nn.Linear.
        bound = num_inputs**-0.5
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs).uniform_(-bound, bound))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(num_outputs).uniform_(-bound, bound)) if bias else None
        )


def positions_in(shown: Tensor) -> Tensor:
    """Positions [B, T] of tokens by whom they see, [B, T, T]: counted in each document, from the first token of a row."""
    return count_tokens(F.pad(shown.diagonal(-1, 1, 2), (1, 0)))


def count_tokens(follows: Tensor) -> Tensor:
    """Positions [B, T], counted from the last token that does not see the one before it: the start of its document.

    Windows do not change them, nor does a cache that drops tokens.
    """
    index = torch.arange(follows.shape[1], device=follows.device)
    return index - index.masked_fill(follows, 0).cummax(-1).values


def before(x: Tensor, starts: Tensor) -> Tensor:
    """Each token's predecessor in x [B, …, T, n]: zeros for tokens of `starts` [1 or B, T], which have none."""
    starts = starts.view(starts.shape[0], *[1] * (x.dim() - 3), -1, 1)
    return F.pad(x[..., :-1, :], (0, 0, 1, 0)).masked_fill(starts, 0.0)


class PositionEncoding(Parameters, Rebuildable):
    """Base class of position encodings. Override one hook; the others do nothing.

    additive: whether `bias` is overridden, so that a score convolution has channels for it; never set by hand.
    direction: "both", or "causal" for an encoding that has no meaning when the future is visible.
    shared:   whether one instance serves all layers.
    by_length: whether `rotate` reads the length of the input; only then is it given.
    reference: the paper that it is from, for listings.
    absolute: whether it reads positions themselves, so that a shift of all of them changes its results.
    """

    additive: ClassVar[bool] = False
    direction: ClassVar[Literal["both", "causal"]] = "both"
    shared: ClassVar[bool] = False
    absolute: ClassVar[bool] = False
    by_length: bool = False
    summary: ClassVar[str] = ""
    reference: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.additive = cls.bias is not PositionEncoding.bias

    @property
    def rotates(self) -> bool:
        """Whether `rotate` or `turn` is overridden."""
        own = type(self)
        return own.rotate is not PositionEncoding.rotate or own.turn is not PositionEncoding.turn

    @classmethod
    def trained_at(cls, length: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Default options that depend on the training length; given: options that the user has set."""
        return {}

    def keys_serve(self, before: int, after: int) -> bool:
        """Whether keys cached in an input of `before` tokens remain valid in one of `after` tokens."""
        return True

    def outgrown(self, before: Tensor, after: Tensor) -> tuple[int, int] | None:
        """Numbers of tokens [B] before and after, in the first row whose cached keys do not remain valid; None if all do."""
        rows = zip(before.tolist(), after.tolist(), strict=True)
        return next((row for row in rows if row[0] and not self.keys_serve(*row)), None)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings [B, T, hidden] at positions [1 or B, T]."""
        return x

    def rotate(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Queries or keys [B, H, T, D] at positions [1 or B, T].

        lengths: [1 or B, 1 or T], `Positions.lengths` of each token's row or document; by default all are one document.
        """
        return x

    def rotate_keys(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Keys; override where they are rotated differently from queries."""
        return self.rotate(x, positions) if lengths is None else self.rotate(x, positions, lengths)

    def token_state(self, x: Tensor) -> State:
        """Per-token state [B, H, T, n] from the hidden states [B, T, hidden]; cached along with the keys."""
        return None

    def turn(self, q: Tensor, k: Tensor, positions: Positions, state: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, Tq, D] and keys [B, G or H, Tk, D] rotated by the keys' token state; keys are cached before that."""
        return q, k

    def bias(self, q: Tensor, k: Tensor, positions: Positions, *, scale: float, state: State = None) -> Bias:
        """Additive bias for the scores of q [B, H, Tq, D] and k [B, G, Tk, D].

        state: [B, H, Tk, n], `token_state` of the keys.
        """
        return None


class DistanceEncoding(PositionEncoding):
    """A bias that depends on the distance alone: override `at`."""

    def at(self, distance: Tensor, *, causal: bool) -> Tensor:
        """The bias [H, …] at integer distances […] (query position − key position), in float32 or finer."""
        raise NotImplementedError

    def bias(self, q: Tensor, k: Tensor, positions: Positions, *, scale: float, state: State = None) -> Bias:
        positions.check(q, k)
        dtype = torch.promote_types(q.dtype, torch.float32)
        if positions.consecutive:
            lowest = 0 if positions.causal else 1 - positions.num_queries
            distance = torch.arange(lowest, positions.keys.shape[1], device=q.device)
            return DistanceBias(self.at(distance, causal=positions.causal).to(dtype), lowest)

        def tile(rows: slice, num_keys: int) -> Tensor:
            distance = positions.distances(rows, num_keys)
            # An invisible key may have any position, even after a causal query: clamp to a valid distance.
            distance = distance.clamp(min=0) if positions.causal else distance
            return self.at(distance, causal=positions.causal).transpose(0, 1).to(dtype)

        return TileBias(tile, positions.batch)


def at_least_float32(parameter: Tensor) -> Tensor:
    """The parameter in a dtype that represents distances exactly: float32, or its own if finer."""
    if parameter.dtype is torch.float32:
        return parameter
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


def angle_dtype(device: torch.device) -> torch.dtype:
    """Dtype of the angles position × frequency, which lose digits in float32: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
