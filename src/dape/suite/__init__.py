"""The length suite: questions about a long text that any causal language model can be asked, by task and by length."""

from dape.suite.ask import Answer, Score, ask, fill
from dape.suite.probes import PROBES, TRAINED, Example, Probe

__all__ = ["PROBES", "TRAINED", "Answer", "Example", "Probe", "Score", "ask", "fill"]
