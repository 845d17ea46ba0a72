from __future__ import annotations

from cluster.exposition import Exposition
from cluster.metrics import ServiceMetrics
from deployments.metrics_hub import EXPIRES_AFTER_SECONDS, MetricsHub


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def exposition(replica: str) -> Exposition:
    metrics = ServiceMetrics()
    metrics.observe_request("stop", 0.1, 1.0, 5)
    return Exposition(replica, 0, metrics.text())


def test_the_fleet_is_one_text_and_a_new_push_replaces_the_old() -> None:
    hub = MetricsHub("m", Clock())
    for replica in ("0", "1", "0"):
        hub.push(exposition(replica))
    text = hub.exposition()
    assert text.count("# TYPE dspark_ttft_seconds histogram") == 1
    samples = [line for line in text.splitlines() if line.startswith("dspark_ttft_seconds_count")]
    assert len(samples) == 2
    assert all(f'replica="{i}"' in sample for i, sample in enumerate(samples))


def test_who_stops_pushing_is_forgotten() -> None:
    clock = Clock()
    hub = MetricsHub("m", clock)
    hub.push(exposition("0"), ready=True)
    clock.now += EXPIRES_AFTER_SECONDS
    hub.push(exposition("1"))
    assert hub.any_ready()
    clock.now += 0.1
    assert not hub.any_ready()
    assert 'replica="0"' not in hub.exposition()
    assert 'replica="1"' in hub.exposition()


def test_two_replicas_that_bear_one_rank_for_a_moment_are_both_heard() -> None:
    hub = MetricsHub("m", Clock())
    hub.push(exposition("0"), ready=True, source="a")
    hub.push(exposition("0"), ready=False, source="b")
    assert hub.any_ready()


def test_an_engine_that_all_its_replicas_miss_is_lost_once() -> None:
    hub = MetricsHub("m", Clock())

    def num_lost() -> list[str]:
        return [line for line in hub.exposition().splitlines() if line.startswith("dspark_engines_lost_total")]

    assert num_lost() == ['dspark_engines_lost_total{model="m",rank="0",replica="hub"} 0.0'], "before the first one"
    for engine in ("gang-a", "gang-a", "b"):
        hub.engine_lost(engine)
    assert num_lost() == ['dspark_engines_lost_total{model="m",rank="0",replica="hub"} 2.0']


def test_ready_is_what_was_said_last() -> None:
    hub = MetricsHub("m", Clock())
    hub.push(exposition("0"), ready=True)
    hub.push(exposition("0"), ready=False)
    assert not hub.any_ready()
