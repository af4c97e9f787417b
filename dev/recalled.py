"""The word of a text that a model predicts better the more of the text it has read."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dape.data import Tokens
from dape.data.tokenizers import token_texts
from dape.evaluation.by_length import WindowLosses

# A name of four letters or more, whole.
WORD = re.compile(r"[A-Za-z_]\w{3,}")
# Least rise of the probability.
RISE = 0.2


class Recalled(NamedTuple):
    """A word, its first token, its line up to it, tokens since it stood before, and the probability of the rest of the word
    by model, with the shortest and the longest input."""

    word: str
    beginning: str
    line: str
    distance: int
    probability: dict[str, tuple[float, float]]


def recalled_word(
    decode: Callable[[list[int]], str], tokens: Tokens, losses: Mapping[str, WindowLosses], model: str
) -> Recalled | None:
    """Of the words that stand in the longest input and not in the shortest, the one whose rest `model` predicts better by
    most, after its first token: with more than 50 % with the longest input, and 20 % more than with the shortest. None if
    there is none. Keywords of Python, and words that are alone in their line, are left out.

    losses: of the same target tokens, by model.
    """
    found = losses[model]
    short, long = min(found.losses), max(found.losses)
    best, best_gain = None, RISE
    for window in range(len(found.windows)):
        ids = found.windows.ids(tokens, long, slice(window, window + 1))[0].tolist()
        texts = token_texts(decode, ids)
        text, ends = "".join(texts), np.cumsum([len(piece) for piece in texts])
        first = len(ids) - found.last
        words = list(WORD.finditer(text))
        for match in words:
            covers = np.searchsorted(ends, [match.start(), match.end() - 1], side="right")
            covered = range(covers[0], covers[1] + 1)
            whole = "".join(texts[place] for place in covered).strip() == match[0]
            line = text[text.rfind("\n", 0, match.start()) + 1 : match.end()].strip()
            legible = whole and len(covered) > 1 and line != match[0] and not keyword.iskeyword(match[0])
            if covered[0] < first or not legible or match.end() == len(text):
                continue
            before = [
                other.start() for other in words if other[0] == match[0] and other.end() <= match.start()
            ]
            distance = covered[0] - int(np.searchsorted(ends, before[-1], side="right")) if before else 0
            if distance <= short:
                continue
            targets = np.array(covered[1:]) - first
            probability = {
                name: (
                    _chance(one.losses[short][window, targets]),
                    _chance(one.losses[long][window, targets]),
                )
                for name, one in losses.items()
            }
            low, high = probability[model]
            if high > 0.5 and high - low > best_gain:
                beginning = texts[covered[0]].strip()
                best, best_gain = Recalled(match[0], beginning, line, distance, probability), high - low
    return best


def _chance(losses: np.ndarray) -> float:
    return float(np.exp(-losses.sum()))
