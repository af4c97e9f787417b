"""Method names as the paper writes them: a score processor and a position encoding, parsed in one place.

kerple            plain scores
dape-kerple       score convolution with kernel 1 (DAPE)
dape1x3-kerple    score convolution with kernel 3 (DAPE V2); any kernel size
dape3x3-kerple    the same over 3 queries × 3 keys, a query's own row and those before it
NAME-kerple       any other processor, by its name in SCORES
"""

from __future__ import annotations

import difflib
import inspect
import re
from dataclasses import dataclass

from dape.positions import POSITIONS, PositionEncoding, build_position
from dape.scores import SCORES, ScoreProcessor

# Processors that names write in their own way: plain by nothing, convolutions by dape….
NAMED_OTHERWISE = ("plain", "conv")
# The kernel sizes that listings show; any other parses as well.
LISTED_KERNELS = (None, 1, 3, 5, 7)


@dataclass(frozen=True)
class Method:
    """A pair: `position` names an encoding, `kernel_size` is the convolution's, None for plain scores.

    query_kernel_size: how many queries the convolution reads, 1 in the paper.
    processor:         the name in SCORES of one that is neither plain nor a convolution.
    """

    position: str
    kernel_size: int | None = None
    query_kernel_size: int = 1
    processor: str | None = None

    @property
    def name(self) -> str:
        if self.processor is not None:
            return f"{self.processor}-{self.position}"
        if self.kernel_size is None:
            return self.position
        kernel = f"{self.query_kernel_size}x{self.kernel_size}"
        return f"dape{'' if kernel == '1x1' else kernel}-{self.position}"

    @property
    def summary(self) -> str:
        """A line of explanation."""
        encoding = POSITIONS[self.position].summary
        if self.processor is not None:
            return f"{SCORES[self.processor].summary}; {encoding}"
        if self.kernel_size is None:
            return encoding
        over = "heads and keys" if self.query_kernel_size == 1 else "heads, queries and keys"
        kernel = f"{self.query_kernel_size}×{self.kernel_size}"
        return f"{kernel} convolution of the scores over {over}; {encoding}"

    def build_position(
        self, *, num_heads: int, head_width: int, hidden_size: int, **options: object
    ) -> PositionEncoding:
        return build_position(
            self.position, num_heads=num_heads, head_width=head_width, hidden_size=hidden_size, **options
        )

    def build_scores(self, num_heads: int, **options: object) -> ScoreProcessor:
        """The score processor; options are its own, those of ScoreConv for a convolution."""
        if self.processor is not None:
            return SCORES[self.processor](num_heads, **options)
        if self.kernel_size is None:
            if options:
                raise ValueError(
                    f'"{self.name}" leaves scores as they are; it has no option {", ".join(options)}'
                )
            return SCORES["plain"]()
        additive = POSITIONS[self.position].additive
        own = {
            "bias_channels": additive,
            "kernel_size": self.kernel_size,
            "query_kernel_size": self.query_kernel_size,
        }
        asked = inspect.signature(SCORES["conv"]).parameters
        valid = [option for option in asked if option not in {"num_heads", *own}]
        if unknown := [option for option in options if option not in valid]:
            raise ValueError(
                f'"{self.name}" has no option {", ".join(unknown)} of its convolution; it has {", ".join(valid)}'
            )
        return SCORES["conv"](num_heads, **own, **options)


def parse_method(name: str) -> Method:
    """The method of that name; an unknown one raises with the nearest names."""
    match = re.fullmatch(r"(?:dape(?:(?P<rows>[1-9]\d*)x(?P<kernel>[1-9]\d*))?-)?(?P<position>.+)", name)
    if match and match["position"] in POSITIONS:
        kernel = int(match["kernel"] or 1) if name.startswith("dape") else None
        return Method(match["position"], kernel, int(match["rows"] or 1))
    processor, _, position = name.partition("-")
    if processor in SCORES and processor not in NAMED_OTHERWISE and position in POSITIONS:
        return Method(position, processor=processor)
    known = [method.name for method in all_methods()]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5) or list(POSITIONS)
    raise ValueError(
        f'unknown method "{name}"; did you mean {", ".join(near)}? `dape methods` lists them all'
    )


def all_methods() -> list[Method]:
    """Every encoding with plain scores and with the usual kernel sizes."""
    return [Method(position, kernel) for kernel in LISTED_KERNELS for position in POSITIONS]
