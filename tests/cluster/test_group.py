"""The engine's actor behind a real Ray: requests in, events out, true health, an honest death."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError
from ray_engines import collect, local_ray, make_config
from tiny_engine import greedy_truth, request

from cluster.group import EngineActor, start_engine
from cluster.messages import EngineDeadError, InvalidRequestError, QueueFullError


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture
def engine(cluster: None, tiny: tuple[Path, Any]) -> Iterator[Any]:
    actor = start_engine(make_config(tiny[0]), "tiny")
    ray.get(actor.ready.remote())
    yield actor
    ray.kill(actor)


def test_requests_come_back_as_events(engine: Any, tiny: tuple[Path, Any]) -> None:
    prompts = {f"r{i}": [i + 1, 5, 9] for i in range(6)}
    ray.get([engine.submit.remote(request(p, r, max_tokens=20)) for r, p in prompts.items()])
    events = collect(engine, set(prompts))
    for request_id, prompt in prompts.items():
        tokens = [token for event in events[request_id] for token in event.token_ids]
        assert tokens == greedy_truth(tiny[1], prompt, 20)
        assert events[request_id][-1].stats is not None
    health = ray.get(engine.health.remote())
    assert health.alive
    assert health.ready
    assert health.seconds_since_last_step == 0
    assert (health.num_running, health.num_waiting, health.num_free_kv_blocks) == (0, 0, 256)
    assert "dspark_generated_tokens_total 120.0" in ray.get(engine.metrics_text.remote())


def test_errors_are_the_callers(engine: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        ray.get(engine.submit.remote(request([], "empty")))
    submitted = 0
    with pytest.raises(QueueFullError):
        for i in range(50):
            ray.get(engine.submit.remote(request([1, 2, 3], f"q{i}", max_tokens=120)))
            submitted += 1
    assert submitted >= 8
    for i in range(submitted):
        ray.get(engine.abort.remote(f"q{i}"))
    events = collect(engine, {f"q{i}" for i in range(submitted)})
    assert any(e[-1].finish_reason == "abort" for e in events.values())
    assert ray.get(engine.health.remote()).num_free_kv_blocks == 256


def test_a_model_that_cannot_load_says_so(cluster: None, tmp_path: Path) -> None:
    actor = start_engine(make_config(tmp_path / "nowhere"), "none")
    with pytest.raises(EngineDeadError, match="nowhere"):
        ray.get(actor.ready.remote())
    health = ray.get(actor.health.remote())
    assert not health.alive
    assert not health.ready
    assert "nowhere" in health.reason
    with pytest.raises(EngineDeadError):
        ray.get(actor.submit.remote(request([1], "r")))
    ray.kill(actor)


class Faulty(EngineActor):
    """The real actor, with two ways to break its engine."""

    async def break_step(self) -> None:
        def broken() -> None:
            raise RuntimeError("no such weights")

        self._engine.result().step = broken  # type: ignore[method-assign,assignment]

    async def hang_step(self) -> None:
        self._engine.result().step = lambda: time.sleep(1000)  # type: ignore[method-assign,assignment,return-value]


@pytest.fixture
def faulty(cluster: None, tiny: tuple[Path, Any]) -> Iterator[Any]:
    actor = ray.remote(Faulty).options(num_cpus=0, max_concurrency=100).remote(make_config(tiny[0]), "faulty")
    ray.get(actor.ready.remote())
    yield actor
    ray.kill(actor)


def test_a_step_that_raises_fails_every_request_with_its_reason(faulty: Any) -> None:
    ray.get(faulty.break_step.remote())
    ray.get(faulty.submit.remote(request([1, 2], "victim")))
    [event] = collect(faulty, {"victim"})["victim"]
    assert event.finish_reason == "abort"
    assert event.error is not None
    assert "no such weights" in event.error
    health = ray.get(faulty.health.remote())
    assert not health.alive
    assert "no such weights" in health.reason
    with pytest.raises(EngineDeadError, match="no such weights"):
        ray.get(faulty.submit.remote(request([1, 2], "later")))


def test_a_stuck_step_shows_in_health(faulty: Any) -> None:
    ray.get(faulty.hang_step.remote())
    ray.get(faulty.submit.remote(request([1, 2], "stuck")))
    seen = ray.get(faulty.health.remote()).seconds_since_last_step
    while (now := ray.get(faulty.health.remote()).seconds_since_last_step) < 0.5:
        assert now >= seen, "it only grows"
        seen = now
    assert ray.get(faulty.health.remote()).alive


def test_errors_of_the_caller_cross_the_process_as_themselves(engine: Any) -> None:
    with pytest.raises(RayTaskError) as caught:
        ray.get(engine.submit.remote(request([1], "r", max_tokens=0)))
    assert isinstance(caught.value.cause, InvalidRequestError)
    assert caught.value.cause.field_name == "max_tokens"
