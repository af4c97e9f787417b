"""Score processors: what happens to q·k before the softmax. One file each, one line each in the registry."""

from dape.scores.base import ScoreProcessor
from dape.scores.conv import ScoreConv
from dape.scores.plain import PlainScores

__all__ = ["SCORES", "PlainScores", "ScoreConv", "ScoreProcessor"]

SCORES: dict[str, type[ScoreProcessor]] = {
    "plain": PlainScores,
    "conv": ScoreConv,
}
