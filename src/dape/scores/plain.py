"""Plain scores: standard attention."""

from dape.ops.score_attention import PLAIN, ScoreProgram
from dape.scores.base import ScoreProcessor


class PlainScores(ScoreProcessor):
    """softmax(S + B); PyTorch's fused attention wherever it can run."""

    summary = "the scores as they are"

    def program(self) -> ScoreProgram:
        return PLAIN
