"""`dape merge`: several comparisons in one report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dape.cli.compare import show_comparison, terminal
from dape.cli.parsing import parse
from dape.files import distinct_names
from dape.lab.comparison import Comparison, load_comparison, merge
from dape.settings import setting


@dataclass(frozen=True)
class Options:
    """Merge the results of several comparisons or sweeps into one report; a method in several of them is labelled with
    its folder. Results on the same target tokens are compared token by token."""

    folders: tuple[Path, ...] = setting(help="Folders of `dape compare` or `dape sweep`.", positional=True)
    out: Path = setting(Path("runs/merged"), help="Folder for results and report.", writes="folder")


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape merge")
    if len(options.folders) < 2:
        raise ValueError("name two folders or more")
    merged = merge(list(map(load_comparison, options.folders)), distinct_names(options.folders))
    comparison = Comparison(merged.tables, merged.about, options.out.absolute())
    comparison.save(options.out)
    show_comparison(comparison, terminal())
    return int(comparison.failed)
