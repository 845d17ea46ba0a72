"""Writes the rules as Prometheus reads them: `python -m ops.rules`."""

from __future__ import annotations

from pathlib import Path

import yaml

from ops.rules import alerts, recording

FILE = Path(__file__).parent / "dspark.rules.yaml"


def text() -> str:
    """The whole rule file."""
    rules = {"groups": [*recording.groups(), alerts.group()]}
    return "# Made by `python -m ops.rules`; don't edit.\n" + yaml.safe_dump(rules, sort_keys=False, width=200)


if __name__ == "__main__":
    FILE.write_text(text())
