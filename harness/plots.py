"""Plots of a page: matplotlib drawings as inline SVG whose colours and font are the page's own.

Colours are drawn as placeholders and then replaced by CSS variables, so one drawing serves the light and the dark page.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.rows import Row

# Placeholder colours: nothing else in a drawing may use them.
_INK, _GRID = "#010203", "#040506"
_COLOURS = tuple(f"#0a0b{number:02x}" for number in range(8))
MARKERS = "osD^vPX*"
# The same shapes for the legend, which is part of the page and not of the drawing.
GLYPHS = "●■◆▲▼✚✖★"
_DASHES = ("-", "--", "-.", ":")
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
    "svg.hashsalt": "shardbench",  # the same records give the same page
    "font.size": 9.5,
    "text.parse_math": False,  # a strategy may be called what it likes
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def style_of(strategies: Sequence[str]) -> dict[str, int]:
    """Return a number for each strategy: its colour, marker and dash in every plot of a page."""
    return {strategy: number for number, strategy in enumerate(dict.fromkeys(strategies))}


def step_plot(rows: Sequence[Row], styles: Mapping[str, int], title: str) -> str | None:
    """Draw milliseconds per decode step by batch, one line a strategy, or one dot each for a single batch.

    Args:
        rows: cases of one model, world and context.
        styles: from `style_of`.
        title: what the plot shows, for readers who can't see it.

    Returns:
        An <svg> element, or None when no row has a timing.
    """
    points = [
        _Point(row.strategy, row.batch, 1e3 * row.seconds, _scaled(row.interval))
        for row in rows
        if row.seconds is not None
    ]
    return _draw(points, styles, "ms per step", title, from_zero=True) if points else None


def share_plot(rows: Sequence[Row], styles: Mapping[str, int], title: str) -> str | None:
    """Draw each strategy's time as a share of the reference strategy's, by batch; None with fewer than two batches.

    What separates strategies is small beside what a larger batch costs, so it gets a plot of its own.
    """
    points = [
        _Point(row.strategy, row.batch, row.share, row.share_interval)
        for row in rows
        if row.share is not None
    ]
    if len({point.batch for point in points}) < 2 or len({point.strategy for point in points}) < 2:
        return None
    return _draw(points, styles, "time as a share of the reference", title, from_zero=False)


@dataclass(frozen=True)
class _Point:
    strategy: str
    batch: int
    value: float
    interval: tuple[float, float] | None

    @property
    def error(self) -> list[list[float]]:
        """The interval as matplotlib takes it: distances below and above, of one point."""
        low, high = self.interval or (self.value, self.value)
        # The ratio of medians need not lie inside an interval of paired ratios; a bar can't have a negative length.
        return [[max(0.0, self.value - low)], [max(0.0, high - self.value)]]


def _scaled(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return (1e3 * interval[0], 1e3 * interval[1]) if interval else None


def _draw(
    points: Sequence[_Point], styles: Mapping[str, int], quantity: str, title: str, *, from_zero: bool
) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    batches = sorted({point.batch for point in points})
    strategies = [strategy for strategy in styles if any(point.strategy == strategy for point in points)]
    lines = len(batches) > 1
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(5.0, 3.0 if lines else 0.9 + 0.34 * len(strategies)), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        for place, strategy in enumerate(strategies):
            number = styles[strategy]
            colour, marker = _COLOURS[number % len(_COLOURS)], MARKERS[number % len(MARKERS)]
            mine = sorted(
                (point for point in points if point.strategy == strategy), key=lambda point: point.batch
            )
            # Side by side by a little, or the intervals of strategies that are close would hide each other.
            shift = 0.03 * (place - (len(strategies) - 1) / 2)
            xs = [batches.index(point.batch) + shift if lines else point.value for point in mine]
            ys = [point.value if lines else place for point in mine]
            dash = _DASHES[number // len(_COLOURS) % len(_DASHES)] if lines else "none"
            axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linestyle=dash, linewidth=1.4)
            for x, y, point in zip(xs, ys, mine, strict=True):
                bars = {"yerr" if lines else "xerr": point.error}
                axes.errorbar(x, y, **bars, color=colour, capsize=2.5, linestyle="none", linewidth=1.2)  # type: ignore[arg-type]
        if lines:
            axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
            axes.set_xlabel("batch")
            axes.set_ylabel(quantity)
            axes.grid(axis="y", color=_GRID, linewidth=0.6)
            if from_zero:
                axes.set_ylim(bottom=0)
        else:
            axes.set_yticks(range(len(strategies)), strategies)
            axes.set_ylim(len(strategies) - 0.5, -0.5)
            axes.set_xlabel(f"{quantity}, batch {batches[0]}")
            axes.set_xlim(left=0)
            axes.grid(axis="x", color=_GRID, linewidth=0.6)
        stream = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    return _inline(stream.getvalue(), title)


def _inline(svg: str, title: str) -> str:
    """Return matplotlib's file as an element of a page: no prolog, no namespaces, the page's font and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Its rule for line joins would hold for the whole page; report.css has it for the plots.
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(?::\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font(?:-family)?: [^;\"]*?(?:'[^']*'(?:, )?|sans-serif)+[^;\"]*", _font, svg)
    svg = svg.replace(_INK, "var(--ink)").replace(_GRID, "var(--rule)")
    for number, colour in enumerate(_COLOURS):
        svg = svg.replace(colour, f"var(--s{number})")
    # Height follows from the width of the page and the viewBox.
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


def _font(found: re.Match[str]) -> str:
    pixels = re.search(r"(\d+(?:\.\d+)?)px", found.group(0))
    return f"font: {pixels.group(1)}px var(--font)" if pixels else "font-family: var(--font)"
