"""Interleaved timings of attention backends, decoding steps and whole models, as ratios."""
