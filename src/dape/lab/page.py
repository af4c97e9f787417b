"""report.html of a comparison: one self-contained page, drawn by a script of its own from the numbers embedded as JSON."""

from __future__ import annotations

import math

from dape import pages
from dape.lab.comparison import VIEWS, Comparison
from dape.lab.figures import COLOURS, QUANTITIES, style_of
from dape.lab.tables import times
from dape.methods import parse_layers


def page(comparison: Comparison) -> str:
    """The page as HTML."""
    template = pages.environment("dape.lab").get_template("page.html.j2")
    return template.render(
        shown=comparison,
        about=comparison.about,
        title=title(comparison),
        subtitle=subtitle(comparison),
        views={view: VIEWS[view] for view in comparison.views},
        quantities={name: name for name in QUANTITIES},
        colours=COLOURS,
        methods=summaries(comparison),
        plotted=plotted(comparison),
        latex="\n".join(map(comparison.latex, comparison.views)),
        words=words,
    )


def words(value: object) -> str:
    """Readable form of a setting."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {words(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None or value == "" else str(value)


def title(comparison: Comparison) -> str:
    if not comparison.lengths:
        return "Length extrapolation: no results"
    unit, longest = comparison.train_length, comparison.lengths[-1]
    if not unit:
        return f"Evaluated to {longest} tokens"
    return f"Trained at {unit} tokens, evaluated to {longest} ({times(longest, unit)})"


def subtitle(comparison: Comparison) -> str:
    settings, seeds = comparison.about.settings, comparison.num_seeds
    methods = f"{len(comparison.about.methods)} methods, {seeds} seed{'s' if seeds != 1 else ''}"
    steps = f" · {settings['steps']} steps" if "steps" in settings else ""
    return f"Corpus {settings.get('corpus', 'unknown')} · {methods}{steps}"


def summaries(comparison: Comparison) -> dict[str, str]:
    """One-line descriptions of the methods that are known here."""
    found = {}
    for method in comparison.about.methods:
        try:
            found[method] = "; ".join(dict.fromkeys(layer.summary for layer in parse_layers(method)))
        except ValueError:
            continue
    return found


def plotted(comparison: Comparison) -> dict[str, object]:
    """Data of the page's plots: for every view, method and quantity, values with their intervals."""
    curves: dict[str, list[dict[str, object]]] = {}
    looks: dict[str, tuple[str, bool]] = {}
    for view in comparison.views:
        curves[view] = []
        for index, curve in enumerate(comparison.curves(view)):
            look = style_of(index, curve.method)
            looks.setdefault(curve.method, (look.colour, look.dashed))
            values = {
                name: [
                    [one if math.isfinite(one) else None for one in what.of(point)] for point in curve.points
                ]
                for name, what in QUANTITIES.items()
            }
            lengths = [point.length for point in curve.points]
            curves[view].append({"name": curve.method, "x": lengths, "values": values})
    return {
        "views": comparison.views,
        "unit": comparison.train_length,
        "lengths": comparison.lengths,
        "quantities": {name: [what.label, what.logarithmic] for name, what in QUANTITIES.items()},
        "looks": looks,
        "curves": curves,
        "training": comparison.about.curves,
    }
