"""The fleet's scheduler beside real replicas: it leases, dies, comes back, and no request notices."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from conftest import Server, actor_processes, application, eventually
from processes import scheduler_processes
from ray import serve
from tiny_models import TinyModel, keep_curve, model_args, tiny_llama

from cluster.messages import SchedulerMode
from ops.explain import table

pytestmark = pytest.mark.server

APPLICATION, MODEL = "fleet", "tiny"
NUM_TOKENS = 40
NUM_REQUESTS = 8


def args(model: TinyModel, num_replicas: int, curve: Path, **engine_kwargs: Any) -> dict[str, Any]:
    return {
        **model_args(model, MODEL, cost_curve_path=str(curve), **engine_kwargs),
        "deployment_config": {
            "num_replicas": num_replicas,
            "graceful_shutdown_timeout_s": 1.0,
            "health_check_timeout_s": 30.0,  # a busy machine is no dead engine: here the scheduler dies and nobody else
        },
        "http_config": {"submit_timeout_s": 200},
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> TinyModel:
    return tiny_llama(tmp_path_factory.mktemp("llama"), model_folder)


@pytest.fixture(scope="module")
def pair(
    serve_port: int, llama: TinyModel, strangers: set[psutil.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Two replicas and their scheduler."""
    curve = tmp_path_factory.mktemp("curve") / "curve.json"
    settings = args(llama, 2, curve)
    keep_curve(curve, settings)
    with application(serve_port, APPLICATION, "/fleet", settings) as running:
        yield running


def the_scheduler() -> psutil.Process:
    eventually(lambda: len(scheduler_processes(APPLICATION)) == 1, "there is one scheduler")
    return scheduler_processes(APPLICATION)[0]


def engines(strangers: set[psutil.Process]) -> set[psutil.Process]:
    return set(actor_processes("EngineActor")) - strangers


def steps(server: Server, mode: SchedulerMode) -> float:
    return server.metric("dspark_steps_total", mode=mode)


async def ask(client: Any, number: int) -> int:
    """Completion tokens of one request."""
    answer = await client.completions.create(
        model=MODEL,
        prompt=[11 + number, 5, 900 + number, 42],
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True},
        **({"temperature": 0} if number % 2 else {"temperature": 1.0}),
    )
    return int(answer.usage.completion_tokens)


async def load(server: Server, times: int = 1) -> list[int]:
    async with server.async_openai() as client:
        return [n for _ in range(times) for n in await asyncio.gather(*(ask(client, i) for i in range(NUM_REQUESTS)))]


def leased(server: Server) -> bool:
    """Whether the fleet's leases decide steps, under load."""
    before = steps(server, "lease")
    assert asyncio.run(load(server)) == [NUM_TOKENS] * NUM_REQUESTS
    eventually(lambda: server.metric("dspark_requests_running") == 0, "what was counted has been pushed")
    return steps(server, "lease") > before


def test_leases_decide_and_the_scheduler_counts(pair: Server) -> None:
    eventually(lambda: leased(pair), "leases decide steps")
    eventually(lambda: pair.metric("dspark_scheduler_engines") == 2, "the scheduler knows both engines")
    assert pair.metric("dspark_scheduler_leases_total") > 0
    assert pair.metric("dspark_lease_age_seconds_count") >= steps(pair, "lease")
    answer = httpx.get(f"{pair.url}/v1/dspark/scheduler", timeout=30)
    assert answer.status_code == 200
    engines = answer.json()["engines"]
    assert [engine["replica"] for engine in engines] == ["0", "1"]
    assert all(engine["speeds"] and engine["epoch"] > 0 for engine in engines)
    [attained] = answer.json()["attainment"]
    assert attained["tier"] == "default" and attained["num_kept"] == attained["num_judged"] > 0
    told = attained["num_judged"]
    eventually(lambda: pair.metric("dspark_sla_requests_total") >= told, "the metric says the same, a second later")
    assert "2 engines" in table(answer.json())


async def load_while_killing(server: Server, kills: int) -> list[int]:
    """Load, until the scheduler's process was killed so often; it is looked for every second."""
    done = asyncio.Event()

    async def kill() -> None:
        left = kills
        while left > 0:
            for process in scheduler_processes(APPLICATION):
                process.send_signal(signal.SIGKILL)
                left -= 1
            await asyncio.sleep(1.0)
        done.set()

    killer, counts = asyncio.create_task(kill()), []
    while not done.is_set():
        counts += await load(server)
    await killer
    return counts


def test_killed_again_and_again_under_load_no_request_fails(pair: Server, strangers: set[psutil.Process]) -> None:
    before = engines(strangers)
    local = steps(pair, "local")
    assert set(asyncio.run(load_while_killing(pair, kills=3))) == {NUM_TOKENS}
    eventually(lambda: steps(pair, "local") > local, "engines decided for themselves")
    eventually(lambda: leased(pair), "another scheduler's leases decide steps")
    assert engines(strangers) == before, "no engine was touched"


def test_a_frozen_scheduler_holds_nobody_up(pair: Server) -> None:
    process = the_scheduler()
    process.suspend()
    try:
        local = steps(pair, "local")
        assert asyncio.run(load(pair, times=2)) == [NUM_TOKENS] * NUM_REQUESTS * 2
        eventually(lambda: steps(pair, "local") > local, "engines decide for themselves")
        assert pair.healthy()
    finally:
        process.resume()
    eventually(lambda: leased(pair), "leases decide steps again")


def test_a_replica_leaves_and_another_joins(pair: Server, strangers: set[psutil.Process]) -> None:
    victim = engines(strangers).pop()
    victim.send_signal(signal.SIGKILL)
    eventually(lambda: len(engines(strangers)) == 2 and not victim.is_running(), "the replica is replaced")
    eventually(lambda: pair.metric("dspark_scheduler_engines") == 2, "the lost one is forgotten, the new one known")
    eventually(lambda: leased(pair), "leases decide steps")


def test_the_controller_may_die_too(pair: Server) -> None:
    scheduler = the_scheduler()
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    ray.kill(controller, no_restart=False)
    assert asyncio.run(load(pair)) == [NUM_TOKENS] * NUM_REQUESTS
    eventually(lambda: serve.status().applications[APPLICATION].status == "RUNNING", "Serve is back")
    assert scheduler.is_running(), "it is adopted, not replaced"
    eventually(lambda: leased(pair), "leases decide steps")
    scheduler.kill()
    eventually(lambda: bool(scheduler_processes(APPLICATION)), "the new controller looks after it")
    eventually(lambda: leased(pair), "leases decide steps")
