"""`dape sweep`: a comparison over a grid of any options, with the same resume and report."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dape.cli.compare import CommandLine, run_with_display, show_comparison, terminal
from dape.cli.options import Named, parse_option, read_training
from dape.lab.compare import CompareConfig, by_recipe
from dape.lab.kinds.language import LOCATION_FIELDS
from dape.settings import free_names, setting
from dape.training import TrainConfig
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
    axes = axes_of(given.get("over", ()))
    blocks: list[dict[str, Any]] = [
        {
            "methods": config.method_list,
            "train": dict(point),
            "variant": ", ".join(f"{name} {value}" for name, value in point),
        }
        for point in itertools.product(
            *([(name, value) for value in values] for name, values in axes.items())
        )
    ]
    for block in blocks:
        checked(block["train"])
    check_axes(axes)
    console = terminal()
    over = [f"{name}={','.join(map(str, values))}" for name, values in axes.items()]
    command = f"{config.command('sweep')} --over {shlex.join(over)}"
    comparison = run_with_display(config, console, blocks=blocks, command=command)
    show_comparison(comparison, console)
    return int(comparison.failed)


def check_axes(axes: Iterable[str]) -> None:
    """Raise for options by which trainings of a sweep cannot differ."""
    instead = {
        "method": "give --methods A,B",
        "seed": "give --seeds 0,1",
        "train_length": "run `dape compare` for each and `dape merge` the folders",
    }
    for name in axes:
        if name in instead:
            raise ValueError(f"--over {name}: {instead[name]}")
        if name in LOCATION_FIELDS:
            raise ValueError(f"--over {name}: a sweep is of one text and one folder")
        if name in free_names(TrainConfig):
            raise ValueError(
                f"--over {name}: it does not change what is trained, only how; `dape bench` times such options"
            )


def axes_of(given: tuple[tuple[str, ...], ...]) -> dict[str, list[object]]:
    """Values by option name; an unknown name is rejected when its values are checked."""
    axes: dict[str, list[object]] = {}
    for text in itertools.chain.from_iterable(given):
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f'--over "{text}" is not of the form name=value,value')
        axes[name.replace("-", "_")] = [parse_option(f"{name}={value}")[1] for value in values.split(",")]
    if not axes:
        raise ValueError("a sweep needs something to vary: give --over NAME=VALUE,VALUE")
    return axes
