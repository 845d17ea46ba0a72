"""The dashboards are what the code says, ask only for what exists, and leave nobody guessing what a panel means."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ops.dashboards.__main__ import FOLDER, files
from ops.dashboards.catalog import DASHBOARDS
from ops.dashboards.model import Dashboard, Panel
from ops.rules.__main__ import text as rules
from tests.ops.metric_names import known, named, recorded

RUNBOOK = (Path(__file__).resolve().parents[2] / "ops" / "runbook.md").read_text()
PANELS = [pytest.param(panel, id=f"{d.uid}: {panel.title}") for d in DASHBOARDS for panel in d.panels()]


def anchors(markdown: str) -> set[str]:
    """What GitHub, and most others, make of headings."""
    headings = re.findall(r"^#+ (.*)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_files_are_in_step_with_the_code() -> None:
    assert {path: path.read_text() for path in FOLDER.glob("*.json")} == files(), "run: make generate"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_is_complete(panel: Panel) -> None:
    assert panel.title and panel.description.endswith(".") and panel.unit
    assert panel.thresholds[0][0] is None, "a threshold list begins with the colour of everything below"
    assert panel.queries and all(query.legend for query in panel.queries)
    assert len({query.legend for query in panel.queries}) == len(panel.queries)
    assert not panel.runbook or panel.runbook in anchors(RUNBOOK)


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_only_for_what_exists(panel: Panel) -> None:
    for query in panel.queries:
        assert recorded(query.expression) <= recorded(rules())
        assert named(query.expression) <= known()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_grafana_gets_variables_links_and_one_place_per_panel(dashboard: Dashboard) -> None:
    model = json.loads(files()[FOLDER / f"{dashboard.uid}.json"])
    assert [variable["name"] for variable in model["templating"]["list"]] == [
        "datasource",
        "model",
        "replica",
        "runbook",
    ]
    panels = [panel for panel in model["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in panels] == [panel.title for panel in dashboard.panels()]
    assert len({panel["id"] for panel in model["panels"]}) == len(model["panels"])
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
    places = [(place["x"], place["y"]) for place in (panel["gridPos"] for panel in model["panels"])]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in model["panels"])


def test_the_runbook_leads_on_to_sections_that_exist() -> None:
    assert set(re.findall(r"\]\(#([^)]+)\)", RUNBOOK)) <= anchors(RUNBOOK)


def test_titles_tell_the_panels_of_a_dashboard_apart() -> None:
    for dashboard in DASHBOARDS:
        titles = [panel.title for panel in dashboard.panels()]
        assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("page", ["ops/runbook.md", "docs/observe.md", "docs/sla-tiers.md", "docs/scheduler.md"])
def test_pages_name_panels_that_exist(page: str) -> None:
    """Panels are set in italics there, by their titles; *Targets* is a page of Prometheus."""
    titles = {panel.title for dashboard in DASHBOARDS for panel in dashboard.panels()}
    text = (FOLDER.parents[2] / page).read_text()
    named_panels = set(re.findall(r"(?<!\*)\*([A-Z0-9][^*\n]*)\*(?!\*)", text)) - {"Targets", "More replicas"}
    assert named_panels <= titles
