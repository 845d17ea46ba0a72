"""Serve's request router of the replicas: promised speeds first, then prefix caches, then load (admission.py).

Serve makes one in each process that has a handle of the deployment. It asks `choose_replicas` again, with a backoff,
until a request has a replica; what an engine can do comes with Serve's own broadcasts, as the replicas' routing stats.
Serve copies this module by value: it must not keep anything that others are to see.

A choice of ours that waits must hold up nobody, so every request has a routing task of its own, and what a task finds
is for its own request. Serve's own look-up, by the id of the HTTP request, would take one choice of it for another.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.messages import TierUnmetError
from deployments.admission import PrefixMemory, ReplicaLoad, Route, Ticket, prompt_key, route

RETRY_AFTER_SECONDS = 2.0
"""What a refused client is told: about when the replicas' news will be others."""
NEWS_PERIOD_SECONDS = 0.5
WAIT_SECONDS = 0.05
"""Longest of Serve's own pauses before it asks again."""
HOLD_SECONDS = 0.2
"""One that waits for a promise looks at the replicas' news so often, and when its time is over."""
MAX_WAITING = 1_000_000


class TierRouter(RequestRouter):  # type: ignore[misc]
    """See the module."""

    def initialize_state(self, capacity: int) -> None:
        """`capacity`: requests that an engine takes; it refuses more."""
        self._capacity = capacity
        self._memory = PrefixMemory()
        self._bound: dict[asyncio.Future[Any], ReplicaID] = {}
        self._num_bound: Counter[ReplicaID] = Counter()

    @property
    def max_num_routing_tasks(self) -> int:
        return MAX_WAITING

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, one by one, the best first; none: ask again later."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        ticket = _ticket(pending_request)
        self._unbind(pending_request.future)
        chosen = self._route(candidate_replicas, ticket)
        if ticket is not None:
            now = time.monotonic()
            if ticket.holds(chosen.met, now):
                ticket.outcome = "waited"
                await asyncio.sleep(min(HOLD_SECONDS, ticket.wait_until - now))  # many that wait cost others time
                return []
            if ticket.sheds(chosen.met):
                self._refuse(pending_request, ticket)
            elif chosen.met is None:
                ticket.outcome = "unknown"
            elif not chosen.met:
                ticket.outcome = "unmet"
            elif ticket.outcome != "waited":
                ticket.outcome = "met"
        self._bind(pending_request.future, candidate_replicas[chosen.order[0]].replica_id)
        return [[candidate_replicas[i]] for i in chosen.order]

    def _route(self, replicas: list[RunningReplica], ticket: Ticket | None) -> Route:
        loads = [self._load(replica) for replica in replicas]
        if ticket is None:  # Serve refused to send it where it was to go, which happens when all are full
            return route(loads, None, {}, 0)
        prompt = ticket.request.prompt_token_ids
        tier = ticket.request.tier if ticket.tier.min_tokens_per_second else None
        return route(loads, tier, self._memory.known(prompt), prompt_key(prompt))

    def _load(self, replica: RunningReplica) -> ReplicaLoad:
        """Serve's count, which only this process's own requests keep fresh, or the engine's, which is somewhat old."""
        news: dict[str, Any] = replica.routing_stats
        counted, then = self.replica_queue_len_cache.get(replica.replica_id) or 0, int(news.get("num_requests", 0))
        speeds, rooms = tuple(news.get("speeds", ())), tuple(news.get("rooms", ()))
        num_requests, num_leaving = max(counted, then), self._num_bound[replica.replica_id]
        name = _name(replica.replica_id)
        return ReplicaLoad(name, num_requests, self._capacity, speeds, rooms, then, num_leaving)

    def _bind(self, future: asyncio.Future[Any], replica_id: ReplicaID) -> None:
        """Serve counts a request once it is sent. Choices of one HTTP request are routed at one moment, before that:
        all of them would choose the same replica."""
        if future.done():  # refused
            return
        self._bound[future] = replica_id
        self._num_bound[replica_id] += 1
        future.add_done_callback(self._unbind)  # comes after the one that wakes whoever sends it

    def _unbind(self, future: asyncio.Future[Any]) -> None:
        replica_id = self._bound.pop(future, None)
        if replica_id is not None:
            future.remove_done_callback(self._unbind)
            self._num_bound[replica_id] -= 1
            if not self._num_bound[replica_id]:
                del self._num_bound[replica_id]

    def _refuse(self, pending: PendingRequest, ticket: Ticket) -> None:
        pending.future.set_exception(TierUnmetError(ticket.tier.name, RETRY_AFTER_SECONDS))
        self._leave(pending)

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """`request_metadata` is the very object of the request that the replica was chosen for."""
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                self._depart(pending, _name(replica.replica_id))
                pending.future.set_result(replica)
                self._leave(pending)
                return

    def _leave(self, pending: PendingRequest) -> None:
        """Serve counts who is in line to know how many tasks to start, and takes out only the first ones, so that one
        that waits would let the line grow."""
        self._remove_pending_request_from_indices(pending)
        line: deque[PendingRequest] = self._pending_requests_to_fulfill
        waiting = [other for other in line if not other.future.done()]
        line.clear()
        line.extend(waiting)

    def _depart(self, pending: PendingRequest, replica: str) -> None:
        ticket = _ticket(pending)
        if ticket is not None:
            self._memory.served(ticket.request.prompt_token_ids, replica)


def _ticket(pending: PendingRequest) -> Ticket | None:
    """Taken off, for all that is left there is sent, and kept where Serve finds it when the replica refuses the request
    and another one must be chosen."""
    context: Any = pending.routing_context
    if "ticket" in pending.kwargs:
        context.ticket = pending.kwargs.pop("ticket")
    return getattr(context, "ticket", None)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def router_config(capacity: int) -> RequestRouterConfig:
    """For the replicas' deployment. `capacity`: requests that an engine takes."""
    return RequestRouterConfig(
        request_router_class=TierRouter,
        request_router_kwargs={"capacity": capacity},
        request_routing_stats_period_s=NEWS_PERIOD_SECONDS,
        max_backoff_s=WAIT_SECONDS,
    )
