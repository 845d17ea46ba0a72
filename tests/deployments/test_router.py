"""The router as Serve drives it, over replicas that are only news: who waits, who is refused, and who never is.

Real replicas are in test_tiers.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from cluster.messages import Request, SamplingParams, TierUnmetError
from cluster.metrics import Admission
from deployments.admission import Ticket
from deployments.config import SlaTierConfig
from deployments.router import TierRouter

DEPLOYMENT = DeploymentID(name="Replica")
FREE = SlaTierConfig(name="free")
SERVE = SlaTierConfig(name="serve", min_tokens_per_second=10.0)
SHED = SlaTierConfig(name="shed", min_tokens_per_second=10.0, when_unmet="shed")
FULL = 5
"""Requests that Serve sends a replica."""
CAPACITY = 100
"""Requests that its engine takes."""
LONG = tuple(range(64))
"""A prompt whose place is remembered."""


@dataclass(eq=False)
class News:
    """All that the router looks at."""

    replica_id: ReplicaID
    routing_stats: dict[str, Any]
    max_ongoing_requests: int = FULL
    num_requests: int = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_requests


def replica(name: str, speed: float | None, num_requests: int = 0) -> News:
    news = {"num_requests": num_requests, **({} if speed is None else says(speed))}
    return News(ReplicaID(name, DEPLOYMENT), news, num_requests=num_requests)


def says(speed: float) -> dict[str, Any]:
    """Of the only tier's promised speed."""
    return {"speeds": [speed], "rooms": [100 if speed >= SHED.min_tokens_per_second else 0]}


class Fleet:
    def __init__(self, *replicas: News, capacity: int = CAPACITY) -> None:
        self.router = TierRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state(capacity=capacity)
        self.router.update_replicas(list(replicas))
        self.outcomes: list[Admission] = []

    def ask(
        self,
        tier: SlaTierConfig,
        wait_seconds: float = 0.0,
        must_serve: bool = False,
        internal_id: str = "http",
        prompt: tuple[int, ...] = (1, 2),
    ) -> asyncio.Task[str]:
        """Resolves to the name of the replica that the request gets."""
        request = Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))
        ticket = Ticket(request, tier, time.monotonic() + wait_seconds, must_serve, self.outcomes.append)
        metadata = RequestMetadata(request_id="r", internal_request_id=internal_id)
        self.pending = PendingRequest(args=[request], kwargs={"ticket": ticket}, metadata=metadata)
        return asyncio.create_task(self._send(self.pending, ticket))

    async def _send(self, pending: PendingRequest, ticket: Ticket) -> str:
        """An engine takes it."""
        name = await self.choose(pending)
        ticket.is_taken()
        return name

    async def fill(self, tier: SlaTierConfig, num_requests: int) -> Counter[str]:
        """How many requests each replica gets, one after the other, when Serve sends them and none ends."""
        got: Counter[str] = Counter()
        for _ in range(num_requests):
            name = await self.ask(tier)
            self.router.on_send_request(ReplicaID(name, DEPLOYMENT))
            got[name] += 1
        return got

    async def choose(self, pending: PendingRequest) -> str:
        chosen = await self.router._choose_replica_for_request(pending)
        assert "ticket" not in pending.kwargs, "it stays here"
        return str(chosen.replica_id.unique_id)


async def test_the_promise_decides_and_is_told() -> None:
    fleet = Fleet(replica("idle", 5.0), replica("busy", 20.0, 3))
    assert await fleet.ask(SERVE) == "busy"
    assert await fleet.ask(FREE) == "idle"
    assert fleet.outcomes == ["met"], "nothing is said of a tier without a speed"


async def test_where_none_keeps_it_the_tier_decides() -> None:
    fleet = Fleet(replica("a", 5.0), replica("b", 8.0))
    assert await fleet.ask(SERVE) == "b"
    with pytest.raises(TierUnmetError, match="'shed'"):
        await fleet.ask(SHED)
    assert fleet.outcomes == ["unmet"]
    assert fleet.router.num_pending_requests == 0


async def test_who_had_a_place_is_neither_held_back_nor_refused() -> None:
    fleet = Fleet(replica("a", 5.0), replica("b", 8.0))
    assert await fleet.ask(SHED, wait_seconds=1000.0, must_serve=True) == "b"


async def test_nothing_known_is_no_reason_to_refuse() -> None:
    fleet = Fleet(replica("a", None))
    assert await fleet.ask(SHED, wait_seconds=1000.0) == "a"
    assert fleet.outcomes == ["unknown"]


async def test_good_news_ends_the_wait() -> None:
    slow = replica("a", 5.0)
    fleet = Fleet(slow)
    asked = fleet.ask(SHED, wait_seconds=1000.0)
    await asyncio.sleep(0.1)
    assert not asked.done()
    slow.routing_stats = {**says(30.0), "num_requests": 0}
    assert await asked == "a"
    assert fleet.outcomes == ["waited"]


async def test_who_waits_looks_rarely_and_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand that wait share the event loop with everybody else."""
    fleet, looks = Fleet(replica("a", 5.0)), 0
    look = fleet.router._route

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(*args)

    monkeypatch.setattr(fleet.router, "_route", counted)
    asked = fleet.ask(SERVE, wait_seconds=1.0)
    await asyncio.sleep(0.9)
    assert not asked.done() and 2 <= looks <= 8
    assert await asked == "a"
    assert fleet.outcomes == ["unmet"]


async def test_many_that_wait_hold_up_nobody_and_leave_no_trace() -> None:
    fleet = Fleet(replica("a", 5.0))
    waiting = [fleet.ask(SHED, wait_seconds=1000.0, internal_id=str(i)) for i in range(100)]
    await asyncio.sleep(0.1)
    for _ in range(20):
        assert await fleet.ask(FREE) == "a"
    assert fleet.router.num_pending_requests == 100, "the line is who waits"
    assert fleet.router.curr_num_routing_tasks <= 101
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await fleet.ask(FREE) == "a"
    assert fleet.router.num_pending_requests == 0
    assert not fleet.router._pending_requests_by_id


async def test_choices_of_one_http_request_share_its_id_and_not_their_places() -> None:
    fleet = Fleet(replica("a", 20.0), replica("b", 20.0))
    asked = [fleet.ask(SERVE if i % 2 else FREE, internal_id="one") for i in range(20)]
    async with asyncio.timeout(60):
        assert len(await asyncio.gather(*asked)) == 20
    assert fleet.outcomes == ["met"] * 10


async def test_choices_of_one_moment_spread() -> None:
    """Serve counts none of them before the last has chosen."""
    fleet = Fleet(replica("a", 20.0), replica("b", 20.0))
    asked = [fleet.ask(FREE, internal_id="one") for _ in range(20)]
    assert set(Counter(await asyncio.gather(*asked)).values()) <= {9, 10, 11}
    promised = [fleet.ask(SHED, internal_id="one") for _ in range(20)]
    assert set(Counter(await asyncio.gather(*promised)).values()) <= {9, 10, 11}, "and don't refuse one another"
    assert not fleet.router._bound and not fleet.router._num_bound


async def test_a_burst_for_which_no_promise_holds_spreads() -> None:
    """The news is half a second old: the replica that was the fastest then must not get all of it."""
    fleet = Fleet(replica("a", 8.0), replica("b", 7.9))
    at_once = [fleet.ask(SERVE, internal_id="one") for _ in range(20)]
    assert Counter(await asyncio.gather(*at_once)) == {"a": 10, "b": 10}
    assert await fleet.fill(SERVE, 8) == {"a": 4, "b": 4}


@pytest.mark.parametrize(("capacity", "expected"), [(5, "warm"), (4, "other")])
async def test_a_full_queue_is_passed_over_whatever_its_cache_holds(capacity: int, expected: str) -> None:
    fleet = Fleet(replica("warm", None, 4), replica("other", None, 3), capacity=capacity)
    fleet.router._memory.served(LONG, "warm")
    assert await fleet.ask(FREE, prompt=LONG) == expected


async def test_who_leaves_while_all_are_full_is_counted_nowhere() -> None:
    full = replica("full", 20.0, FULL)
    fleet = Fleet(full)
    asked = fleet.ask(FREE)
    await asyncio.sleep(0.1)
    assert fleet.router._num_bound == {full.replica_id: 1}
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await asyncio.sleep(0)
    assert not fleet.router._bound and not fleet.router._num_bound


async def test_a_request_that_a_replica_refuses_keeps_its_promise() -> None:
    """Serve asks again with the very object, after it took a place that was gone."""
    first, second = replica("first", 30.0), replica("second", 5.0)
    fleet = Fleet(first, second)
    assert await fleet.ask(SHED) == "first"
    fleet.pending.reset_future()
    first.routing_stats = {**says(5.0), "num_requests": FULL}
    with pytest.raises(TierUnmetError):
        await fleet.choose(fleet.pending)
    fleet.pending.reset_future()
    second.routing_stats = {**says(30.0), "num_requests": 0}
    assert await fleet.choose(fleet.pending) == "second"


async def test_a_full_replica_is_passed_over() -> None:
    full = replica("full", 20.0, FULL)
    fleet = Fleet(full, replica("slow", 5.0))
    assert await fleet.ask(SERVE) == "slow"
