"""Score processors, which map q·k to attention weights. One file each, one line each in the registry."""

from dape.scores.base import ScoreProcessor
from dape.scores.conv import ScoreConv
from dape.scores.diff import Differential
from dape.scores.keyconv import KeyConv
from dape.scores.keyshift import KeyShift
from dape.scores.mta import MultiTokenAttention
from dape.scores.normaliser import Normalised
from dape.scores.plain import PlainScores
from dape.scores.talking import TalkingHeads

__all__ = [
    "SCORES", "Differential", "KeyConv", "KeyShift", "MultiTokenAttention", "Normalised", "PlainScores",
    "ScoreConv", "ScoreProcessor", "TalkingHeads",
]  # fmt: skip

SCORES: dict[str, type[ScoreProcessor]] = {
    "plain": PlainScores,
    "dape": ScoreConv,
    "keyconv": KeyConv,
    "keyshift": KeyShift,
    "talking": TalkingHeads,
    "mta": MultiTokenAttention,
    "diff": Differential,
}
