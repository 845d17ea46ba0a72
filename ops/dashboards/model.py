"""What a dashboard is made of: questions, rows, panels and their queries. Knows nothing of Grafana or matplotlib.

The same values become Grafana's JSON (grafana.py), PNGs (preview.py) and the list of queries that the tests run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat", "bargauge"]
Unit = Literal["short", "s", "percentunit", "reqps", "tokens/s", "ops", "tokens", "x"]

GREEN, YELLOW, RED = "green", "yellow", "red"
Threshold = tuple[float | None, str]
"""From which value on (None: from the start) which colour."""
NEUTRAL: tuple[Threshold, ...] = ((None, GREEN),)
"""For what is neither good nor bad at any value."""

ENGINE = 'model=~"$model", replica=~"$replica"'
"""Selects the engines that the dashboard's variables name."""
HTTP = 'model=~"$model"'
"""Selects the HTTP side, whose replicas are not the engines'."""
WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and how its series are called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`runbook`: anchor of the section of ops/runbook.md to read when it looks bad; `width` in 24ths of a row."""

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    thresholds: tuple[Threshold, ...] = NEUTRAL
    runbook: str = ""
    stacked: bool = False
    minimum: float | None = 0
    maximum: float | None = None
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that answer one question together."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`question`: the one that it answers."""

    uid: str
    title: str
    question: str
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def stat(title: str, description: str, unit: Unit, expression: str, **fields: object) -> Panel:
    """One number, large."""
    query = Query(expression, title)
    return Panel(title, description, unit, (query,), kind="stat", width=4, **fields)  # type: ignore[arg-type]


def quantiles(metric: str, selector: str, of: tuple[float, ...] = (0.5, 0.95, 0.99)) -> tuple[Query, ...]:
    """Quantiles of a histogram over all selected series."""
    return tuple(Query(quantile(metric, selector, q), f"p{q * 100:g}") for q in of)


def quantile(metric: str, selector: str, of: float, by: str = "le") -> str:
    return f"histogram_quantile({of:g}, sum by ({by}) (rate({metric}_bucket{{{selector}}}[{WINDOW}])))"


def rate(metric: str, selector: str, by: str = "") -> str:
    """Per second, summed over all selected series, or `by` a label."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{selector}}}[{WINDOW}]))"


def ratio(numerator: str, denominator: str, selector: str, by: str = "") -> str:
    """One rate over another."""
    return f"{rate(numerator, selector, by)} / {rate(denominator, selector, by)}"
