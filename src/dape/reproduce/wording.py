"""What a reader must know before the numbers: what verdicts mean, and how far ours are from the paper's scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dape.reproduce.evidence import VERDICTS, searched
from dape.reproduce.folders import Folder
from dape.reproduce.paper import Paper
from dape.reproduce.spread import ONE_POSITION, TWO_POSITIONS, Spread


def explained(folders: Sequence[Folder]) -> str:
    return (
        f"*{VERDICTS[0]}* and *{VERDICTS[1]}*: the comparisons that a claim is made of lie beyond two standard errors, "
        f"for it or against it. *{VERDICTS[2]}*: within. Losses are compared on the same tokens, window by window; "
        f"errors are over documents, joined with the spread between seeds. {borrowed(folders)} "
        f"An exception among many comparisons decides only further out, beyond {searched(24):.1f} errors for one of 24."
    )


def borrowed(folders: Sequence[Folder]) -> str:
    """What few seeds say of their spread, and where it is known from others: how large at the training length."""
    spread = next((f.spread for f in folders if f.kind == "language" and f.results), Spread())
    known = {
        words: spread.expected([("methods", kind)], 1.0)
        for kind, words in (
            (ONE_POSITION, "sharing a position encoding"),
            (TWO_POSITIONS, "with different ones"),
        )
    }
    said = "Few seeds say little of that spread, and one says nothing"
    told = [f"{words} {value:.3f}" for words, value in known.items() if value is not None]
    if not told:
        return f"{said}: another training might decide otherwise."
    return (
        f"{said}: it is joined with that of comparisons of the same kind elsewhere (at the training length, in nats, "
        f"between methods {' and '.join(told)})."
    )


def another_scale(folder: Folder, paper: Paper) -> str:
    """That ours and the paper's numbers are not to be compared digit by digit."""
    results = folder.best
    if results is None:
        return "The paper's alone; ours are not run yet."
    if not paper.title or results.get("scale") == "paper":
        return ""
    scale = f"the {results.get('scale')} scale"
    if results.get("kind") == "tasks":
        return f"Ours are trained for far fewer steps ({scale}): compare which methods lead, not the values."
    if results.get("kind") == "timing":
        return f"Ours are of small models on the processor named below ({scale}), the paper's on GPUs: compare ratios."
    steps = paper.value("configuration", setting="thousand steps", size="125m")
    budget = f", and {steps:g} thousand steps" if steps else ""
    return (
        f"Ours are small models on other text ({scale}), the paper's have {size_of(paper)} parameters or "
        f"more{budget}: compare the order of methods and the shape of curves, not the values."
    )


def size_of(paper: Paper) -> str:
    """The smallest size in the paper's table of configurations, as words."""
    sizes = [number.get("size") for number in paper.numbers if number.quantity == "configuration"]
    return f"{sizes[0].removesuffix('m')} million" if sizes else "many"


def scale_of(folders: Sequence[Folder], paper: Paper) -> str:
    """In a sentence: how large our models are, on how much of which text; empty at the paper's scale."""
    trained = [f for f in folders if f.kind == "language" and f.best and f.best.get("scale") != "paper"]
    rows = [row for folder in trained for row in (folder.best or {}).get("records", ())]
    rows = [row for row in rows if {"parameters", "steps", "batch_size", "train_length"} <= set(row)]
    if not rows:
        return ""
    sizes = millions(row["parameters"] for row in rows)
    tokens = millions(row["steps"] * row["batch_size"] * row["train_length"] for row in rows)
    folder, corpora = trained[0], dict.fromkeys(row["corpus"] for row in rows)
    texts = [f"{c} is {folder.texts[c]}{stand_in(folder, c)}" for c in corpora if c in folder.texts]
    theirs = f" The paper's have {size_of(paper)} parameters or more." if paper.title else ""
    return (
        f"Verdicts are of the laptop's scale: models of {sizes} parameters trained on {tokens} tokens each.{theirs}"
        + (f" Texts: {'; '.join(texts)}." if texts else "")
    )


def stand_in(folder: Folder, corpus: str) -> str:
    return f", for {folder.stands_for[corpus].capitalize()}" if corpus in folder.stands_for else ""


def millions(values: Iterable[float]) -> str:
    """The range of some numbers, in millions."""
    found = list(values)
    low, high = (f"{value / 1e6:.1f}" for value in (min(found), max(found)))
    return f"{low} to {high} million" if low != high else f"{low} million"
