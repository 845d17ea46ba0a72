"""The dashboards as PNGs, for those without a Grafana: `python -m ops.dashboards.preview`.

Asks Prometheus what Grafana would ask and draws every panel with its unit, legend and thresholds. Knows matplotlib and
the panels' values; a look at the data, not a copy of Grafana's looks.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.dates
import matplotlib.ticker
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ops.benchmarks import report
from ops.dashboards.catalog import DASHBOARDS
from ops.dashboards.model import Dashboard, Panel, Query, Unit
from ops.prometheus import Prometheus, Series

COLOURS = {"green": "#3a9d5d", "yellow": "#d8a200", "red": "#c8372d"}
COLUMNS = 24
"""As in Grafana: a row is 24 units wide."""
TITLE_HEIGHT, STAT_HEIGHT, PANEL_HEIGHT = 0.8, 2.2, 5.1
UNIT = 0.8
"""Inches of such a unit, in both directions."""
TITLE, TEXT, NUMBER = 13, 10, 24
"""Font sizes."""
MOST_NAMES = 6
"""Series that a legend names; of more, those that are 0 all the time go without."""
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
        return f"{100 * value:.3g}%" if abs(value) < 10 else f"{100 * value:,.0f}%"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    suffix = {"short": "", "x": "x", "reqps": " req/s", "ops": " /s", "tokens/s": " tok/s", "tokens": " tok"}[unit]
    return f"{value:.3g}{suffix}" if abs(value) < 1000 else f"{value:,.0f}{suffix}"


def colour_at(panel: Panel, value: float) -> str:
    reached = [colour for start, colour in panel.thresholds if start is None or value >= start]
    return COLOURS[reached[-1]]


def render(dashboard: Dashboard, ask: Callable[[Query], list[Series]], path: Path) -> None:
    """Draw one dashboard. `ask` returns the series of a query."""
    lines = [line for row in dashboard.rows for line in (row.title, *_lines(row.panels))]
    height = sum(_height(line) for line in lines) + 2 * TITLE_HEIGHT
    figure = pyplot.figure(figsize=(COLUMNS * UNIT, height * UNIT))
    canvas, bottom = _Canvas(figure, height), height - 2 * TITLE_HEIGHT
    drawn: list[Axes] = []
    for line in lines:
        bottom -= _height(line)
        if isinstance(line, str):
            canvas.write(0.2, bottom + 0.3, line, size=TITLE + 2, weight="bold", color="#444444")
            continue
        column = 0
        for panel in line:
            axes = canvas.axes(column, bottom, panel)
            _draw(axes, panel, [(legend_of(q, s.labels), s.points) for q in panel.queries for s in ask(q)])
            drawn += [axes] * (panel.kind == "timeseries" and axes.axison)
            column += panel.width
    canvas.write(0.2, height - 0.7, f"{dashboard.title}: {dashboard.question}", size=TITLE + 5)
    canvas.write(0.2, height - 1.2, _same_time(drawn), size=TEXT, color="#444444")
    figure.savefig(path, dpi=75)
    pyplot.close(figure)
    with Image.open(path) as image:  # a palette: a third of the bytes
        image.convert("RGB").quantize(256).save(path, optimize=True)


def _same_time(panels: list[Axes]) -> str:
    """Give all panels the same span of time; returns it in words."""
    spans = [axes.dataLim.intervalx for axes in panels]
    if not spans:
        return ""
    start, end = min(span[0] for span in spans), max(span[1] for span in spans)
    for axes in panels:
        axes.set_xlim(start, max(end, start + 1e-5))  # in days
    first, last = matplotlib.dates.num2date(start), matplotlib.dates.num2date(end)
    return f"{first:%Y-%m-%d %H:%M:%S} to {last:%H:%M:%S} UTC. Dashed: from there on a panel changes its colour."


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Places axes on a grid of squares, with room for their labels."""

    figure: Figure
    height: float

    def axes(self, column: float, bottom: float, panel: Panel) -> Axes:
        left, right, above = (0.2, 0.2, 0.6) if panel.kind == "stat" else (1.3, 0.4, 0.6)
        below = {"stat": 0.2, "bargauge": 0.8, "timeseries": 1.6}[panel.kind]  # a legend, and moments
        height = _height((panel,)) - below - above
        box = (column + left, bottom + below, panel.width - left - right, height)
        scale = (COLUMNS, self.height, COLUMNS, self.height)
        return self.figure.add_axes(tuple(side / whole for side, whole in zip(box, scale, strict=True)))

    def write(self, column: float, bottom: float, text: str, **looks: Any) -> None:
        self.figure.text(column / COLUMNS, bottom / self.height, text, **looks)


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
    axes.set_title(panel.title, fontsize=TITLE, loc="left")
    if not any(not math.isnan(value) for _, points in series for _, value in points):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", ha="center", va="center", size=NUMBER, color="#888888", transform=axes.transAxes)
        return
    {"stat": _draw_stat, "bargauge": _draw_bars, "timeseries": _draw_lines}[panel.kind](axes, panel, series)


def _draw_stat(axes: Axes, panel: Panel, series: list[Point]) -> None:
    value = series[0][1][-1][1]
    axes.set(xticks=[], yticks=[], facecolor=colour_at(panel, value))
    text = written(value, panel.unit)
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=NUMBER, color="white", transform=axes.transAxes)


def _draw_bars(axes: Axes, panel: Panel, series: list[Point]) -> None:
    series = sorted(series, key=lambda point: float(point[0].split()[-1]))  # "position 3", "more than 1.0"
    names, values = [name for name, _ in series], [points[-1][1] for _, points in series]
    bars = axes.barh(names, values, color=[colour_at(panel, value) for value in values])
    axes.bar_label(bars, [written(value, panel.unit) for value in values], fontsize=TEXT, padding=2)
    axes.invert_yaxis()
    axes.tick_params(labelsize=TEXT)
    axes.set_xlim(panel.minimum, None if panel.maximum is None else 1.15 * panel.maximum)  # room for the numbers
    axes.xaxis.set_major_formatter(lambda value, _: written(value, panel.unit))


def _draw_lines(axes: Axes, panel: Panel, series: list[Point]) -> None:
    names = [f"{name}: {written(points[-1][1], panel.unit)}" for name, points in series]
    if len(names) > MOST_NAMES:
        names = [n if any(value for _, value in points) else "_" for n, (_, points) in zip(names, series, strict=True)]
    if panel.stacked:
        moments = sorted({at for _, points in series for at, _ in points})
        values = [[dict(points).get(at, 0.0) for at in moments] for _, points in series]
        axes.stackplot([_moment(at) for at in moments], values, labels=names, alpha=0.7)
    else:
        for place, (name, (_, points)) in enumerate(zip(names, series, strict=True)):
            moments_, values_ = [_moment(at) for at, _ in points], [value for _, value in points]
            width = max(3.0 - 0.6 * place, 1.2)  # one that lies under another still shows
            axes.plot(moments_, values_, label=name, linewidth=width, marker="." if len(points) == 1 else None)
    _scale(axes, panel)
    axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M:%S"))
    axes.xaxis.set_major_locator(matplotlib.ticker.LinearLocator(4))
    axes.tick_params(labelsize=TEXT)
    axes.grid(alpha=0.3)
    corner = (-0.9 / panel.width, -0.1)
    below = {"loc": "upper left", "bbox_to_anchor": corner, "borderaxespad": 0, "frameon": False}
    axes.legend(fontsize=TEXT, ncols=3 if panel.width > 8 else 2, columnspacing=1, handlelength=1.2, **below)


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _scale(axes: Axes, panel: Panel) -> None:
    """The panel's limits, with some room so that a line along one of them can be seen, and its thresholds."""
    low, high = axes.get_ylim()
    for start, colour in panel.thresholds:
        if start is not None and start <= high * 1.5:
            axes.axhline(start, color=COLOURS[colour], linewidth=1, linestyle="--")
    low, high = axes.get_ylim()
    if panel.minimum is not None:
        low = panel.minimum
    if panel.maximum is not None:
        high = panel.maximum
    elif not axes.dataLim.intervaly.any():
        high = 1.0  # nothing but zeros
    room = 0.03 * (high - low)
    axes.set_ylim(low - room, high + room)
    axes.yaxis.set_major_formatter(lambda value, _: written(value, panel.unit))
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=panel.unit == "short"))


def moment(text: str) -> datetime:
    """As pictures tell it, or with an offset."""
    read = datetime.fromisoformat(text)
    return read if read.tzinfo else read.replace(tzinfo=UTC)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL of the server to ask")
    parser.add_argument("--minutes", type=float, default=15.0, help="how far to look back")
    parser.add_argument("--until", type=moment, help="ISO date and time (UTC unless it says), for what is past; or now")
    parser.add_argument("--window", default="1m", help="range of the rates: at least four scrapes")
    parser.add_argument("--output", type=Path, default=Path("runs/dashboards"), help="folder of the PNGs")
    options = parser.parse_args()
    server, end = Prometheus(options.prometheus), options.until.timestamp() if options.until else time.time()
    start, step = end - options.minutes * 60, max(1.0, options.minutes * 60 / 200)
    options.output.mkdir(parents=True, exist_ok=True)

    def ask(query: Query) -> list[Series]:
        return server.query_range(concrete(query.expression, options.window), start, end, step)

    for dashboard in DASHBOARDS:
        path = options.output / f"{dashboard.uid}.png"
        render(dashboard, ask, path)
        print(path)
    origin = {**report.provenance(), "until": datetime.fromtimestamp(end, UTC).isoformat(timespec="seconds")}
    (options.output / "origin.json").write_text(json.dumps(origin, indent=1) + "\n")


if __name__ == "__main__":
    main()
