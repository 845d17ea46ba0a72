"""Pictures of dashboards, from made-up series; with real ones: tests/deployments/test_observability.py."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from PIL import Image

from ops.benchmarks.report import RESULTS
from ops.dashboards.catalog import DASHBOARDS
from ops.dashboards.model import Dashboard, Kind, Panel, Query, Row
from ops.dashboards.preview import render, written
from ops.prometheus import Series


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (0.4567, "percentunit", "45.7%"),
        (-11.77, "percentunit", "-1,177%"),
        (9.2312, "x", "9.23x"),
        (12345.6, "tokens/s", "12,346 tok/s"),
        (math.nan, "x", "no data"),
    ],
)
def test_values_have_units_and_three_digits(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text  # type: ignore[arg-type]


def test_whatever_is_measured_can_be_drawn(tmp_path: Path) -> None:
    """Nothing, not yet, zeros, one point, more than a legend holds; as a number, as bars, as lines, stacked."""
    answers: dict[str, list[Series]] = {
        "nothing": [],
        "unknown": [Series({"k": "0"}, ((1e9, math.nan), (1e9 + 5, math.nan)))],
        "zeros": [Series({"k": "1"}, ((1e9, 0.0), (1e9 + 5, 0.0)))],
        "point": [Series({"k": "2"}, ((1e9 + 9, 7.0),))],
        "many": [Series({"k": str(k)}, ((1e9, 0.0), (1e9 + 5, float(k)))) for k in range(9)],
    }
    kinds: list[tuple[Kind, bool]] = [("stat", False), ("bargauge", False), ("timeseries", False), ("timeseries", True)]
    panels = [
        Panel(f"{kind}, {name}", "", "x", (Query(name, "k {{k}}"),), kind=kind, stacked=stacked)
        for kind, stacked in kinds
        for name in answers
    ]
    dashboard = Dashboard("test", "Test", "Is it drawn?", (Row("All", tuple(panels)),))
    render(dashboard, lambda query: answers[query.expression], path := tmp_path / "test.png")
    with Image.open(path) as image:
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 50


def test_the_pictures_in_the_readme_are_of_every_dashboard_and_small() -> None:
    folder = RESULTS / "dashboards"
    assert {path.stem for path in folder.glob("*.png")} == {dashboard.uid for dashboard in DASHBOARDS}
    assert all(path.stat().st_size < 300_000 for path in folder.glob("*.png"))
