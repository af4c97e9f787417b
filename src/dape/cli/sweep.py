"""`dape sweep`: a comparison over a grid of any options, with the same resume and report."""

from __future__ import annotations

from dape.cli.compare import parse_comparison, run_and_show

DESCRIPTION = """Train every method with every combination of some options, and compare all of them.

  dape sweep --methods dape1x3-kerple --over learning_rate=1e-3,2e-3,4e-3
  dape sweep --methods kerple,dape1x3-kerple --over num_layers=2,4 --over hidden_size=128,256
  dape sweep --methods rope[scaling=ntk,factor=4],rope[scaling=linear,factor=4]     variants need no sweep

Options are those of `dape train`. A combination is a variant of its method, named by its options; everything else is
as in `dape compare`: the same command resumes, and the folder holds the same report."""


def main(arguments: list[str]) -> int:
    config = parse_comparison(arguments, prog="dape sweep", description=DESCRIPTION)
    if not config.over:
        raise ValueError("a sweep needs something to vary: give --over NAME=VALUE,VALUE")
    return run_and_show(config)
