"""Writes the dashboards as Grafana's JSON: `python -m ops.dashboards`."""

from __future__ import annotations

from pathlib import Path

from ops.dashboards.catalog import DASHBOARDS
from ops.dashboards.grafana import to_json

FOLDER = Path(__file__).parent / "json"


def files() -> dict[Path, str]:
    """What the folder must hold."""
    return {FOLDER / f"{dashboard.uid}.json": to_json(dashboard) for dashboard in DASHBOARDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
