"""The fleet's scheduler: an actor that collects reports, asks `fleet.allocate`, and answers with leases. No arithmetic.

It keeps nothing that the next reports don't bring back, so it may die at any time; engines then decide for themselves
by the same arithmetic. Both ends of the line are here: `ConfidenceScheduler`, which Serve keeps alive beside the
replicas, and `Line`, an engine's end of it, which lives on the event loop of the engine's actor and never on its step
thread.

The answer to a report waits for the next round, in which all that was reported meanwhile is answered at once: one
search for the fleet, however many engines there are, and an engine's next report comes after its answer, so a slow
scheduler is asked less.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayError

from cluster.accounts import FleetAccount, account
from cluster.calibration import Evidence
from cluster.leases import drafting
from cluster.messages import BudgetLease, LoadReport, StepResult
from cluster.metrics import SchedulerMetrics
from cluster.roster import Answer, Experience, Member, Roster

logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.025
"""Reports of so long are answered together."""
REPORT_SECONDS, SETTLED_SECONDS = 0.025, 0.2
"""Least time from a report to the next one, at first and at most. A report keeps the engine's process from its step for
some milliseconds, so the time doubles while the answer's cap stays; it ends when others run or are drafted for, and
when prompts come or end."""
IDLE_SECONDS = 0.5
"""An engine that has no news says so this often, to be known."""
INTRODUCE_SECONDS = 5.0
PATIENCE_SECONDS = 2.0
"""Longest wait for an answer. A lease that comes later would have ended."""


class ConfidenceScheduler:
    """The actor. Its methods never wait for an engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_seconds = clock()
        self._roster = Roster()
        self._metrics = SchedulerMetrics()
        self._round: asyncio.Task[None] | None = None

    async def report(
        self, engine: str, report: LoadReport, experience: Experience, member: Member | None = None
    ) -> Answer:
        """`engine` did a step; the answer comes with the next round. `member` introduces it, first and now and then."""
        now = self._clock()
        if member is not None:
            self._roster.introduce(member, now)
        if not self._roster.note(engine, report, experience, now):
            return Answer(known=False)
        self._metrics.observe_report()
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._answer())
        await asyncio.shield(self._round)
        return Answer(known=True, lease=self._roster.lease(engine))

    async def explain(self) -> FleetAccount:
        """Who has which lease, and why."""
        now = self._clock()
        self._roster.forget_silent(now)
        return account(self._roster, now, now - self._started_seconds)

    async def metrics_text(self) -> str:
        """The scheduler's registry as exposition text."""
        self._roster.forget_silent(self._clock())
        self._metrics.observe_fleet(len(self._roster.entries))
        return self._metrics.text()

    async def _answer(self) -> None:
        """One round."""
        await asyncio.sleep(ROUND_SECONDS)
        started = self._clock()
        self._roster.forget_silent(started)
        num_leases = self._roster.allocate()
        self._metrics.observe_round(num_leases, self._clock() - started)


class Reporting(Protocol):
    """What the line wants of an engine. Named here, because the scheduler's own process has no use for a real one."""

    clock: Callable[[], float]

    @property
    def last_report(self) -> LoadReport: ...

    def offer(self, lease: BudgetLease, report: LoadReport, asked_seconds: float) -> None: ...

    def return_evidence(self, evidence: Evidence) -> None: ...


class Rhythm:
    """When an engine's next report is due, on a clock that is passed in."""

    def __init__(self, settles: bool) -> None:
        """settles: False for a rank of a lockstep group, which shares steps with others whose news it can't know."""
        self._settles = settles
        self._asked: LoadReport | None = None
        self._asked_seconds = -math.inf
        self._lease: BudgetLease | None = None
        self._pause_seconds = REPORT_SECONDS

    def is_due(self, report: LoadReport, now: float) -> bool:
        """Whether `report`, the engine's last, is worth telling now."""
        waited = now - self._asked_seconds
        if self._asked is None or report.step == self._asked.step:
            return waited >= IDLE_SECONDS
        return waited >= self._pause_seconds or _audience(report) != _audience(self._asked)

    def asked(self, report: LoadReport, now: float) -> None:
        self._asked, self._asked_seconds = report, now

    def answered(self, lease: BudgetLease | None) -> None:
        """None: no lease for now, or no answer."""
        before, self._lease = self._lease, lease
        same = lease is not None and before is not None and lease.cap == before.cap
        # Who is behind a promised speed changes with every step.
        settled = self._settles and same and not any(lease.floors if lease else ())
        self._pause_seconds = min(2 * self._pause_seconds, SETTLED_SECONDS) if settled else REPORT_SECONDS


def _audience(report: LoadReport) -> tuple[tuple[str, ...], frozenset[str], bool]:
    """What a lease is made for: all that run, those with drafts to verify, and whether prompts are beside them."""
    return report.request_ids, drafting(report), report.num_prefill_tokens > 0


class Line:
    """An engine's end. `observe` belongs to the step thread and only leaves a note; all else runs on the event loop."""

    def __init__(self, name: str, engine: Reporting, introduce: Callable[[], Member], settles: bool) -> None:
        """`introduce` says who the engine, which calls itself `name`, is now. `settles`: of Rhythm."""
        self._name = name
        self._engine = engine
        self._introduce = introduce
        self._scheduler: Any = None
        self._introduced_seconds = -math.inf
        self._rhythm = Rhythm(settles)
        self._lock = threading.Lock()
        self._experience = Experience()

    def observe(self, result: StepResult) -> None:
        """A step was done."""
        num_tokens = sum(1 + verify_round.num_accepted for verify_round in result.rounds)
        prompts = result.predicted.prompts_seconds if result.predicted else 0.0
        with self._lock:
            self._experience = self._experience.and_then(result.mode, num_tokens, max(result.seconds - prompts, 0.0))

    def connect(self, scheduler: Any) -> None:
        """Where the scheduler is now. Told again and again, since a new one has another handle."""
        self._scheduler = scheduler

    async def run(self) -> None:
        """Report and take leases until the process ends. Whatever becomes of the scheduler, only this waits for it."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            scheduler, now = self._scheduler, self._engine.clock()
            report = self._engine.last_report
            if scheduler is None or not self._rhythm.is_due(report, now):
                continue
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._ask(scheduler, report, now)
            except RayActorError:  # dead or out of reach; its successor will be told to us
                self._rhythm.answered(None)
                if self._scheduler is scheduler:
                    self._scheduler = None
            except (RayError, TimeoutError) as error:
                self._rhythm.answered(None)
                logger.warning("the fleet's scheduler gives no answer: %s", error or "it takes too long")

    async def _ask(self, scheduler: Any, report: LoadReport, now: float) -> None:
        member = None
        if now - self._introduced_seconds >= INTRODUCE_SECONDS:
            member, self._introduced_seconds = self._introduce(), now
        with self._lock:
            experience, self._experience = self._experience, Experience(self._experience.mode)
        self._rhythm.asked(report, now)
        sent = replace(report, request_ids=())
        try:
            answer: Answer = await scheduler.report.remote(self._name, sent, experience, member)
        except BaseException:  # being cancelled, when it takes too long, as well
            if member is not None and member.evidence is not None:
                self._engine.return_evidence(member.evidence)
            raise
        self._rhythm.answered(answer.lease)
        if not answer.known:
            self._introduced_seconds = -math.inf
        elif answer.lease is not None:
            self._engine.offer(answer.lease, report, now)
