"""The Ray actors of an engine: its leader, with requests in and token events out, and the ranks that follow.

Ray carries requests; no Ray call happens inside a step, and no step runs on the actor's event loop, so a long step
never holds up a submit, an abort or a health check. A step that raises ends this engine: every request gets an error
event, health turns false with the reason, and whoever owns the actor replaces it.

An engine of several ranks is one actor per rank. The leader starts the followers and owns them, so that they end with
it; a follower that ends, for whatever reason, ends the engine. Leaders of a lockstep group meet where the first of them
says, whom the others find by the group's name.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.confidence_scheduler import Line
from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.mesh import Mesh, bundles_by_node
from cluster.messages import EngineDeadError, EngineHealth, GroupError, Request, SlaTier, TokenEvent
from cluster.metrics import DEFAULT_TIER, EngineMetrics
from cluster.profiler import cost_curve
from cluster.roster import Member
from cluster.shard import Shard

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 4096
"""Calls that may wait inside the actor at once; the engine's own queue bounds the requests."""
NAMESPACE = "dspark"
GRACE_SECONDS = 3.0
"""How long a rank that lives may take to say so, or to end, once its group is lost."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of one replica run."""

    device: str = "cpu"
    """Of every rank; with "cuda", each has a GPU of its own."""
    num_cpus: float = 0
    """What each follower reserves. What the leader needs is reserved by its replica."""
    has_bundles: bool = False
    """Whether the placement group of this replica, or of its lockstep group, has a bundle for each rank; else all run
    on this node."""
    group: str = ""
    """A name that only the replicas of this lockstep group know."""
    dp_rank: int = 0
    """This replica's place in it."""

    def options(self, tp_rank: int, config: EngineConfig) -> dict[str, Any]:
        """Ray's options of one rank's actor."""
        if not self.has_bundles:
            # Without this, an actor that reserves nothing starts on any node of the cluster.
            strategy: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        else:
            group = ray.util.get_current_placement_group()
            nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
            bundles = bundles_by_node([nodes[bundle] for bundle in range(len(nodes))], config.tensor_parallel_size)
            strategy = PlacementGroupSchedulingStrategy(group, bundles[self.dp_rank][tp_rank])
        return {
            "num_cpus": self.num_cpus if tp_rank else 0,
            "num_gpus": int(self.device == "cuda"),
            "scheduling_strategy": strategy,
            "max_restarts": 0,
            # Else Ray sets it to 1 and torch can't have more.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(config.num_threads)}},
        }


class Follower:
    """A rank that doesn't lead. `run` takes a thread until the end, `ping` another."""

    def run(self, config: EngineConfig, rank: int, init_method: str, device: str) -> None:
        """Load this rank's part of the model, then obey. Raises what ends it; returns when the leader stopped it."""
        torch.set_num_threads(config.num_threads)
        Shard.load(config, _join(config, rank, init_method, device)).follow()

    def ping(self) -> None:
        """Answers while the process lives, whatever its rank is doing."""


class Followers:
    """All of a leader's followers. Used in the leader's process; they end with it."""

    def __init__(self, config: EngineConfig, place: Place, init_method: str) -> None:
        first = place.dp_rank * config.tensor_parallel_size
        self._world_size = config.world_size
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        """By rank: the actor, and what resolves when its rank has ended."""
        for tp_rank in range(1, config.tensor_parallel_size):
            actor = ray.remote(Follower).options(max_concurrency=2, **place.options(tp_rank, config)).remote()
            self._actors[first + tp_rank] = actor
            self._ends[first + tp_rank] = actor.run.remote(config, first + tp_rank, init_method, place.device)

    def __len__(self) -> int:
        return len(self._actors)

    def wait(self) -> None:
        """Returns when one has ended, which is never for good."""
        ray.wait(list(self._ends.values()), num_returns=1)

    def diagnose(self) -> str:
        """What is wrong with whom, once the group is lost; "" when all of them are alive and well.

        A rank that only noticed that another is lost is none to blame, unless there is nobody else.
        """
        ended, _ = ray.wait(list(self._ends.values()), num_returns=len(self._ends), timeout=GRACE_SECONDS)
        causes: list[str] = []
        witnesses: list[str] = []
        for rank, end in self._ends.items():
            name = f"rank {rank} of {self._world_size}"
            if end not in ended:
                answered, _ = ray.wait([self._actors[rank].ping.remote()], timeout=GRACE_SECONDS)
                causes += [] if answered else [f"{name} does not answer: its process is frozen or its node is lost"]
                continue
            try:
                ray.get(end)
                causes.append(f"{name} was stopped")
            except RayTaskError as error:
                told = witnesses if isinstance(error.cause, GroupError) else causes
                told.append(f"{name} failed: {type(error.cause).__name__}: {error.cause}")
            except RayError as error:  # its process or node died, or never started
                causes.append(f"{name} died: {' '.join(str(error).split())}")
        return "; ".join(causes or witnesses)


class EngineActor:
    """One engine behind Ray. The constructor returns at once; the model loads on the step thread."""

    def __init__(
        self, config: EngineConfig, model_name: str, place: Place | None = None, tiers: tuple[SlaTier, ...] = ()
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._model_name = model_name
        self._place = place or Place()
        self._followers: Followers | None = None
        self._init_method = _free_address() if config.world_size > 1 and not self._place.dp_rank else ""
        self._engine: Future[Engine] = Future()
        self._metrics: EngineMetrics | None = None
        self._line: Line | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._replica = ""
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

    async def init_method(self) -> str:
        """Where the ranks of the group meet; the group's first leader knows."""
        return self._init_method

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
        speeds, rooms = engine.outlook()
        return EngineHealth(
            alive=True,
            ready=True,
            seconds_since_last_step=waited,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_free_kv_blocks=engine.num_free_kv_blocks,
            speeds=speeds,
            rooms=rooms,
        )

    async def advise(self, scheduler: Any, replica: str) -> None:
        """The fleet's scheduler can be reached by this handle now, and this engine is `replica` to people.

        Called again and again, since both may change. Nothing happens where nothing is scheduled.
        """
        await self._loaded()
        self._replica = replica
        if self._line is not None:
            self._line.connect(scheduler)
            if self._reporting is None or self._reporting.done():  # it ends only by a bug, which must not end advice
                self._reporting = asyncio.create_task(self._line.run())

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
            shard = Shard.load(self._config, self._join())
            engine = make_engine(self._config, shard, self._tiers)
            self._metrics = EngineMetrics(
                self._config.num_kv_blocks,
                engine.max_drafts,
                [tier.name for tier in self._tiers] or [DEFAULT_TIER],
                lambda: shard.expert_load,
            )
            self._line = self._line_of(engine)
            with self._work:
                if not self._reason:
                    self._engine.set_result(engine)
            while not self._reason:
                with self._work:
                    self._work.wait_for(lambda: engine.has_work, shard.idle_seconds)
                result = engine.step()
                self._last_step = time.monotonic()
                self._emit(result.events)
                if result.num_tokens or result.events:  # not a step that only others of the group waited for
                    self._metrics.observe_step(result)
                    if self._line is not None:
                        self._line.observe(result)
        except Exception as error:  # the boundary of the thread: whatever it was, the engine is dead and must say so
            logger.exception("the engine of %s died", self._model_name)
            blamed = self._followers.diagnose() if self._followers and isinstance(error, GroupError) else ""
            self._die(blamed or f"{type(error).__name__}: {error}")

    def _line_of(self, engine: Engine) -> Line | None:
        """None where nothing is scheduled."""
        if engine.curve is None:
            return None
        name = ray.get_runtime_context().get_actor_id()

        def introduce() -> Member:
            assert engine.curve is not None
            return Member(
                engine=name,
                replica=self._replica,
                group=self._place.group,
                rank=self._place.dp_rank,
                group_size=self._config.data_parallel_size,
                max_num_seqs=self._config.max_num_seqs,
                tiers=engine.tiers,
                curve=engine.curve.snapshot,
                temperatures=engine.temperatures,
                evidence=engine.take_evidence(),
            )

        return Line(name, engine, introduce, settles=self._config.data_parallel_size == 1)

    def _join(self) -> Mesh:
        """Start the followers, and meet them and the other replicas of the group."""
        config, place = self._config, self._place
        if config.world_size == 1:
            return Mesh(config, device=place.device)
        init_method = self._init_method or _published(place.group, config.start_timeout_s)
        self._followers = Followers(config, place, init_method)
        if len(self._followers):
            threading.Thread(target=self._watch, args=(self._followers,), daemon=True).start()
        return _join(config, place.dp_rank * config.tensor_parallel_size, init_method, place.device)

    def _watch(self, followers: Followers) -> None:
        """A thread, because the step thread may be waiting for the very rank that is lost, or for work."""
        followers.wait()
        self._die(followers.diagnose())

    def _die(self, reason: str) -> None:
        """Once; the first reason stays."""
        with self._work:
            if self._reason:
                return
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


def make_engine(config: EngineConfig, shard: Shard, tiers: tuple[SlaTier, ...] = ()) -> Engine:
    """The engine that the settings describe, its cost curve measured where one is needed. ValueError says what not."""
    scheduled = config.speculation == "scheduled" and shard.drafter is not None
    return Engine(config, shard, cost_curve(config, shard) if scheduled else None, tiers=tiers)


def _join(config: EngineConfig, rank: int, init_method: str, device: str) -> Mesh:
    return Mesh.join(
        config,
        rank,
        init_method=init_method,
        timeout_seconds=config.collective_timeout_s,
        start_timeout_seconds=config.start_timeout_s,
        device=device,
    )


def _free_address() -> str:
    """Where other nodes can reach this process. Should somebody else take the port first, the engine starts again."""
    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"tcp://{address}:{probe.getsockname()[1]}"


def _published(group: str, timeout_seconds: float) -> str:
    """What the first leader of a group said. GroupError when it doesn't come."""
    deadline = time.monotonic() + timeout_seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            address: str = ray.get(ray.get_actor(group, NAMESPACE).init_method.remote(), timeout=left)
            return address
        except ValueError:  # not there yet
            time.sleep(0.1)
        except RayError as error:
            raise GroupError(f"the first replica of the group is lost: {' '.join(str(error).split())}") from error
    raise GroupError(f"the first replica of the group did not start within start_timeout_s = {timeout_seconds:g}")


def start_engine(
    config: EngineConfig, model_name: str, place: Place | None = None, tiers: tuple[SlaTier, ...] = ()
) -> Any:
    """Start an engine's leader and return its handle; it reports ready when the model is loaded on every rank.

    It takes no CPU of Ray's count: what it needs is reserved by its replica, or, on a laptop, shared with HTTP.
    """
    place = place or Place()
    options = place.options(0, config)
    if place.group and not place.dp_rank:
        options |= {"name": place.group, "namespace": NAMESPACE}
    actor = ray.remote(EngineActor).options(max_concurrency=MAX_CONCURRENT_CALLS, **options)
    return actor.remote(config, model_name, place, tiers)
