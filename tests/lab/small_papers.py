"""A folder of papers of a test's own: one small scale under the laptop's name, on text that comes with Python."""

from __future__ import annotations

import shutil
from pathlib import Path

SCALES = """
[laptop]
corpora = ["library"]
train_lengths = [8]
seeds = [0]
multiples = [1, 4]
windows = 8
last = 8
room = 256
[laptop.train]
num_layers = 1
hidden_size = 12
num_heads = 4
score_width = 4
batch_size = 2
steps = 3
warmup_steps = 1
"""
CORPORA = """
[library]
title = "the json package of Python's library"
library = "json"
hold_out = ["decoder", "scanner"]
obtain = "It comes with Python."
[novels]
title = "two novels"
part = 100
every = 3
obtain = "Write them."
"""


def write_papers(folder: Path, **experiments: str) -> Path:
    """papers/ with experiments of the paper `test`: name → what is in experiment.toml beyond its title."""
    papers = folder / "papers"
    papers.mkdir()
    (papers / "scales.toml").write_text(SCALES)
    (papers / "corpora.toml").write_text(CORPORA)
    head = 'title = "T"\nkind = "language"\nsource = "Section 1"\nsummary = "S"\n'
    for name, content in experiments.items():
        (papers / "test" / name).mkdir(parents=True)
        (papers / "test" / name / "experiment.toml").write_text(head + content)
    return papers


def without_results(papers: Path, folder: Path) -> Path:
    """A copy of the papers as they were before anything was run."""
    ignored = shutil.ignore_patterns("evaluations", "results*.json", "README.md", "*.svg")
    return Path(shutil.copytree(papers, folder / "papers", ignore=ignored))
