"""`dape compare`: how do encodings hold up beyond their training length?"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from dape.cli.options import read_training
from dape.lab.compare import CompareConfig, run_comparison
from dape.lab.comparison import FILES, HELD, STEP, VIEWS, WORSE, Comparison
from dape.lab.display import display
from dape.lab.tables import spread

DESCRIPTION = """Train methods under the same conditions and evaluate each beyond its training length.

  dape compare --jobs 2                          five methods on Python source code
  dape compare --corpus my_texts/ --methods rope,dape1x3-kerple --seeds 0,1,2
  dape compare --preset 125m --config mine.toml  the paper's recipe, changed

Every method sees the same data in the same order, and weights that methods share start equal; every length is
evaluated on the same target tokens, with intervals over documents and seeds. The same command resumes an interrupted
comparison, retries failed runs and keeps finished ones, so methods, seeds and lengths can be added later. The
folder then holds results.csv.gz (a table for pandas), table.tex, figures/ and report.html."""
# Number of lengths that fit into 80 columns with the method, the change and the time.
COLUMNS = 5


def main(arguments: list[str]) -> int:
    return run_and_show(parse_comparison(arguments))


def terminal() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 80)


def parse_comparison(
    arguments: list[str], *, prog: str = "dape compare", description: str = DESCRIPTION
) -> CompareConfig:
    return read_training(CompareConfig, CompareConfig, arguments, prog=prog, description=description)


def run_and_show(config: CompareConfig) -> int:
    """Execute the comparison, with a progress bar per run on a terminal, else a line for each finished run."""
    console = terminal()
    with display(console) as announce:
        comparison = run_comparison(config, announce, progress=console.is_terminal)
    show_comparison(comparison, console)
    return int(comparison.failed)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print the verdict, the tables, and the paths of all files."""
    views = comparison.views
    console.print()
    for sentence in [*map(comparison.verdict, views or [STEP]), *comparison.warnings()]:
        console.print(sentence, style="bold", markup=False)
    for view in views:
        table = comparison.loss_table(view)
        lengths = len(comparison.lengths)
        console.print()
        console.print(table.rich([*spread(lengths, COLUMNS), *range(lengths, len(table.heads))]))
    for failure in comparison.about.failures:
        view = VIEWS.get(failure.view, failure.view)
        console.print(f"failed: {failure.title}, {view}: {failure.error}", style="red", markup=False)
    legend = Text("change: of the loss, in nats; ", style="dim").append("held", style="green")
    legend.append(f" (< {HELD:g} or its interval) ", style="dim").append("worse", style="yellow")
    legend.append(" ").append(f"much worse (> {WORSE:g})", style="red")
    console.print(legend)
    console.print()
    if comparison.folder is not None:
        files = {"numbers": FILES[STEP], "table": "table.tex", "figures": "figures", "report": "report.html"}
        for name, file in files.items():
            style = "bold" if name == "report" else ""
            console.print(f"{name:<9}{comparison.folder / file}", soft_wrap=True, markup=False, style=style)
