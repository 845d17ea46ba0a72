"""The dashboards as PNGs, for those without a Grafana: `python -m ops.dashboards.preview`.

Asks Prometheus what Grafana would ask and draws every panel with its unit, legend and thresholds. Knows matplotlib and
the panels' values; a look at the data, not a copy of Grafana's looks.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.dates
import matplotlib.ticker
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ops.dashboards.catalog import DASHBOARDS
from ops.dashboards.model import Dashboard, Panel, Query, Unit
from ops.prometheus import Prometheus, Series

COLOURS = {"green": "#3a9d5d", "yellow": "#d8a200", "red": "#c8372d"}
COLUMNS = 24
"""As in Grafana: a row is 24 units wide."""
TITLE_HEIGHT, STAT_HEIGHT, PANEL_HEIGHT = 0.7, 2.3, 4.4
UNIT = 0.8
"""Inches of such a unit, in both directions."""
Point = tuple[str, tuple[tuple[float, float], ...]]
"""A legend and (unix time, value) in order."""


def concrete(expression: str, window: str) -> str:
    """An expression with the dashboard's variables filled in: every model, every replica."""
    filled = expression.replace("$__rate_interval", window)
    return re.sub(r"\$(model|replica)\b", ".*", filled)


def legend_of(query: Query, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), query.legend)


def written(value: float, unit: Unit) -> str:
    """A value as Grafana would write it, roughly."""
    if math.isnan(value):
        return "no data"
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    suffix = {"short": "", "x": "x", "reqps": " req/s", "ops": " /s", "tokens/s": " tok/s", "tokens": " tok"}[unit]
    return f"{value:.4g}{suffix}" if abs(value) < 1000 else f"{value:,.0f}{suffix}"


def colour_at(panel: Panel, value: float) -> str:
    reached = [colour for start, colour in panel.thresholds if start is None or value >= start]
    return COLOURS[reached[-1]]


def render(dashboard: Dashboard, ask: Callable[[Query], list[Series]], path: Path) -> None:
    """Draw one dashboard. `ask` returns the series of a query."""
    lines = [line for row in dashboard.rows for line in (row.title, *_lines(row.panels))]
    top = sum(_height(line) for line in lines) + TITLE_HEIGHT
    figure = pyplot.figure(figsize=(COLUMNS * UNIT, (top + TITLE_HEIGHT) * UNIT))
    canvas = _Canvas(figure, top + TITLE_HEIGHT)
    figure.text(
        0.5, 1 - 0.5 / canvas.height, f"{dashboard.title}: {dashboard.question}", ha="center", va="top", size=15
    )
    for line in lines:
        top -= _height(line)
        if isinstance(line, str):
            figure.text(0.1 / COLUMNS, (top + 0.3) / canvas.height, line, size=12, weight="bold", color="#444444")
            continue
        column = 0
        for panel in line:
            axes = canvas.axes(column, top, panel.width, _height(line))
            _draw(axes, panel, [(legend_of(q, s.labels), s.points) for q in panel.queries for s in ask(q)])
            column += panel.width
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Places axes on a grid of squares, with room for their labels."""

    figure: Figure
    height: float

    def axes(self, column: float, bottom: float, width: float, height: float) -> Axes:
        left, right, below, above = 1.0, 0.3, 0.6, 0.5
        box = (column + left, bottom + below, width - left - right, height - below - above)
        scale = (COLUMNS, self.height, COLUMNS, self.height)
        return self.figure.add_axes(tuple(side / whole for side, whole in zip(box, scale, strict=True)))


Line = str | tuple[Panel, ...]
"""A row's title, or panels beside each other."""


def _height(line: Line) -> float:
    if isinstance(line, str):
        return TITLE_HEIGHT
    return max(STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT for panel in line)


def _lines(panels: tuple[Panel, ...]) -> list[tuple[Panel, ...]]:
    """Panels as they wrap when a line is full."""
    lines: list[tuple[Panel, ...]] = [()]
    for panel in panels:
        if sum(other.width for other in lines[-1]) + panel.width > COLUMNS:
            lines.append(())
        lines[-1] += (panel,)
    return lines


def _draw(axes: Axes, panel: Panel, series: list[Point]) -> None:
    axes.set_title(panel.title, fontsize=9, loc="left")
    if not series:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color="#888888", transform=axes.transAxes)
        return
    {"stat": _draw_stat, "bargauge": _draw_bars, "timeseries": _draw_lines}[panel.kind](axes, panel, series)


def _draw_stat(axes: Axes, panel: Panel, series: list[Point]) -> None:
    value = series[0][1][-1][1]
    axes.set(xticks=[], yticks=[], facecolor=colour_at(panel, value))
    text = written(value, panel.unit)
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=17, color="white", transform=axes.transAxes)


def _draw_bars(axes: Axes, panel: Panel, series: list[Point]) -> None:
    series = sorted(series, key=lambda point: float(point[0].split()[-1]))  # "position 3", "<= +Inf"
    names, values = [name for name, _ in series], [points[-1][1] for _, points in series]
    bars = axes.barh(names, values, color=[colour_at(panel, value) for value in values])
    axes.bar_label(bars, [written(value, panel.unit) for value in values], fontsize=7, padding=2)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.set_xlim(panel.minimum, panel.maximum)
    axes.xaxis.set_major_formatter(lambda value, _: written(value, panel.unit))


def _draw_lines(axes: Axes, panel: Panel, series: list[Point]) -> None:
    names = [f"{name}: {written(points[-1][1], panel.unit)}" for name, points in series]
    if panel.stacked:
        moments = sorted({at for _, points in series for at, _ in points})
        values = [[dict(points).get(at, 0.0) for at in moments] for _, points in series]
        axes.stackplot([datetime.fromtimestamp(at) for at in moments], values, labels=names, alpha=0.7)
    else:
        for name, (_, points) in zip(names, series, strict=True):
            moments_, values_ = [datetime.fromtimestamp(at) for at, _ in points], [value for _, value in points]
            axes.plot(moments_, values_, label=name, linewidth=1.3, marker="." if len(points) == 1 else None)
    bottom, top = axes.get_ylim()
    for start, colour in panel.thresholds:
        if start is not None and start <= top * 1.5:
            axes.axhline(start, color=COLOURS[colour], linewidth=0.8, linestyle="--", alpha=0.7)
    axes.set_ylim(bottom=panel.minimum if panel.minimum is not None else bottom, top=panel.maximum)
    axes.yaxis.set_major_formatter(lambda value, _: written(value, panel.unit))
    axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M:%S"))
    axes.xaxis.set_major_locator(matplotlib.ticker.LinearLocator(4))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6.5, loc="upper left", framealpha=0.7, ncols=2 if len(names) > 4 else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL of the server to ask")
    parser.add_argument("--minutes", type=float, default=15.0, help="how far to look back")
    parser.add_argument("--window", default="1m", help="range of the rates: at least four scrapes")
    parser.add_argument("--output", type=Path, default=Path("runs/dashboards"), help="folder of the PNGs")
    options = parser.parse_args()
    server, end = Prometheus(options.prometheus), time.time()
    start, step = end - options.minutes * 60, max(1.0, options.minutes * 60 / 200)
    options.output.mkdir(parents=True, exist_ok=True)

    def ask(query: Query) -> list[Series]:
        return server.query_range(concrete(query.expression, options.window), start, end, step)

    for dashboard in DASHBOARDS:
        path = options.output / f"{dashboard.uid}.png"
        render(dashboard, ask, path)
        print(path)


if __name__ == "__main__":
    main()
