"""Trouble made on a real server until a real Prometheus says so: the rules' own expressions, with shorter windows.

`alerts.test.yaml` proves on made-up series when each alert fires and when it doesn't; here that real metrics say what
the rules expect of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from conftest import Server, actor_processes, application, eventually, free_port
from processes import scheduler_processes
from test_observability import missing
from tiny_models import keep_curve, model_args, tiny_llama

from drafter.checkpoint import confidence_weights, replace_confidence
from ops import prometheus
from ops.dashboards.overview import DASHBOARD as OVERVIEW
from ops.dashboards.preview import concrete
from ops.prometheus import Prometheus
from ops.rules.__main__ import text
from ops.rules.alerts import ALERTS

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not prometheus.installed(), reason=prometheus.INSTALL),
]

APPLICATION, MODEL = "troubled", "tiny"
FASTER = 120
"""The rules' durations are divided by this: five minutes are two and a half seconds."""
SHORTEST_WINDOW_SECONDS = 5
"""Metrics are pushed and scraped about once a second, and a rate needs a few of them."""
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SURE = 6.0
"""The logit of a confidence of 0.998; the temperature can't be raised far enough to make that 0.5."""
WAITING, RUNNING = 48, 8
CROWDED = {
    "DSparkCalibrationOff": "the drafter is sure of drafts of which hardly any passes",
    "DSparkAcceptanceFell": "for the same reason",
    "DSparkCostCurveOff": "by the kept curve a step takes seconds",
    "DSparkQueueGrowing": "more and more requests come",
    "DSparkRequestsShed": "until there is no more room",
    "DSparkErrorBudgetBurn": "and those count as late",
    "DSparkKVExhausted": "the pool holds two of the eight that run",
}
"""What must fire when too many clients come to an engine whose curve and confidences are wrong, and why."""
LEADERLESS = {"DSparkSchedulerStale", "DSparkDrafterProposesNothing"}
ELSEWHERE = {
    "DSparkEngineStuck": "a step that hangs in a process that still answers: takes a second rank, and freezing it",
    "DSparkEngineRestarting": "an engine that is lost twice: half a minute of test for what is counted here once",
}
"""Proven on made-up series only, and why that is enough."""


def shortened(rules: str) -> str:
    """The rules with every range, offset and `for` divided by FASTER, and nothing else changed."""

    def shorter(match: re.Match[str]) -> str:
        before, number, unit = match.groups()
        seconds = int(number) * UNIT_SECONDS[unit] / FASTER
        return f"{before}{1000 * max(seconds, SHORTEST_WINDOW_SECONDS if before == '[' else 0):.0f}ms"

    made = yaml.safe_load(rules)
    for rule in (rule for group in made["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"(\[|offset )(\d+)([smhd])\b", shorter, rule["expr"])
        if "for" in rule:
            rule["for"] = re.sub(r"^()(\d+)([smhd])$", shorter, rule["for"])
    return yaml.safe_dump(made)


@pytest.fixture(scope="module")
def troubled(
    serve_port: int, model_folder: Path, strangers: set[psutil.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One engine, short of memory, that believes in every draft and in a cost curve of another machine."""
    folder = tmp_path_factory.mktemp("troubled")
    model = tiny_llama(folder, model_folder)
    weight, _ = confidence_weights(model.drafter_folder)
    replace_confidence(model.drafter_folder, torch.zeros_like(weight), SURE)
    engine = {"max_model_len": 256, "max_num_seqs": RUNNING, "max_num_waiting": WAITING, "num_kv_blocks": 24}
    curve = folder / "curve.json"
    settings = {
        **model_args(model, MODEL, cost_curve_path=str(curve), **engine),
        "deployment_config": {"graceful_shutdown_timeout_s": 1.0, "health_check_timeout_s": 30.0},
        "http_config": {"submit_timeout_s": 3},
    }
    keep_curve(curve, settings)
    with application(serve_port, APPLICATION, f"/{APPLICATION}", settings) as running:
        yield running


@pytest.fixture(scope="module")
def watched(troubled: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder, listen = tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{free_port()}"
    rules = folder / "rules.yaml"
    rules.write_text(shortened(text()))
    config = prometheus.configuration(troubled.url.removeprefix("http://"), rules, scrape_seconds=1)
    with prometheus.running(folder, listen, config) as server:
        eventually(lambda: bool(server.query("dspark_requests_running")), "the engine is scraped")
        yield server


def firing(watched: Prometheus) -> set[str]:
    rules = watched.rules()
    assert [rule["lastError"] for rule in rules if rule["health"] == "err"] == []
    return {rule["name"] for rule in rules if rule.get("state") == "firing"}


@contextmanager
def crowd(server: Server, more_each_time: int, **fields: Any) -> Iterator[None]:
    """Requests in flight, more and more of them, whatever the engine finishes; with 0 as many as run at once."""
    stop = threading.Event()

    async def ask(client: Any) -> None:
        with contextlib.suppress(Exception):  # refused, or lost with its engine: that is what this is for
            await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=200, **fields)

    async def come() -> None:
        async with server.async_openai() as client:
            asked: set[asyncio.Task[None]] = set()
            most = RUNNING
            while not stop.is_set():
                asked = {task for task in asked if not task.done()}
                asked |= {asyncio.create_task(ask(client)) for _ in range(most - len(asked))}
                most = min(most + more_each_time, 2 * WAITING)
                await asyncio.sleep(0.25)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(come(),))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_every_alert_is_provoked_here_or_there_is_a_reason() -> None:
    assert {*CROWDED, *LEADERLESS, "DSparkNoEngine", *ELSEWHERE} == {alert.name for alert in ALERTS}


def test_shortening_changes_durations_alone() -> None:
    def undated(rules: str) -> str:
        return re.sub(r"\d+(ms|[smhd])\b", "", json.dumps(yaml.safe_load(rules), sort_keys=True))

    made = shortened(text())
    assert undated(made) == undated(text())
    assert yaml.safe_load(made) != yaml.safe_load(text())
    assert "rate(dspark_ttft_seconds_count[30000ms])" in made, "an hour"


def test_too_many_clients_of_an_engine_that_is_wrong_about_itself(watched: Prometheus, troubled: Server) -> None:
    eventually(lambda: firing(watched) == set(), "without traffic nothing is wrong")
    fired: set[str] = set()

    def has_fired(name: str) -> bool:
        fired.update(firing(watched))
        return name in fired

    with crowd(troubled, more_each_time=1, extra_body={"ignore_eos": True}):
        for name, why in CROWDED.items():
            eventually(partial(has_fired, name), f"{name} fires: {why}")
    assert missing(watched, late=True) == [], "where so much is verified, calibration is told"


def test_the_scheduler_is_killed_and_nobody_drafts(watched: Prometheus, troubled: Server) -> None:
    fired: set[str] = set()

    def all_fired() -> bool:
        for process in scheduler_processes(APPLICATION):  # Serve makes another within ten seconds
            process.kill()
        fired.update(firing(watched))
        return fired >= LEADERLESS

    with crowd(troubled, more_each_time=0, extra_body={"ignore_eos": True, "dspark": {"max_draft_tokens": 0}}):
        eventually(lambda: not firing(watched) & {"DSparkSchedulerStale"}, "the scheduler makes leases")
        eventually(all_fired, "both fired")


def test_the_only_engine_is_killed(watched: Prometheus, troubled: Server, strangers: set[psutil.Process]) -> None:
    def engines_shown() -> float:
        (panel,) = [panel for panel in OVERVIEW.panels() if panel.title == "Engines"]
        ((series,),) = [watched.query(concrete(panel.queries[0].expression, "5s"))]
        return series.points[0][1]

    eventually(lambda: "DSparkNoEngine" not in firing(watched) and engines_shown() == 1, "there is one")
    [engine] = set(actor_processes("EngineActor")) - strangers
    engine.kill()
    refused = troubled.post("/v1/completions", {"model": MODEL, "prompt": [5], "max_tokens": 1})
    assert refused.status_code == 503, refused.text
    eventually(lambda: "DSparkNoEngine" in firing(watched) and engines_shown() == 0, "it is missed")
    eventually(
        lambda: troubled.metric("dspark_requests_shed_total", reason=refused.json()["error"]["code"]) == 1,
        "who was refused is counted",
    )
    assert troubled.metric("dspark_engines_lost_total") == 1
