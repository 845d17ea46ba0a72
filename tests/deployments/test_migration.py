"""A stream over engines that are lost, with scripted ones: what is sent again, how often, and what the client hears.

The real thing, with processes that are killed, is in test_ranks.py and test_robustness.py.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.messages import EngineDeadError, QueueFullError, Request, RequestStats, SamplingParams, TokenEvent
from deployments.migration import LONGEST_RETRY_SECONDS, MAX_MIGRATIONS, Events, MigratingStream, retry_seconds

Script = list[Events | Exception]
STATS = RequestStats(1, 1, 1, 1, 0, 0)
REQUEST = Request(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=9))


def event(*token_ids: int, **fields: Any) -> TokenEvent:
    return TokenEvent("r", token_ids, **fields)


class Scripted:
    """One submission."""

    def __init__(self, script: Script) -> None:
        self._script = list(script)
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Events]:
        return self

    async def __anext__(self) -> Events:
        if not self._script:
            raise StopAsyncIteration
        item = self._script.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


class Fleet:
    """Answers one submission after the other."""

    def __init__(self, *scripts: Script, submit_seconds: float = 60.0, migration_seconds: float = 60.0) -> None:
        self._scripts = list(scripts)
        self.requests: list[Request] = []
        self.migrates: list[bool] = []
        self.streams: list[Scripted] = []
        self.num_migrations = 0
        self.delivered: list[TokenEvent] = []
        self.stream = MigratingStream(REQUEST, self._send, submit_seconds, migration_seconds, self._migrated)

    async def run(self) -> list[int]:
        await self.stream.open()
        await self.stream.forward(self.delivered.append)
        return [token for event in self.delivered for token in event.token_ids]

    def _send(self, request: Request, migrates: bool) -> Scripted:
        self.migrates.append(migrates)
        self.requests.append(request)
        self.streams.append(Scripted(self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]))
        return self.streams[-1]

    def _migrated(self) -> None:
        self.num_migrations += 1


async def test_an_undisturbed_stream_is_passed_on() -> None:
    fleet = Fleet([(), (event(5), event(6)), (event(7, finish_reason="stop", stats=STATS),)])
    assert await fleet.run() == [5, 6, 7]
    assert fleet.delivered[-1].stats == STATS
    assert fleet.requests == [replace(REQUEST, request_id="r-1")]
    assert fleet.num_migrations == 0


@pytest.mark.parametrize(
    "loss",
    [[EngineDeadError("gone")], [(event(finish_reason="abort", error="it died"),)], []],
    ids=["raised", "told", "ended"],
)
async def test_what_arrived_counts_as_output_of_the_next(loss: Script) -> None:
    fleet = Fleet(
        [(), (event(5), event(6)), *loss],
        [(), (event(7),), EngineDeadError("again")],
        [(), (event(8, 9, finish_reason="length", stats=STATS),)],
    )
    assert await fleet.run() == [5, 6, 7, 8, 9]
    assert [request.emitted_token_ids for request in fleet.requests] == [(), (5, 6), (5, 6, 7)]
    assert fleet.migrates == [False, True, True], "who had a place is not refused one"
    assert all(request.sampling == REQUEST.sampling for request in fleet.requests)
    assert fleet.num_migrations == 2
    assert fleet.delivered[-1].stats is None, "they would tell of the last engine only"
    assert [stream.cancelled for stream in fleet.streams] == [True, True, False]


async def test_a_request_that_has_finished_is_not_sent_again() -> None:
    fleet = Fleet([(), (event(5), event(6, finish_reason="length")), EngineDeadError("the engine died since")])
    assert await fleet.run() == [5, 6]
    assert len(fleet.requests) == 1


async def test_a_request_that_nobody_wants_any_more_is_not_continued() -> None:
    fleet = Fleet([(), (event(5),), EngineDeadError("gone")])
    await fleet.stream.open()
    fleet.stream.cancel()
    with pytest.raises(EngineDeadError, match="gone"):
        await fleet.stream.forward(fleet.delivered.append)
    assert len(fleet.requests) == 1


async def test_events_before_the_error_in_one_batch_are_delivered_once() -> None:
    first = [(), (event(5), event(6), event(finish_reason="abort", error="it died"))]
    fleet = Fleet(first, [(), (event(7, finish_reason="stop"),)])
    assert await fleet.run() == [5, 6, 7]


async def test_lost_replicas_and_full_queues_are_waited_for_when_migrating() -> None:
    fleet = Fleet(
        [EngineDeadError("Serve has not noticed yet")],
        [(), (event(5),), EngineDeadError("gone")],
        [EngineDeadError("gone")],
        [QueueFullError(1.0)],
        [(), (event(6, finish_reason="stop"),)],
    )
    assert await fleet.run() == [5, 6]
    assert fleet.num_migrations == 1


async def test_a_full_queue_refuses_a_new_request_at_once() -> None:
    with pytest.raises(QueueFullError):
        await Fleet([QueueFullError(1.0)]).run()


async def test_without_capacity_the_client_hears_what_was_lost() -> None:
    fleet = Fleet([(), (event(5),), EngineDeadError("rank 1 died")], [QueueFullError(1.0)], migration_seconds=0.5)
    with pytest.raises(EngineDeadError, match="rank 1 died; no other engine took over within 0.5 s"):
        await fleet.run()
    assert [event.token_ids for event in fleet.delivered] == [(5,)]


async def test_a_request_that_ends_every_engine_is_given_up() -> None:
    fleet = Fleet([(), (event(5),), EngineDeadError("poison")])
    with pytest.raises(EngineDeadError, match="poison"):
        await fleet.run()
    assert len(fleet.requests) == 1 + MAX_MIGRATIONS


async def test_a_successor_may_take_longer_than_a_first_submission() -> None:
    """Three refusals take 0.7 s at least: longer than a new request would have waited."""
    gone = EngineDeadError("gone")
    last: Script = [(), (event(6, finish_reason="stop"),)]
    fleet = Fleet([(), (event(5),), gone], [gone], [gone], [gone], last, submit_seconds=0.1)
    assert await fleet.run() == [5, 6]
    with pytest.raises(EngineDeadError, match="gone"):
        await Fleet([gone], submit_seconds=0.1).run()


def test_attempts_become_rarer_and_do_not_come_together() -> None:
    longest, shortest = ([*itertools.islice(retry_seconds(lambda: drawn), 9)] for drawn in (0.0, 1.0))  # noqa: B023
    assert longest[:4] == [0.2, 0.4, 0.8, 1.6]
    assert longest[-1] == LONGEST_RETRY_SECONDS
    assert shortest == [seconds / 2 for seconds in longest]
    assert len({next(retry_seconds()) for _ in range(50)}) > 10
