"""Evaluation by length, by position, by recall and by sliding windows, as rows of one table; questions of the suite.

evaluator, windows   a model as a function of windows; which tokens are predicted
by_length            losses of the same target tokens at several lengths
metrics              registry of metrics; `measure`: rows of the table
recall, sliding      slices by recall; every token of a text by a sliding window
table, statistics    the table of results and its differences; estimates with intervals
suite, probes        questions about long texts, and their generators
"""

from dape.evaluation.by_length import WindowLosses, losses_by_length
from dape.evaluation.metrics import measure
from dape.evaluation.recall import recall_lengths, targets_by_recall
from dape.evaluation.sliding import sliding_window
from dape.evaluation.statistics import Estimate

__all__ = [
    "Estimate",
    "WindowLosses",
    "losses_by_length",
    "measure",
    "recall_lengths",
    "sliding_window",
    "targets_by_recall",
]
