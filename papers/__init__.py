"""Experiments of the paper and beyond it, their results, and verdicts on claims; `python -m papers` runs them."""
