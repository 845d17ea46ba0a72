"""The scheduler's actor and the engines' ends of the line on a real Ray, without Serve: a lockstep group of two."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from processes import eventually
from prometheus_client.parser import text_string_to_metric_families
from ray_engines import local_ray, make_config
from tiny_engine import dspark_drafter, greedy_truth, request

from cluster.accounts import FleetAccount
from cluster.confidence_scheduler import ConfidenceScheduler
from cluster.group import Place, start_engine
from cluster.messages import EngineHealth
from cluster.profiler import _provenance
from cluster.shard import Shard
from cluster.sps import CostCurve, DraftSample, VerifySample
from drafter.checkpoint import save_checkpoint

pytestmark = pytest.mark.dist

MAX_TOKENS = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture
def gang(cluster: None, tiny: tuple[Path, Any], tmp_path: Path) -> Iterator[list[Any]]:
    """Two engines in lockstep, to whom drafts are dear: a curve of such long times is corrected evenly by real ones."""
    save_checkpoint(dspark_drafter(tiny[1], 96), tmp_path / "drafter", torch.float32)
    curve_path = tmp_path / "curve.json"
    settings = make_config(
        tiny[0],
        drafter_source=str(tmp_path / "drafter"),
        data_parallel_size=2,
        max_num_seqs=8,
        cost_curve_path=str(curve_path),
    )
    here = _provenance(settings, Shard.load(settings))
    here = replace(here, device=f"{here.device}, split 2 x 1")
    samples = [VerifySample(n, 100, 10.0 + n) for n in (1, 2, 4, 8, 16, 32, 64)]
    CostCurve.fit(samples, [DraftSample(1, 1, 0.01), DraftSample(8, 1, 0.01)], here).save(curve_path)
    engines = [start_engine(settings, "tiny", Place(group=f"gang-{tmp_path.name}", dp_rank=rank)) for rank in range(2)]
    ray.get([engine.ready.remote() for engine in engines])
    yield engines
    for engine in engines:
        ray.kill(engine)


def start_scheduler(engines: list[Any]) -> Any:
    scheduler = ray.remote(ConfidenceScheduler).options(num_cpus=0).remote()
    ray.get([engine.advise.remote(scheduler, str(rank)) for rank, engine in enumerate(engines)])
    return scheduler


def steps(engine: Any, mode: str) -> float:
    families = text_string_to_metric_families(ray.get(engine.metrics_text.remote()))
    samples = [sample for family in families for sample in family.samples]
    return sum(s.value for s in samples if s.name == "dspark_steps_total" and s.labels["mode"] == mode)


def serve(engines: list[Any], truth: list[int], counts: tuple[int, int]) -> None:
    """So many equal greedy requests on each rank, to their end."""
    names = [[f"{rank}-{i}-{time.monotonic()}" for i in range(count)] for rank, count in enumerate(counts)]
    for engine, own in zip(engines, names, strict=True):
        ray.get([engine.submit.remote(request([1, 5, 9], name, max_tokens=MAX_TOKENS)) for name in own])
    for engine, own in zip(engines, names, strict=True):
        tokens: dict[str, list[int]] = {name: [] for name in own}
        finished = 0
        while finished < len(own):
            for event in ray.get(engine.next_events.remote(), timeout=240):
                assert event.error is None
                tokens[event.request_id] += event.token_ids
                finished += event.finish_reason is not None
        assert all(text == truth for text in tokens.values())


def leased(engines: list[Any], scheduler: Any, truth: list[int]) -> bool:
    """Whether leases decide steps on both ranks, under uneven load; if so, ranks have one number of rows."""
    before = [steps(engine, "lease") for engine in engines]
    serve(engines, truth, (2, 8))
    account: FleetAccount = ray.get(scheduler.explain.remote())
    rows = {engine.padded_tokens for engine in account.engines}
    if len(account.engines) < 2 or None in rows:
        return False
    assert len(rows) == 1
    return all(steps(engine, "lease") > old for engine, old in zip(engines, before, strict=True))


def own(engine: Any) -> float:
    """Steps that the engine decided itself."""
    return steps(engine, "local") + steps(engine, "bypass")


def test_a_lockstep_group_shares_its_rows_and_outlives_schedulers(gang: list[Any], tiny: tuple[Path, Any]) -> None:
    truth = greedy_truth(tiny[1], [1, 5, 9], MAX_TOKENS)
    serve(gang, truth, (2, 8))
    assert [steps(engine, "lease") for engine in gang] == [0, 0], "nobody is there to lease"
    for _ in range(2):
        scheduler = start_scheduler(gang)
        eventually(lambda actor=scheduler: leased(gang, actor, truth), "leases decide steps")  # type: ignore[misc]
        health: EngineHealth = ray.get(gang[0].health.remote())
        assert len(health.speeds) == 1
        assert health.speeds[0] > 0
        assert health.rooms[0] > 0
        assert "dspark_scheduler_engines 2.0" in ray.get(scheduler.metrics_text.remote())
        ray.kill(scheduler)
        serve(gang, truth, (2, 8))
    before = [own(engine) for engine in gang]
    eventually(
        lambda: serve(gang, truth, (2, 8)) or all(own(e) > b for e, b in zip(gang, before, strict=True)), "alone"
    )
    assert ray.get(gang[0].health.remote()).speeds[0] > 0, "an engine reckons for itself"
