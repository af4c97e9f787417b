"""Which trained models and lengths a claim speaks of, scale by scale: names, and places among what was run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dape.reproduce.language import Language, Trained

# A method's name, or that with variant and train: {method = "rope", train = "longest"}.
Choice = str | dict[str, Any]


@dataclass
class Chosen:
    """What a claim speaks of that was run, and what of it was not."""

    missing: list[str] = field(default_factory=list)

    def lack(self, what: str) -> None:
        if what not in self.missing:
            self.missing.append(what)


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def corpora(data: Language, wanted: Sequence[str] | str | None, chosen: Chosen) -> list[str]:
    """Our corpora for those that the claim names (by the paper's names or ours); all of them if it names none."""
    if wanted is None:
        return data.corpora()
    for name in listed(wanted):
        if not data.corpora([name]):
            chosen.lack(name)
    return data.corpora(listed(wanted))


def train_lengths(available: Sequence[int], wanted: Any) -> list[int]:
    """Among the lengths trained at: "all", "shortest", "longest", "4x" (of the shortest), or numbers."""
    if not available:
        return []
    named = {"all": list(available), "shortest": [available[0]], "longest": [available[-1]]}
    if isinstance(wanted, str) and wanted in named:
        return named[wanted]
    numbers = [
        int(one[:-1]) * available[0] if isinstance(one, str) and one.endswith("x") else one
        for one in listed(wanted)
    ]
    if bad := [one for one in numbers if not isinstance(one, int)]:
        raise ValueError(f'train={bad[0]!r}: use "all", "shortest", "longest", "4x" or a length')
    return [length for length in available if length in numbers]


def eval_lengths(available: Sequence[int], train_length: int, wanted: Any) -> list[int]:
    """Among the lengths read: "all", "train", "within", "beyond", "shortest", "longest", multiples of training's, or a
    list of such."""
    if not available:
        return []
    named = {
        "all": list(available),
        "train": [length for length in available if length == train_length],
        "within": [length for length in available if length <= train_length],
        "beyond": [length for length in available if length > train_length],
        "shortest": [available[0]],
        "longest": [available[-1]],
    }
    found: set[int] = set()
    for one in listed(wanted):
        if isinstance(one, str) and one not in named:
            raise ValueError(f'at="{one}": use {", ".join(named)}, or multiples of the training length')
        found.update(named[one] if isinstance(one, str) else [round(one * train_length)])
    return [length for length in available if length in found]


def settings(
    data: Language, corpus: Any, train: Any, view: str, chosen: Chosen
) -> Iterator[tuple[str, int, list[int]]]:
    """(corpus, a training length the claim speaks of, all training lengths there)."""
    for name in corpora(data, corpus, chosen):
        available = data.train_lengths(view, name)
        found = train_lengths(available, train)
        if not found:
            chosen.lack(f"training length {train} on {name}")
        for length in found:
            yield name, length, available


def models(
    data: Language,
    choice: Choice,
    place: tuple[str, int, list[int]],
    view: str,
    chosen: Chosen,
    like: str | None = None,
) -> list[Trained]:
    """What the choice names in that setting: under the variant that it or `like` names, else without any if there is
    such a training, else under every variant it has."""
    corpus, train_length, available = place
    wanted: dict[str, Any] = {"method": choice} if isinstance(choice, str) else choice
    if unknown := set(wanted) - {"method", "variant", "train"}:
        raise ValueError(f"{choice}: there is no {', '.join(sorted(unknown))} to choose by")
    lengths = train_lengths(available, wanted["train"]) if "train" in wanted else [train_length]
    found = []
    for length in lengths:
        variants = data.variants(view, corpus, length, wanted["method"])
        own = wanted.get("variant", like)
        if own is None and "" in variants:
            own = ""
        found += [
            Trained(view, corpus, length, wanted["method"], variant)
            for variant in variants
            if own is None or variant == own
        ]
    if not found:
        of = f" ({wanted['variant']})" if wanted.get("variant") else ""
        at = wanted.get("train", train_length)
        chosen.lack(f"{wanted['method']}{of} on {corpus}, training length {at}")
    return found


def pairs(
    data: Language, a: Choice, b: Any, corpus: Any, train: Any, view: str, chosen: Chosen
) -> Iterator[tuple[Trained, Trained]]:
    """Every a with every b of the same corpus, training length and variant, unless the choice says which."""
    for place in settings(data, corpus, train, view, chosen):
        for one in models(data, a, place, view, chosen):
            for choice in listed(b):
                for other in models(data, choice, place, view, chosen, like=one.variant):
                    yield one, other
