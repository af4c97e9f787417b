"""`dape compare`: how do encodings hold up beyond their training length?"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from dape.commands.options import ModelOptions, check_options, training_defaults, with_options
from dape.commands.parsing import parse as parse_options
from dape.lab.compare import CompareConfig, Comparison, by_recipe, run_comparison
from dape.lab.curves import HELD, WORSE, curves, score_table, train_length, verdict, views, warnings
from dape.lab.display import display
from dape.lab.execute import summary_of
from dape.lab.records import VIEWS
from dape.lab.tables import chosen
from dape.lab.terminal import plot

DESCRIPTION = """Train methods alike and see how each holds up beyond its training length.

  dape compare --jobs 2                          five methods on Python's library
  dape compare --corpus my_texts/ --methods rope,dape1x3-kerple --seeds 0,1,2
  dape compare --preset 125m --config mine.toml  the paper's recipe, changed

Every method sees the same data in the same order and starts from the same weights where they share any; every
length is scored on the same target tokens, with standard errors over documents. Given again, the command goes
on where it was interrupted, tries again what failed and keeps what is done, so methods, seeds and lengths can
be added later. The folder then holds results.json, results.csv, table.tex, figures/ and report.html."""
# Lengths that fit beside the method, the change and the time in 80 columns.
COLUMNS = 5


@dataclass(frozen=True, kw_only=True)
class CommandLine(ModelOptions, CompareConfig):
    pass


# What tyro calls it where it says what is wrong.
CommandLine.__name__ = "dape compare"


def main(arguments: list[str]) -> int:
    config = parse(arguments)
    console = terminal()
    found = run(config, console)
    show(found, console)
    return int(found.failed)


def terminal() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 80)


def parse(
    arguments: list[str], kind: Any = CommandLine, prog: str = "dape compare", description: str = DESCRIPTION
) -> Any:
    """The options: the preset's recipe, changed by the file, changed by those given."""
    changes = training_defaults(arguments)
    default = by_recipe(changes["preset"], **changes)
    parsed: Any = parse_options(
        kind, arguments, default=kind(**asdict(default)), prog=prog, description=description
    )
    config = with_options(CompareConfig, parsed)
    # A method that cannot be built does not keep the others from being compared; an option that does not fit does.
    has_options = config.position_options or config.score_options
    check_options(config, config.method_list if has_options else [])
    return config if kind is CommandLine else (config, parsed)


def run(config: CompareConfig, console: Console, **options: Any) -> Comparison:
    """The comparison, with a bar for every run under way, or a line for each that ends if nobody watches."""
    with display(console, at_once=config.jobs, summary=summary_of) as announce:
        return run_comparison(config, announce, progress=console.is_terminal, **options)


def show(found: Comparison, console: Console) -> None:
    """The verdict, tables, the plot of the first view, and where everything is."""
    results = found.results
    shown = views(results)
    console.print()
    for sentence in [*(verdict(results, view) for view in shown), *warnings(results)]:
        console.print(sentence, style="bold", markup=False)
    for view in shown:
        table = score_table(results, view)
        lengths = len(table.heads) - 3
        console.print()
        console.print(table.rich([*chosen(lengths, COLUMNS), *range(lengths, len(table.heads))]))
    for failure in results["failures"]:
        where = VIEWS.get(failure.get("view", ""), "")
        console.print(
            f"failed: {failure['method']}, seed {failure['seed']}, {where}: {failure['error']}",
            style="red",
            markup=False,
        )
    legend = Text("change: of the loss, in nats; ", style="dim").append("held", style="green")
    legend.append(f" (< {HELD:g} or 2 errors) ", style="dim").append("worse", style="yellow")
    legend.append(" ").append(f"much worse (> {WORSE:g})", style="red")
    console.print(legend)
    for view in shown[:1]:
        console.print()
        console.print(plot(curves(results, view), train_length(results)))
    console.print()
    if found.folder is not None:
        for name, path in (
            ("numbers", "results.csv"),
            ("table", "table.tex"),
            ("figures", "figures"),
            ("report", "report.html"),
        ):
            style = "bold" if name == "report" else ""
            console.print(f"{name:<9}{found.folder / path}", soft_wrap=True, markup=False, style=style)
