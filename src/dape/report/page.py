"""report.html: one file with everything in it, for any browser, phone or desk, light or dark, offline."""

from __future__ import annotations

import json
import math
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from dape.files import write_atomically
from dape.report.markup import cards, definitions, differences_table, failures, score_table
from dape.report.results import VIEWS, Curve, Results, curves, finite, views
from dape.report.series import QUANTITIES, bars
from dape.report.style import style_of, times

# The browser itself refuses whatever is not in the page.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
NOTES = (
    "Every score is of the same target tokens: the last ones of each window, with more context to their left as "
    "the length grows. Error bars are one standard error over documents, joined with the spread between seeds "
    "where there are several. Differences and changes are paired: the same tokens on both sides, so their "
    "errors are smaller than those of the curves. Methods share data order and initial weights. "
    "Equal training time: every method is trained anew for as long as the fastest took, its number of steps "
    "by its measured pace, with a schedule of that many steps; methods within 5 % of the fastest keep their run."
)


def write_page(results: Results, path: Path) -> None:
    write_atomically(path, page(results))


def page(results: Results) -> str:
    """The page as HTML; the numbers it shows are also in it as JSON, under the ids results and curves."""
    script = (files("dape.report") / "page.js").read_text("utf-8")
    shown = {view: curves(results, view) for view in views(results)}
    body = "\n".join(_sections(results, shown))
    plotly = get_plotlyjs().replace("</script", r"<\/script")
    return document(
        _title(results),
        f"""{body}
<script type="application/json" id="results">{_embedded(results)}</script>
<script type="application/json" id="curves">{_embedded(plotted(results, shown))}</script>
<script>{plotly}</script>
<script>{script}</script>""",
    )


def document(title: str, body: str, *, style: str = "") -> str:
    """A whole page around a body: our looks, with more of them if given, and nothing from elsewhere."""
    shared = (files("dape.report") / "page.css").read_text("utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="dape">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{shared}{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def plotted(results: Results, shown: dict[str, list[Curve]]) -> dict[str, Any]:
    """What the page's script draws: for every view and method, value and error bar of every quantity."""
    points = [point for group in shown.values() for curve in group for point in curve.points]
    lengths = sorted({point.eval_length for point in points})
    train_length = results["records"][0]["train_length"] if results["records"] else 0
    perplexities = [point.ppl for point in points if math.isfinite(point.ppl)]
    return finite(
        {
            "views": list(shown),
            "train_length": train_length,
            "lengths": lengths,
            "ticks": [f"{length}<br>{times(length, train_length)}" for length in lengths],
            "quantities": {
                name: {
                    "label": quantity.label,
                    "logarithmic": quantity.logarithmic,
                    "ticks": _ticks(perplexities) if quantity.logarithmic else [],
                }
                for name, quantity in QUANTITIES.items()
            },
            "curves": {
                view: [_plotted(*entry) for entry in enumerate(group)] for view, group in shown.items()
            },
        }
    )


def _plotted(index: int, curve: Curve) -> dict[str, Any]:
    style = style_of(index, curve.method)
    look = {"colour": style.colour, "symbol": style.symbol, "dashed": style.dashed, "width": style.width}
    hover = {
        name: [
            f"{QUANTITIES[name].label}: {bar.value:.4g} (+{bar.up:.2g}, −{bar.down:.2g})"
            for bar in bars(curve, name)
        ]
        for name in QUANTITIES
    }
    values = {name: bars(curve, name) for name in QUANTITIES}
    lengths = [point.eval_length for point in curve.points]
    return {"method": curve.method, "lengths": lengths, "hover": hover, **look, **values}


def _ticks(values: list[float]) -> list[float]:
    """Round perplexities over the range, closer together the smaller it is."""
    if not values:
        return []
    low, high = min(values) * 0.9, max(values) * 1.1
    digits: tuple[float, ...] = (
        (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9) if high / low < 4 else (1, 2, 3, 4, 5, 7)
    )
    digits = digits if high / low < 40 else (1, 2, 5) if high / low < 4000 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    return [float(f"{value:.6g}") for value in candidates if low <= value <= high]


def _sections(results: Results, shown: dict[str, list[Curve]]) -> list[str]:
    settings = results["settings"]
    lines = [f"<h1>{escape(_title(results))}</h1>", f'<p class="faint">{escape(_subtitle(results))}</p>']
    lines.append(failures(results))
    if shown:
        lines.append(cards(shown, settings.get("baseline")))
        lines.append(_controls(list(shown), has_pairs=bool(results.get("pairs"))))
        lines.append('<figure><div id="plot" role="img" aria-label="Scores by length"></div></figure>')
    else:
        lines.append('<div id="plot" hidden></div><p>No run was evaluated.</p>')
    for view, group in shown.items():
        lines.append(f'<section data-view="{view}"><h2>Perplexity at {VIEWS[view]}</h2>')
        lines.append(score_table(group, results["records"][0]["train_length"]))
        if any(not math.isnan(point.difference.value) for curve in group for point in curve.points):
            lines.append(f"<h2>Loss minus {escape(str(settings.get('baseline')))}'s, at {VIEWS[view]}</h2>")
            lines.append(differences_table(group, results["records"][0]["train_length"]))
        lines.append("</section>")
    lines.append(f'<p class="faint">{escape(NOTES)}</p>')
    lines.append('<h2>Reproduce</h2><pre id="command">' + escape(results.get("command", "")) + "</pre>")
    lines.append('<button class="action" id="copy">copy the command</button>')
    lines.append('<button class="action" id="save-json">save results.json</button>')
    lines.append(f'<div class="columns"><div><h2>Settings</h2>{definitions(settings)}</div>')
    lines.append(
        f"<div><h2>Hardware and versions</h2>{definitions(results.get('environment', {}))}</div></div>"
    )
    return lines


def _title(results: Results) -> str:
    if not results["records"]:
        return "Length extrapolation: no results"
    longest = max(record["eval_length"] for record in results["records"])
    train_length = results["records"][0]["train_length"]
    return f"Trained at {train_length} tokens, evaluated to {longest} ({times(longest, train_length)})"


def _subtitle(results: Results) -> str:
    settings = results["settings"]
    seeds = len(settings.get("seeds", ())) or 1
    methods = f"{len(settings.get('methods', ()))} methods, {seeds} seed{'s' if seeds > 1 else ''}"
    return f"Corpus {settings.get('corpus', 'unknown')} · {methods} · {settings.get('steps', '?')} steps"


def _controls(present: list[str], *, has_pairs: bool) -> str:
    quantities = {"ppl": "perplexity", "nll": "loss", "change": "change"}
    if has_pairs:
        quantities["difference"] = "against baseline"
    chosen = [("quantity", quantities)]
    if len(present) > 1:
        chosen.insert(0, ("view", {view: VIEWS[view] for view in present}))
    groups = []
    for axis, entries in chosen:
        buttons = "".join(
            f'<button data-axis="{axis}" data-value="{value}" aria-pressed="{str(not place).lower()}">{label}</button>'
            for place, (value, label) in enumerate(entries.items())
        )
        groups.append(f'<div class="choice" role="group" aria-label="{axis}">{buttons}</div>')
    return f'<div class="controls">{"".join(groups)}</div>'


def _embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
