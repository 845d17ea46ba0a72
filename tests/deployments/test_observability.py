"""A real Prometheus scrapes the real server under traffic: every panel and every rule has something to show."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import MODEL, Server, eventually, free_port

from ops import prometheus
from ops.dashboards.catalog import DASHBOARDS
from ops.dashboards.model import Panel, Query
from ops.dashboards.preview import concrete, render
from ops.prometheus import Prometheus, Series
from ops.rules.__main__ import FILE
from ops.rules.recording import groups

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not prometheus.installed(), reason=prometheus.INSTALL),
]

NUM_CLIENTS = 3
WINDOW = "10m"
"""Range of the panels' rates: the whole run. For seconds an engine may well draft nothing, or nothing that passes."""
TAKE_LONG = ("dspark_calibration_error_ratio", "dspark_confidence_temperature")
"""Told after hundreds of drafts at a position: test_alerts.py has an engine that verifies so many, and asks."""
RECORDED = [rule["record"] for group in groups() for rule in group["rules"]]
ALERT_STATES = {"inactive", "pending"}
"""What alerts may be in a test of a minute: none of their conditions can have lasted long enough to fire."""


@contextmanager
def traffic(server: Server) -> Iterator[None]:
    """Clients that ask one question after the other; their prompts begin alike, so that the prefix cache has hits."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            with server.openai() as client:
                for turn in itertools.count():
                    if stop.is_set():
                        return
                    prompt = f"{'The quick brown fox jumps over the lazy dog. ' * 6}{number} {turn}:"
                    client.completions.create(
                        model=MODEL, prompt=prompt, max_tokens=16, extra_body={"ignore_eos": True}
                    )
        except BaseException as error:  # told below: a thread's failure is no test's
            failures.append(error)

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert not failures


@pytest.fixture(scope="module")
def observed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with the rules, while clients ask."""
    config = prometheus.configuration(server.url.removeprefix("http://"), FILE, scrape_seconds=1)
    folder, listen = tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{free_port()}"
    with prometheus.running(folder, listen, config) as asked, traffic(server):
        eventually(lambda: not missing(asked), "every panel has data")
        eventually(lambda: all(has_data(asked, name) for name in RECORDED), "the rules were evaluated on it")
        yield asked


def has_data(asked: Prometheus, expression: str) -> bool:
    return any(not math.isnan(value) for series in asked.query(expression) for _, value in series.points)


def missing(asked: Prometheus, late: bool = False) -> list[str]:
    """Panels' queries that have nothing to show. `late`: of those that take long, or of all others."""
    panels: list[tuple[str, Panel, Query]] = [
        (dashboard.uid, panel, query)
        for dashboard in DASHBOARDS
        for panel in dashboard.panels()
        for query in panel.queries
        if late == any(name in query.expression for name in TAKE_LONG)
    ]
    assert panels
    return [
        f"{uid}, {panel.title}, {query.legend}: {query.expression}"
        for uid, panel, query in panels
        if not has_data(asked, concrete(query.expression, WINDOW))
    ]


def test_every_panel_has_data_but_for_those_that_take_long(observed: Prometheus) -> None:
    assert missing(observed) == []


def test_every_recording_rule_has_data(observed: Prometheus) -> None:
    assert [name for name in RECORDED if not has_data(observed, name)] == []


def test_every_rule_is_evaluated_and_no_alert_fires(observed: Prometheus) -> None:
    """An alert's expression is empty in peace: that each fires in trouble is proven on series of that trouble."""
    rules = observed.rules()
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert {rule["state"] for rule in rules if rule["type"] == "alerting"} <= ALERT_STATES


def test_the_numbers_are_those_of_the_run(observed: Prometheus) -> None:
    """Not only something, but the right thing: identities that hold for any traffic."""

    def value(expression: str) -> float:
        ((series,),) = [observed.query(expression)]
        return series.points[0][1]

    def shown(uid: str, title: str) -> float:
        (dashboard,) = [dashboard for dashboard in DASHBOARDS if dashboard.uid == uid]
        (panel,) = [panel for panel in dashboard.panels() if panel.title == title]
        return value(concrete(panel.queries[0].expression, WINDOW))

    assert shown("dspark-overview", "Engines") == 1
    assert 1 <= shown("dspark-speculation", "Accepted length") <= 6
    eventually(lambda: 0 < shown("dspark-speculation", "Accepted of verified") < 1, "some drafts passed, and some not")
    assert 0 < shown("dspark-speculation", "Draft share") < 1
    assert 0.2 < shown("dspark-speculation", "Speed-up") < 6
    assert 0 < shown("dspark-sla", "TTFT attained") <= 1
    plain = value("sum(dspark_step_plain_seconds_total)")
    assert plain > value("sum(dspark_step_predicted_seconds_total)") * 0.3
    assert {series.labels["model"] for series in observed.query("dspark_steps_total")} == {MODEL}


def test_a_preview_shows_every_panel(observed: Prometheus, tmp_path: Path) -> None:
    asked = []

    def ask(query: Query) -> list[Series]:
        asked.append(query)
        return observed.query(concrete(query.expression, WINDOW))

    for dashboard in DASHBOARDS:
        render(dashboard, ask, path := tmp_path / f"{dashboard.uid}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert asked == [query for dashboard in DASHBOARDS for panel in dashboard.panels() for query in panel.queries]
