"""The length suite: questions about long texts for any causal language model, by task and length."""

from dape.suite.ask import Answer, TaskResult, ask, fill
from dape.suite.probes import PROBES, TRAINED, Example, Probe

__all__ = ["PROBES", "TRAINED", "Answer", "Example", "Probe", "TaskResult", "ask", "fill"]
