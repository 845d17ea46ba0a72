"""One data-parallel rank of the service: owns an engine actor and deals its token events to the requests' streams.

Knows how to tell a living engine from a dead or stuck one; knows nothing of HTTP, text or how an engine works. It heals
nothing itself: it says that it is unhealthy, and Serve replaces it together with its engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.accounts import FleetAccount
from cluster.exposition import Exposition
from cluster.group import Place, start_engine
from cluster.messages import EngineDeadError, EngineHealth, Request, TokenEvent
from deployments.config import LLMConfig
from deployments.metrics_hub import PUSH_PERIOD_SECONDS
from deployments.migration import Events

logger = logging.getLogger("ray.serve")

SCHEDULER = "confidence-scheduler"
"""The fleet's scheduler, among the actors of this deployment."""


class Replica:
    """Serve deployment. The engine's own queue bounds what it takes, not Serve's."""

    def __init__(self, config: LLMConfig, hub: Any) -> None:
        """`hub`: handle of the MetricsHub. Returns when the engine is ready; raises EngineDeadError if it can't be."""
        self._config = config
        self._hub = hub
        place = _place(config)
        self._name = place.group or serve.get_replica_context().replica_id.unique_id
        self._engine = start_engine(config.engine_config(), config.model_id, place, config.promises)
        # Nothing else runs in this process yet, so blocking is right: Serve learns here whether the start failed.
        ray.get(self._engine.ready.remote())
        self._queues: dict[str, asyncio.Queue[Events | EngineDeadError]] = {}
        self._dead: EngineDeadError | None = None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._pump()), loop.create_task(self._watch())]
        self._adviser = loop.create_task(self._find_scheduler()) if config.is_scheduled else None

    async def generate(self, request: Request) -> AsyncIterator[Events]:
        """First an empty tuple, when the engine has taken the request; then its events as they come.

        Raises InvalidRequestError or QueueFullError before the first item, EngineDeadError at any time. Closing or
        cancelling the stream early aborts the request.
        """
        if self._dead is not None:
            raise self._dead
        queue = self._queues[request.request_id] = asyncio.Queue()
        finished = False
        try:
            await self._submit(request)
            yield ()
            while not finished:
                events = await _everything(queue)
                finished = events[-1].finish_reason is not None
                yield events
        finally:
            if self._queues.get(request.request_id) is queue:
                del self._queues[request.request_id]
            if not finished and self._dead is None:
                self._engine.abort.remote(request.request_id)

    async def explain(self) -> FleetAccount:
        """What the fleet's scheduler decided for all replicas of this version. ValueError, RayError: it is gone."""
        scheduler = await asyncio.to_thread(serve.get_deployment_actor, SCHEDULER)
        account: FleetAccount = await scheduler.explain.remote()
        return account

    async def check_health(self) -> None:
        """Serve asks; raising means: replace me."""
        for task in self._tasks:
            if task.done() and self._dead is None:  # a bug of ours, but streams would hang behind it
                self._bury(f"{task.get_coro()} ended: {task.exception() if not task.cancelled() else 'cancelled'}")
        if self._dead is not None:
            raise self._dead

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve asks twice a second and tells every router what has changed: what the engine could do, and for whom."""
        try:
            health: EngineHealth = await self._engine.health.remote()
        except RayError:  # whoever watches the engine will find out
            return {}
        speeds = [float(f"{speed:.3g}") for speed in health.speeds]  # noise is no news
        return {"speeds": speeds, "rooms": list(health.rooms), "num_requests": health.num_running + health.num_waiting}

    async def _submit(self, request: Request) -> None:
        try:
            await self._engine.submit.remote(request)
        except RayTaskError as error:
            raise error.cause from None  # the error itself, without Ray's wrapping, which does not pickle twice
        except RayActorError as error:
            raise self._bury(f"the engine's process died: {error}") from None

    async def _pump(self) -> None:
        """Deal events to their streams until the engine dies. One call brings all that one or more steps emitted."""
        try:
            while True:
                dealt: dict[str, list[TokenEvent]] = {}
                for event in await self._engine.next_events.remote():
                    dealt.setdefault(event.request_id, []).append(event)
                for request_id, events in dealt.items():
                    if queue := self._queues.get(request_id):  # else its client has gone
                        queue.put_nowait(tuple(events))
        except RayTaskError as error:
            self._bury(str(error.cause))
        except RayActorError as error:
            self._bury(f"the engine's process died: {error}")

    async def _watch(self) -> None:
        """About once a second: is the engine alive, and what does it count? The hub hears it."""
        while self._dead is None:
            await self._look()
            await asyncio.sleep(PUSH_PERIOD_SECONDS)

    async def _look(self) -> None:
        limit = self._config.deployment_config.health_check_timeout_s
        try:
            async with asyncio.timeout(limit):
                health: EngineHealth = await self._engine.health.remote()
                text: str = await self._engine.metrics_text.remote()
        except TimeoutError:
            self._bury(f"the engine's process did not answer for {limit:g} s")
            return
        except RayActorError as error:
            self._bury(f"the engine's process died: {error}")
            return
        except RayTaskError as error:
            self._bury(f"the engine can't say how it is: {error.cause}")
            return
        if not health.alive:
            self._bury(health.reason)
        elif health.seconds_since_last_step > self._config.unhealthy_after_s:
            self._bury(f"no step finished for {health.seconds_since_last_step:.0f} s, with work waiting")
        else:
            self._say(text, health.ready)

    async def _find_scheduler(self) -> None:
        """Tell the engine about once a second where the fleet's scheduler is: Serve makes a new one when it dies.

        Its trouble is none of this replica: whatever fails here is tried again.
        """
        while self._dead is None:
            replica = str(serve.get_replica_context().rank.rank)
            try:
                scheduler = await asyncio.to_thread(serve.get_deployment_actor, SCHEDULER)
                self._engine.advise.remote(scheduler, replica)
                if replica == "0":  # one is enough to speak for it
                    async with asyncio.timeout(PUSH_PERIOD_SECONDS):
                        text: str = await scheduler.metrics_text.remote()
                    self._hub.push.remote(Exposition("scheduler", 0, text))
            except (ValueError, RayError, TimeoutError) as error:  # it is dead, and its successor not there yet
                logger.debug("the fleet's scheduler is not there: %s", error)
            await asyncio.sleep(PUSH_PERIOD_SECONDS)

    def _say(self, text: str, ready: bool) -> None:
        """Serve deals the ranks anew when replicas come and go, so a rank names us only for now."""
        context = serve.get_replica_context()
        exposition = Exposition(str(context.rank.rank), 0, text)
        self._hub.push.remote(exposition, ready=ready, source=context.replica_id.unique_id)

    def _bury(self, reason: str) -> EngineDeadError:
        """The engine is lost: tell the streams, the hub, and (at its next question) Serve. Once."""
        if self._dead is None:
            logger.error("engine lost: %s", reason)
            self._dead = EngineDeadError(f"the engine is lost and will be replaced: {reason}")
            self._say("", ready=False)
            self._hub.engine_lost.remote(self._name)
            ray.kill(self._engine)  # a stuck one would go on taking memory and cores
            for queue in self._queues.values():
                queue.put_nowait(self._dead)
        return self._dead


def _place(config: LLMConfig) -> Place:
    """Where this replica's ranks run: in its bundles of the placement group, if there is one, which a gang shares."""
    gang = serve.get_replica_context().gang_context
    return Place(
        device="cuda" if config.accelerator_type else "cpu",
        num_cpus=config.deployment_config.ray_actor_options.num_cpus,
        has_bundles=config.reserves_bundles,
        group=f"gang-{gang.gang_id}" if gang else "",
        dp_rank=gang.rank if gang else 0,
    )


async def _everything(queue: asyncio.Queue[Events | EngineDeadError]) -> Events:
    """All events that have arrived, at least one. Raises the error that ended the engine, after what came before it."""
    item = await queue.get()
    if isinstance(item, EngineDeadError):
        raise item
    events = list(item)
    while not queue.empty() and events[-1].finish_reason is None:
        item = queue.get_nowait()
        if isinstance(item, EngineDeadError):
            queue.put_nowait(item)  # nothing follows it, so it is the next one again
            break
        events += item
    return tuple(events)
