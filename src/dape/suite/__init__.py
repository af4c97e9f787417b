"""The length suite: questions about a long text that any causal language model can be asked, by task and by length."""

from dape.suite.ask import Answer, Score, ask, fill
from dape.suite.probes import PROBES, Example, Probe

__all__ = ["PROBES", "Answer", "Example", "Probe", "Score", "ask", "fill"]
