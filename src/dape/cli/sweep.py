"""`dape sweep`: a comparison over a grid of any options, with the same resume and report."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass

from dape.cli.compare import CommandLine, run_with_display, show_comparison, terminal
from dape.cli.options import Named, parse_option, read_training
from dape.lab.compare import CompareConfig, by_recipe, check_axes
from dape.settings import setting
from dape.training.config import checked

DESCRIPTION = """Train every method with every combination of some options, and compare all of them.

  dape sweep --methods dape1x3-kerple --over learning_rate=1e-3,2e-3,4e-3
  dape sweep --methods kerple,dape1x3-kerple --over num_layers=2,4 --over hidden_size=128,256
  dape sweep --methods rope[scaling=ntk,factor=4],rope[scaling=linear,factor=4]     variants need no sweep

Options are those of `dape train`. A combination is a variant of its method, named by its options; everything else is
as in `dape compare`: the same command resumes, and the folder holds the same report."""


@dataclass(frozen=True, kw_only=True)
class SweepLine(CommandLine):
    over: Named = setting((), help="Option to vary, as NAME=VALUE,VALUE …; several are combined.")


def main(arguments: list[str]) -> int:
    config, given = read_training(
        SweepLine, CompareConfig, by_recipe, arguments, prog="dape sweep", description=DESCRIPTION
    )
    axes = given.get("over", ())
    check_axes(text.partition("=")[0].replace("-", "_") for text in itertools.chain(*axes))
    over = axes_of(axes)
    console = terminal()
    words = [f"{name}={','.join(map(str, values))}" for name, values in over.items()]
    comparison = run_with_display(
        config, console, over=over, command=f"{config.command('sweep')} --over {shlex.join(words)}"
    )
    show_comparison(comparison, console)
    return int(comparison.failed)


def axes_of(given: tuple[tuple[str, ...], ...]) -> dict[str, list[object]]:
    """Values by option name; raises for an unknown name or a wrong value."""
    axes: dict[str, list[object]] = {}
    for text in itertools.chain.from_iterable(given):
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f'--over "{text}" is not of the form name=value,value')
        key = name.replace("-", "_")
        axes[key] = [checked(dict([parse_option(f"{key}={value}")]))[key] for value in values.split(",")]
    if not axes:
        raise ValueError("a sweep needs something to vary: give --over NAME=VALUE,VALUE")
    return axes
