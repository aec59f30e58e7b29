"""Charts of the report as SVG text: lines with points, and stacked bars. Colours are CSS classes s1-s6 and a0-a5 (ages).

A chart is drawn at the width it is shown at, so its text is of one size on every screen. The numbers stand beside it as
JSON for the page's pointer; all text is escaped.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["line", "faint", "points", "bound", "bar"]
Values = Sequence[float | None]

_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 12.0, 10.0, 24.0
_MOST_POINTS = 400
_MOST_BARS = 90
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Series:
    """One named row of values over the chart's x."""

    name: str
    values: Values
    colour: str
    style: Style = "line"


@dataclass(frozen=True)
class Chart:
    """What is drawn: x ascends; `unit` is that of the values, `x_name` says what x is."""

    title: str
    x: Sequence[float]
    series: Sequence[Series]
    unit: str = ""
    x_name: str = "step"
    note: str = ""
    y_from: float | None = 0.0
    """Lowest value of the axis; None: from the values."""
    y_to: float | None = None
    """Highest value of the axis; None: from the values."""

    @property
    def is_bars(self) -> bool:
        """Stacked bars instead of lines."""
        return any(series.style == "bar" for series in self.series)


def number(value: float | None, digits: int = 3) -> str:
    """A value for people: three digits, k and M, no trailing zeros."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, suffix in _SUFFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.{digits}g}{suffix}"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{digits}g}"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values from low to high."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    magnitude = math.floor(math.log10(raw))
    power = 10.0**magnitude
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12 - magnitude) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(chart: Chart) -> Chart:
    """The chart with at most so many points that they can be told apart: means of neighbours, the last x of each."""
    most = _MOST_BARS if chart.is_bars else _MOST_POINTS
    size = -(-len(chart.x) // most)
    if size <= 1:
        return chart
    starts = range(0, len(chart.x), size)
    series = [
        Series(one.name, [_mean(one.values[start : start + size]) for start in starts], one.colour, one.style)
        for one in chart.series
    ]
    x = [chart.x[min(start + size, len(chart.x)) - 1] for start in starts]
    note = f"{chart.note} Each point is a mean over {size} neighbours.".strip()
    return Chart(chart.title, x, series, chart.unit, chart.x_name, note, chart.y_from, chart.y_to)


def _mean(values: Values) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


class _Plot:
    """Axes: from values to the drawing's coordinates."""

    def __init__(self, chart: Chart, width: float, height: float) -> None:
        self.chart, self.width, self.height = chart, width, height
        self.low, self.high = _bounds(chart)
        first, last = (chart.x[0], chart.x[-1]) if chart.x else (0.0, 1.0)
        half = 0.5 * (last - first) / max(1, len(chart.x) - 1) if chart.is_bars and len(chart.x) > 1 else 0.0
        if first == last:
            half = 0.5
        self.x_low, self.x_high = first - half, last + half

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return self.height - _BOTTOM - (value - self.low) / (self.high - self.low) * (self.height - _TOP - _BOTTOM)

    def frame(self) -> str:
        """Grid, tick labels and the name of x."""
        bottom = self.height - _BOTTOM
        parts = []
        for tick in ticks(self.low, self.high):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{self.width - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in ticks(self.x_low, self.x_high, 5):
            if self.chart.x_name != "step" or tick == int(tick):
                parts.append(f'<text x="{self.x(tick):.1f}" y="{bottom + 15:g}" text-anchor="middle">{number(tick, 4)}</text>')
        return "".join(parts)


def _bounds(chart: Chart) -> tuple[float, float]:
    columns = [[value for value in series.values if value is not None and math.isfinite(value)] for series in chart.series]
    if chart.is_bars:
        stacks = itertools.zip_longest(*(series.values for series in chart.series), fillvalue=None)
        columns = [[sum(value for value in stack if value is not None) for stack in stacks]]
    known = [value for column in columns for value in column] or [0.0]
    low = min(known) if chart.y_from is None else min(chart.y_from, *known)
    high = max(known) if chart.y_to is None else chart.y_to
    if high <= low:
        high = low + (abs(low) or 1.0)
    top = ticks(low, high)
    step = top[1] - top[0] if len(top) > 1 else high - low
    if chart.y_to is None:
        high = math.ceil(high / step - 1e-9) * step
    if chart.y_from is None:
        low = math.floor(low / step + 1e-9) * step
    return low, high


def draw(chart: Chart, width: float, height: float = 190.0) -> str:
    """The SVG of a chart, with its numbers for the pointer."""
    chart = thinned(chart)
    plot = _Plot(chart, width, height)
    marks = _bars(plot) if chart.is_bars else "".join(_line(plot, series) for series in chart.series)
    points = html.escape(json.dumps(_pointer(plot)), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(chart.title)}" '
        f'data-points="{points}">{plot.frame()}{marks}<line class="cursor" y1="{_TOP:g}" y2="{height - _BOTTOM:g}"/></svg>'
    )


def _pointer(plot: _Plot) -> dict[str, Any]:
    series = [
        {"name": one.name, "colour": one.colour, "values": [number(value, 4) for value in one.values]}
        for one in plot.chart.series
        if one.style != "bound"
    ]
    return {
        "at": [round(plot.x(value), 1) for value in plot.chart.x],
        "x": [number(value, 6) for value in plot.chart.x],
        "x_name": plot.chart.x_name,
        "unit": plot.chart.unit,
        "series": series,
    }


def _line(plot: _Plot, series: Series) -> str:
    dots = [
        (plot.x(x), plot.y(value))
        for x, value in zip(plot.chart.x, series.values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    if series.style == "points":
        return "".join(
            f'<path class="point {series.colour}" d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"/>' for x, y in dots
        )
    if len(dots) == 1:
        return f'<circle class="dot {series.colour}" cx="{dots[0][0]:.1f}" cy="{dots[0][1]:.1f}" r="3"/>'
    path = "".join(f"{'M' if index == 0 else 'L'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(dots))
    return f'<path class="{series.style} {series.colour}" d="{path}"/>'


def _bars(plot: _Plot) -> str:
    """One path for each colour: a rectangle for each x, on top of the series before it."""
    x_values = plot.chart.x
    slot = (plot.width - _LEFT - _RIGHT) / max(1, len(x_values))
    bar = max(1.0, slot - (2.0 if slot > 5 else 0.5 if slot > 2 else 0.0))
    base = [0.0] * len(x_values)
    parts = []
    for series in plot.chart.series:
        path = []
        for index, value in enumerate(series.values):
            if value:
                bottom, top = plot.y(base[index]), plot.y(base[index] + value)
                base[index] += value
                path.append(f"M{plot.x(x_values[index]) - bar / 2:.1f} {bottom:.1f}V{top:.1f}h{bar:.1f}V{bottom:.1f}z")
        parts.append(f'<path class="bar {series.colour}" d="{"".join(path)}"/>')
    return "".join(parts)


def figure(chart: Chart, *, wide: bool = False) -> str:
    """A card: title, legend, drawing, note. A wide one is drawn twice, for wide and for narrow screens."""
    unit = f' <span class="unit">{html.escape(chart.unit)}</span>' if chart.unit else ""
    keys = "".join(
        f'<span class="key {series.style} {series.colour}">{html.escape(series.name)}</span>' for series in chart.series
    )
    legend = f'<div class="legend">{keys}</div>' if len(chart.series) > 1 else ""
    drawing = draw(chart, 376)
    if wide:
        drawing = f'<div class="if-wide">{draw(chart, 780, 240)}</div><div class="if-narrow">{drawing}</div>'
    axis = f'<div class="axis">{html.escape(chart.x_name)}</div>'
    note = html.escape(thinned(chart).note)
    return (
        f'<figure class="card{" wide" if wide else ""}"><figcaption>{html.escape(chart.title)}{unit}</figcaption>'
        f"{legend}{drawing}{axis}" + (f'<p class="note">{note}</p>' if note else "") + "</figure>"
    )
