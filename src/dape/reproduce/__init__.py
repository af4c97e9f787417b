"""The papers' tables, each as one experiment in data, at three scales. Needs `dape[lab]`."""

from dape.reproduce.experiment import Experiment, find_papers, load_experiments
from dape.reproduce.results import load_results, results_path

__all__ = ["Experiment", "find_papers", "load_experiments", "load_results", "results_path"]
