"""The engine's Ray actor: requests in, token events out, and a thread that steps while there is work.

Ray carries requests; no Ray call happens inside a step, and no step runs on the actor's event loop, so a long step
never holds up a submit, an abort or a health check. A step that raises ends this engine: every request gets an error
event, health turns false with the reason, and whoever owns the actor replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.messages import EngineDeadError, EngineHealth, Request, TokenEvent
from cluster.metrics import EngineMetrics
from cluster.profiler import cost_curve
from cluster.shard import Shard

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 4096
"""Calls that may wait inside the actor at once; the engine's own queue bounds the requests."""


class EngineActor:
    """One engine behind Ray. The constructor returns at once; the model loads on the step thread."""

    def __init__(self, config: EngineConfig, model_name: str) -> None:
        self._config = config
        self._model_name = model_name
        self._engine: Future[Engine] = Future()
        self._metrics: EngineMetrics | None = None
        self._reason = ""
        self._last_step = time.monotonic()
        self._work = threading.Condition()
        self._events: list[TokenEvent] = []
        self._events_lock = threading.Lock()
        self._pollers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        threading.Thread(target=self._run, name=f"engine-{model_name}", daemon=True).start()

    async def ready(self) -> None:
        """Returns when the model is loaded; raises EngineDeadError when it can't be."""
        await self._loaded()

    async def submit(self, request: Request) -> None:
        """Queue a request; its tokens come by next_events.

        Raises InvalidRequestError, QueueFullError or EngineDeadError.
        """
        engine = await self._loaded()
        with self._work:
            if self._reason:
                raise EngineDeadError(self._reason)
            if not engine.has_work:
                self._last_step = time.monotonic()  # the stretch without work was no delay
            engine.add(request)
            self._work.notify()

    async def abort(self, request_id: str) -> None:
        """Give a request up; its blocks are free within one step. An unknown (finished) id is no error."""
        engine = await self._loaded()
        with self._work:
            engine.abort(request_id)
            self._work.notify()

    async def next_events(self) -> tuple[TokenEvent, ...]:
        """Everything that was emitted since the last call; waits until there is something."""
        poller = (asyncio.get_running_loop(), asyncio.Event())
        with self._events_lock:
            self._pollers.add(poller)
        try:
            while True:
                with self._events_lock:
                    if self._events:
                        events, self._events = self._events, []
                        return tuple(events)
                    poller[1].clear()
                await poller[1].wait()
        finally:
            with self._events_lock:
                self._pollers.discard(poller)

    async def health(self) -> EngineHealth:
        """The truth: not alive once a step raised, and how long work has waited for the next finished step."""
        if self._reason or not self._engine.done():
            return EngineHealth(alive=not self._reason, ready=False, seconds_since_last_step=0.0, reason=self._reason)
        engine = self._engine.result()
        waited = time.monotonic() - self._last_step if engine.has_work else 0.0
        return EngineHealth(
            alive=True,
            ready=True,
            seconds_since_last_step=waited,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_free_kv_blocks=engine.num_free_kv_blocks,
        )

    async def metrics_text(self) -> str:
        """The engine's registry as exposition text; empty until the model is loaded."""
        return self._metrics.text() if self._metrics else ""

    async def _loaded(self) -> Engine:
        if self._reason:
            raise EngineDeadError(self._reason)
        return await asyncio.shield(asyncio.wrap_future(self._engine))

    def _run(self) -> None:
        """The step thread."""
        try:
            torch.set_num_threads(self._config.num_threads)
            engine = load_engine(self._config)
            self._metrics = EngineMetrics(self._config.num_kv_blocks, engine.max_drafts)
            self._engine.set_result(engine)
            while True:
                with self._work:
                    self._work.wait_for(lambda: engine.has_work)
                result = engine.step()
                self._last_step = time.monotonic()
                self._emit(result.events)
                self._metrics.observe_step(result)
        except Exception as error:  # the boundary of the thread: whatever it was, the engine is dead and must say so
            logger.exception("the engine of %s died", self._model_name)
            self._die(f"{type(error).__name__}: {error}")

    def _die(self, reason: str) -> None:
        with self._work:
            self._reason = reason
        if not self._engine.done():
            self._engine.set_exception(EngineDeadError(reason))
            return
        self._emit(
            tuple(
                TokenEvent(request_id, (), finish_reason="abort", error=f"the engine died: {reason}")
                for request_id in self._engine.result().request_ids()
            )
        )

    def _emit(self, events: tuple[TokenEvent, ...]) -> None:
        if not events:
            return
        with self._events_lock:
            self._events += events
            pollers = tuple(self._pollers)
        for loop, event in pollers:
            loop.call_soon_threadsafe(event.set)


def load_engine(config: EngineConfig) -> Engine:
    """The engine that the settings describe, its cost curve measured where one is needed. ValueError says what not."""
    shard = Shard.load(config)
    scheduled = config.speculation == "scheduled" and shard.drafter is not None
    return Engine(config, shard, cost_curve(config, shard) if scheduled else None)


def start_engine(config: EngineConfig, model_name: str) -> Any:
    """Start an engine actor on this node and return its handle; it reports ready when the model is loaded.

    It takes no CPU of Ray's count: what it needs is reserved by its replica, or, on a laptop, shared with HTTP.
    """
    # Without this, an actor that reserves nothing starts on any node of the cluster.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    threads = str(config.num_threads)
    actor = ray.remote(EngineActor).options(
        num_cpus=0,
        scheduling_strategy=here,
        max_concurrency=MAX_CONCURRENT_CALLS,
        max_restarts=0,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": threads}},  # else Ray sets it to 1 and torch can't have more
    )
    return actor.remote(config, model_name)
