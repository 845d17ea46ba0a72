"""A closed loop: keeps a fixed number of requests in flight and measures what comes out.

Knows a clock and counts; knows no model and imports nothing but the standard library, so that the same loop drives our
engine and, in another environment, other people's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Progress(NamedTuple):
    """What one step added to one request."""

    request_id: str
    num_tokens: int
    finished: bool = False
    num_rounds: int = 0
    """With `finished`: verify rounds and accepted drafts of the whole request; 0 for backends that don't speculate."""
    num_accepted: int = 0


class Backend(Protocol):
    """Something that generates step by step."""

    def add(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> None: ...

    def step(self) -> list[Progress]: ...


@dataclass(slots=True)
class Measurement:
    """Sums, so that measurements add up: rates are formed at the end."""

    num_tokens: int = 0
    """Tokens of the steps that began with every place taken: the tail, when the queue is empty, is no load at all."""
    seconds: float = 0.0
    user_tokens: int = 0
    """Tokens after each request's first, and the time from the first to the last."""
    user_seconds: float = 0.0
    num_rounds: int = 0
    num_accepted: int = 0

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second_per_user(self) -> float:
        return self.user_tokens / self.user_seconds if self.user_seconds else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens per verify round, recovered or bonus token included; 1 when nothing speculates."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0


@dataclass(slots=True)
class _Flight:
    first_at: float | None = None
    tokens_after_first: int = 0
    last_at: float = field(default=0.0)


def drive(backend: Backend, prompts: Sequence[tuple[int, ...]], concurrency: int) -> Measurement:
    """Run every prompt to its end with `concurrency` in flight while prompts last."""
    measured = Measurement()
    for _ in steps(backend, prompts, concurrency, measured):
        pass
    return measured


def steps(
    backend: Backend,
    prompts: Sequence[tuple[int, ...]],
    concurrency: int,
    measured: Measurement,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[None]:
    """`drive` one step at a time, so that several loops can take turns. Adds to `measured`."""
    waiting = deque(enumerate(prompts))
    flights: dict[str, _Flight] = {}
    while waiting or flights:
        while waiting and len(flights) < concurrency:
            index, prompt = waiting.popleft()
            backend.add(str(index), prompt)
            flights[str(index)] = _Flight()
        full, began = len(flights) == concurrency, clock()
        progress = backend.step()
        now = clock()
        if full:
            measured.seconds += now - began
            measured.num_tokens += sum(item.num_tokens for item in progress)
        for item in progress:
            _advance(flights, item, now, measured)
        yield


class OwnClock:
    """Runs while its loop does: the seconds inside of `with` blocks."""

    def __init__(self) -> None:
        self._elapsed_seconds = 0.0
        self._resumed_seconds: float | None = None

    def __call__(self) -> float:
        running = time.perf_counter() - self._resumed_seconds if self._resumed_seconds is not None else 0.0
        return self._elapsed_seconds + running

    def __enter__(self) -> None:
        self._resumed_seconds = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._elapsed_seconds, self._resumed_seconds = self(), None


def turns(loops: Sequence[Iterator[None]], clocks: Sequence[OwnClock]) -> Iterator[None]:
    """A step of a loop, on its clock, until all have ended: always of the one that has had least time, so that what
    else the machine does meets all alike."""
    left = list(zip(loops, clocks, strict=True))
    while left:
        loop, clock = min(left, key=lambda pair: pair[1]())
        with clock:
            ended = next(loop, loop) is not None
        if ended:
            left.remove((loop, clock))
        yield


def _advance(flights: dict[str, _Flight], item: Progress, now: float, measured: Measurement) -> None:
    flight = flights[item.request_id]
    if item.num_tokens:
        if flight.first_at is None:
            flight.first_at = now
        else:
            flight.tokens_after_first += item.num_tokens
        flight.last_at = now
    if item.finished:
        del flights[item.request_id]
        measured.num_rounds += item.num_rounds
        measured.num_accepted += item.num_accepted
        if flight.first_at is not None:
            measured.user_tokens += flight.tokens_after_first
            measured.user_seconds += flight.last_at - flight.first_at
