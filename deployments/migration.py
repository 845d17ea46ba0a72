"""One request's token events, whichever engine they come from: when an engine is lost, another continues.

A lost engine's request is submitted again together with the tokens that arrived, which count as its output. So no token
is lost or repeated, a limit or penalty that counts output goes on counting, and a request with a seed, whose randomness
is keyed by position, gets the text that it would have had.

Knows asyncio and the messages; knows nothing of HTTP, Ray or Serve, which picks the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Protocol

from cluster.messages import EngineDeadError, QueueFullError, Request, TokenEvent

MAX_MIGRATIONS = 3
"""A request that outlived so many engines is more likely to be what kills them."""
FIRST_RETRY_SECONDS = 0.2
"""Serve may pick a lost replica until it has noticed."""
LONGEST_RETRY_SECONDS = 3.0

Events = tuple[TokenEvent, ...]


class EventStream(Protocol):
    """What a replica's `generate` gives, its errors being those of cluster/messages.py."""

    def __aiter__(self) -> AsyncIterator[Events]: ...

    async def __anext__(self) -> Events: ...

    def cancel(self) -> None: ...


def retry_seconds(draw: Callable[[], float] = random.random) -> Iterator[float]:
    """How long to wait before each further attempt: twice as long each time, up to a limit.

    Each is shortened by up to a half at random (`draw`: 0 to 1), so that all streams of a lost engine don't come back
    at the same moment.
    """
    for attempt in itertools.count():
        yield min(FIRST_RETRY_SECONDS * 2.0**attempt, LONGEST_RETRY_SECONDS) * (1 - draw() / 2)


class MigratingStream:
    """Use `open`, then `forward`, once; `cancel` at any time."""

    def __init__(
        self,
        request: Request,
        send: Callable[[Request, bool], EventStream],
        submit_timeout_seconds: float,
        migration_timeout_seconds: float,
        on_migration: Callable[[], None],
    ) -> None:
        """`send`: submits a request; its second argument says that an engine has had it before.

        The timeouts: how long it may take until the first engine has taken the request, and each time another one.
        They differ, because a new request can go elsewhere at once, while one that has begun waits for an engine that
        starts anew, if need be.
        """
        self._request = request
        self._send = send
        self._submit_timeout_seconds = submit_timeout_seconds
        self._migration_timeout_seconds = migration_timeout_seconds
        self._on_migration = on_migration
        self._stream: EventStream | None = None
        self._emitted: list[int] = []
        self._finished = False
        self._cancelled = False
        self._num_migrations = 0
        self._num_submissions = 0

    async def open(self) -> None:
        """Returns when an engine has taken the request. Raises whatever it was refused with; TimeoutError."""
        await self._submit(self._submit_timeout_seconds, patient=False)

    async def forward(self, deliver: Callable[[TokenEvent], None]) -> None:
        """Deliver every event up to the last. Raises EngineDeadError when no engine could continue."""
        while not self._finished:
            try:
                await self._read(deliver)
            except EngineDeadError as error:
                await self._migrate(error)

    def cancel(self) -> None:
        """No more of it: the sequence is aborted, and not continued elsewhere. No effect on one that has finished."""
        self._cancelled = True
        self._leave()

    def _leave(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    async def _read(self, deliver: Callable[[TokenEvent], None]) -> None:
        assert self._stream is not None
        async for events in self._stream:
            for event in events:
                if event.error is not None:
                    raise EngineDeadError(event.error)
                self._emitted += event.token_ids
                self._finished = event.finish_reason is not None
                # The statistics tell of the last engine only.
                deliver(replace(event, stats=None) if self._num_migrations else event)
            if self._finished:  # what happens to its engine, or to the stream, is no matter any more
                return
        raise EngineDeadError("the replica ended the stream early")

    async def _migrate(self, lost: EngineDeadError) -> None:
        """Have another engine, or the lost one's successor, continue; if none can, the client hears of `lost`."""
        if self._cancelled or self._num_migrations == MAX_MIGRATIONS:
            raise lost
        limit = self._migration_timeout_seconds
        try:
            await self._submit(limit, patient=True)
        except Exception:
            raise EngineDeadError(f"{lost}; no other engine took over within {limit:g} s") from None
        self._num_migrations += 1
        self._on_migration()

    async def _submit(self, timeout_seconds: float, patient: bool) -> None:
        """`patient`: an engine had taken it, so wait for a place in a full queue instead of passing the refusal on."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_seconds
        refusal: Exception = TimeoutError()
        for pause_seconds in retry_seconds():
            self._leave()
            self._num_submissions += 1
            # An id of its own: the engine thought lost may live, and still hold the one before.
            request_id = f"{self._request.request_id}-{self._num_submissions}"
            emitted = tuple(self._emitted)
            request = replace(self._request, request_id=request_id, emitted_token_ids=emitted)
            self._stream = self._send(request, patient)
            try:
                async with asyncio.timeout_at(deadline):
                    await anext(self._stream)
                    return
            except TimeoutError:
                raise refusal from None
            except EngineDeadError as error:
                refusal = error
            except QueueFullError as error:
                if not patient:
                    raise
                refusal = error
            if clock() + pause_seconds > deadline:
                raise refusal
            await asyncio.sleep(pause_seconds)
