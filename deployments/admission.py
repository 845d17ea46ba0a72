"""Which replica gets a request, and whether it should rather wait: by promised speed, by prefix cache, by load.

Pure but for the memory of prefixes, which is a value with one owner. Knows no clock, no Ray and no Serve.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.messages import Request
from cluster.metrics import Admission
from deployments.config import SlaTierConfig

NEAR_TIE = 0.25
"""Loads that differ by less than this share, or by one request, count as equal: then a warm prefix cache decides."""
SHORTEST_PREFIX = 32
"""Tokens. Shorter ones cost less to compute again than a wrong place costs."""
MAX_PREFIXES = 65_536


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What is known of a replica."""

    name: str
    num_requests: int
    """That it has now."""
    capacity: int
    """How many it takes: those that run, and those that wait."""
    speeds: tuple[float, ...] = ()
    """By tier: tokens per second that one more request would get. Empty: nobody has said."""
    rooms: tuple[int, ...] = ()
    """By tier: how many more requests would get a place, and the speed that the tier promises."""
    num_requests_then: int = 0
    """That it had when both were true."""
    num_leaving: int = 0
    """Chosen for it at this very moment, and not among `num_requests` yet. They spread by load; what they will leave of
    its speed isn't known, and choices of one request are not refused for one another."""

    @property
    def load(self) -> int:
        return self.num_requests + self.num_leaving

    @property
    def is_full(self) -> bool:
        return self.load >= self.capacity

    def keeps(self, tier: int) -> bool | None:
        """Whether one more request gets what its tier promises, after those that came since. None: nobody has said."""
        if tier >= len(self.rooms):
            return None
        return self.num_requests - self.num_requests_then < self.rooms[tier]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request should go."""

    order: tuple[int, ...]
    """Places of all replicas, the best first."""
    met: bool | None
    """Whether the best keeps the promised speed; None: nobody knows."""


def route(loads: Sequence[ReplicaLoad], tier: int | None, known: Mapping[str, int], key: int) -> Route:
    """Replicas that keep the promise come first, then those of which nothing is known, then the fastest; the full last.

    Among those that are as good, those with about the least load, and of them the one that knows most of the prompt.
    tier: None when no speed is promised.
    known: replica -> tokens of the prompt that it has served before. key: of the prompt, so that equal ones that nobody
    has served yet go to the same place from every process.
    """
    kept = [tier is None or load.keeps(tier) for load in loads]
    keeping, unknown, failing = ([i for i, keeps in enumerate(kept) if keeps is which] for which in (True, None, False))
    fastest = [] if tier is None else _by_speed(loads, failing, tier)
    best_first = (*_by_load(loads, keeping, known, key), *_by_load(loads, unknown, known, key), *fastest)
    order = tuple(sorted(best_first, key=lambda i: loads[i].is_full))
    return Route(order, kept[order[0]])


def _by_load(
    loads: Sequence[ReplicaLoad], places: Sequence[int], known: Mapping[str, int], key: int
) -> tuple[int, ...]:
    if not places:
        return ()
    least = min(loads[i].load for i in places)
    near = least + max(1, NEAR_TIE * least)

    def rank(i: int) -> tuple[float, int, int]:
        load = loads[i]
        if load.load > near:
            return load.load, 0, 0
        return 0.0, -known.get(load.name, 0), zlib.crc32(f"{load.name} {key}".encode())

    return tuple(sorted(places, key=rank))


def _by_speed(loads: Sequence[ReplicaLoad], places: Sequence[int], tier: int) -> list[int]:
    """The fastest first, less what requests since the news take of a speed. How much isn't known: each counts as one
    more beside as many as the fullest of these had, so that a burst spreads, and an idle one gets more of it."""
    most = max((loads[i].num_requests_then for i in places), default=0)

    def rank(i: int) -> tuple[float, int]:
        load = loads[i]
        num_since = load.load - load.num_requests_then
        return -load.speeds[tier] / (1 + most + num_since), load.load

    return sorted(places, key=rank)


class PrefixMemory:
    """Which replica last served a prompt that began like this. Forgets what was not asked for longest."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[int, str] = OrderedDict()

    def known(self, prompt: tuple[int, ...]) -> dict[str, int]:
        """Replica -> length of the longest prefix of the prompt that it served last."""
        found: dict[str, int] = {}
        for length, key in _prefixes(prompt):
            if replica := self._replicas.get(key):
                found[replica] = length
        return found

    def served(self, prompt: tuple[int, ...], replica: str) -> None:
        for _, key in _prefixes(prompt):
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > MAX_PREFIXES:
            self._replicas.popitem(last=False)


def _prefixes(prompt: tuple[int, ...]) -> list[tuple[int, int]]:
    """(length, key) of the prefixes that are remembered: each twice as long, so there are few of them."""
    prefixes, length = [], SHORTEST_PREFIX
    while length <= len(prompt):
        prefixes.append((length, hash(prompt[:length])))
        length *= 2
    return prefixes


def prompt_key(prompt: tuple[int, ...]) -> int:
    """The same in every process for prompts that begin alike."""
    return zlib.crc32(" ".join(map(str, prompt[:SHORTEST_PREFIX])).encode())


@dataclass(slots=True)
class Ticket:
    """What the router needs to know of a request. It stays in the process: the router takes it off before it sends."""

    request: Request
    tier: SlaTierConfig
    wait_until: float
    """Of time.monotonic(): how long it may be held back for a replica that keeps its promise."""
    must_serve: bool
    """An engine has had it before: it is neither held back nor refused."""
    report: Callable[[Admission], None]
    """Told what `outcome` came to be, if its tier promises a speed."""
    outcome: Admission = "unknown"

    def holds(self, met: bool | None, now: float) -> bool:
        """Whether it should wait."""
        return met is False and not self.must_serve and now < self.wait_until

    def sheds(self, met: bool | None) -> bool:
        """Whether it should be refused, when it waits no more."""
        return met is False and not self.must_serve and self.tier.when_unmet == "shed"

    def is_taken(self) -> None:
        """An engine has the request: how it got there is told, unless one had it before."""
        if self.tier.min_tokens_per_second and not self.must_serve:
            self.report(self.outcome)
