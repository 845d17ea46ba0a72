"""The page of settings: every one is there, explained, and as the code reads it."""

from __future__ import annotations

import re

from ops.benchmarks.report import ROOT
from ops.settings_reference import reference


def test_the_settings_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == reference(), "run: python -m ops.settings_reference > docs/settings.md"


def test_every_setting_has_a_meaning_and_what_documents_name_is_there() -> None:
    rows = [line.strip("| ").split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    keys = {row[0].strip("`") for row in rows}
    assert all(len(row) == 4 and row[3].strip() for row in rows)
    assert {
        "engine_kwargs.max_num_seqs",
        "http_config.api_keys.file",
        "sla_tiers[].weight",
        "unhealthy_after_s",
    } <= keys
    named = re.findall(r"`((?:\w+_kwargs|\w+_config)\.[\w.]+)`", (ROOT / "ops" / "runbook.md").read_text())
    assert named and all(any(key.startswith(name) for key in keys) for name in named)
