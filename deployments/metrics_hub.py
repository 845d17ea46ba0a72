"""What every process of the service last said about itself: its metrics, and whether its engine can serve.

Knows texts and their age; the names inside them belong to cluster/metrics.py. A process that stops pushing is
forgotten, so a dead replica neither keeps its gauges on the dashboard nor the service's health true. That an engine was
lost is remembered here, because nothing of its own is left to say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.exposition import Exposition, merge
from cluster.metrics import HubMetrics

PUSH_PERIOD_SECONDS = 1.0
EXPIRES_AFTER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Said:
    exposition: Exposition
    ready: bool
    at: float


class MetricsHub:
    """One per application. Every method is quick."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`model`: what clients call the model; a label of every sample."""
        self._model = model
        self._clock = clock
        self._said: dict[str, _Said] = {}
        self._lost: set[str] = set()
        self._metrics = HubMetrics()

    def push(self, exposition: Exposition, ready: bool = False, source: str = "") -> None:
        """Replace what `source` (none: the exposition's replica) said before. `ready`: its engine takes requests."""
        self._said[source or exposition.replica] = _Said(exposition, ready, self._clock())

    def engine_lost(self, engine: str) -> None:
        """Count it, once, though each replica of a lockstep group says so. `engine`: a name that no other one has."""
        if engine not in self._lost:
            self._lost.add(engine)
            self._metrics.observe_lost_engine()

    def any_ready(self) -> bool:
        """Whether some engine said so, not long ago."""
        return any(said.ready for said in self._fresh())

    def exposition(self) -> str:
        """The metrics of the whole service, one text."""
        own = Exposition("hub", 0, self._metrics.text())
        return merge([own, *(said.exposition for said in self._fresh())], self._model)

    def _fresh(self) -> list[_Said]:
        oldest = self._clock() - EXPIRES_AFTER_SECONDS
        self._said = {source: said for source, said in self._said.items() if said.at >= oldest}
        return sorted(self._said.values(), key=lambda said: (said.exposition.replica, said.exposition.rank))
