"""How methods look, alike in every picture: colours that the colour-blind tell apart, dashes for plain scores."""

from __future__ import annotations

from typing import NamedTuple

from dape.methods import parse_method

# After Okabe and Ito, in shades that can be read on white and on dark pages.
COLOURS = ("#2a82cc", "#e69f00", "#12a57c", "#cc79a7", "#df6211", "#56b4e9", "#9478c4", "#8a8a8a")
# The same markers as matplotlib and plotly name them, and as a terminal can show them.
MARKERS = (
    ("o", "circle", "o"),
    ("s", "square", "#"),
    ("D", "diamond", "x"),
    ("^", "triangle-up", "^"),
    ("v", "triangle-down", "v"),
    ("P", "cross", "+"),
    ("X", "x", "%"),
    ("*", "star", "*"),
)


class Style(NamedTuple):
    colour: str
    marker: str
    symbol: str
    letter: str
    dashed: bool
    width: float


def style_of(index: int, method: str) -> Style:
    """The look of the method that stands at that place in the comparison."""
    plain = _is_plain(method)
    return Style(
        COLOURS[index % len(COLOURS)],
        *MARKERS[index % len(MARKERS)],
        dashed=plain,
        width=1.4 if plain else 2.2,
    )


def _is_plain(method: str) -> bool:
    try:
        return parse_method(method).is_plain
    except ValueError:  # records of somebody else's method are shown as well
        return True


def times(length: int, train_length: int) -> str:
    """The length as a multiple of the training length: 16×, 1.5×."""
    return f"{length / train_length:g}×"
