"""Leases from outside: what a step makes of them, and what it must not."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError
from test_metrics import STEP
from test_scheduling import VOCAB, curve
from tiny_engine import Outputs, make_engine, prompts, random_drafter, request

from cluster.budget import encode_survival
from cluster.calibration import Evidence
from cluster.confidence_scheduler import IDLE_SECONDS, SETTLED_SECONDS, ConfidenceScheduler, Line, Rhythm
from cluster.engine import Engine
from cluster.leases import Offer, Offers
from cluster.local_scheduler import LOOK_EVERY_STEPS
from cluster.messages import BudgetLease, LoadReport
from cluster.roster import Answer, Experience, Member

MEMBER = Member(engine="e", replica="r", group="", rank=0, group_size=1, max_num_seqs=8, tiers=(), curve=curve(0.01))


def report(step: int = 0, num_requests: int = 2, prefill: int = 0) -> LoadReport:
    return LoadReport(
        step=step,
        survival=encode_survival([[0.5, 0.25]] * num_requests, 2),
        tiers=bytes(num_requests),
        num_prefill_tokens=prefill,
        context_tokens=10,
        num_waiting=0,
        drafted=True,
        request_ids=tuple(f"r{i}" for i in range(num_requests)),
    )


def offer(step: int = 0, asked: float = 0.0, cap: int = 3, **lease: Any) -> Offer:
    return Offer.of(BudgetLease(cap=cap, **lease), report(step), asked)


def test_the_newest_offer_that_is_old_enough_counts() -> None:
    offers = Offers()
    assert offers.current(9, 0.0) is None
    for step in (5, 6, 7):
        offers.add(offer(step, cap=step))
    for newest, expected in ((4, None), (5, 5), (6, 6), (7, 7), (99, 7)):
        current = offers.current(newest, 0.5)
        assert (current and current.lease.cap) == expected


def test_an_offer_fits_steps_with_prompts_or_without_as_it_was_made() -> None:
    """Beside prompts a draft costs less, so a budget for one kind of step is none for the other."""
    alone, beside = (Offer.of(BudgetLease(cap=3), report(prefill=prefill), 0.0) for prefill in (0, 40))
    who = ("r0", "r1"), ("r0",)
    assert alone.fits(*who, 0) and not alone.fits(*who, 7)
    assert beside.fits(*who, 7) and not beside.fits(*who, 0)
    assert not alone.fits(("r0",), ("r0",), 0) and not alone.fits(("r0", "r1"), ("r0", "r2"), 0)


def test_an_answer_to_the_same_report_replaces_the_first_and_pushes_out_no_older_one() -> None:
    offers = Offers()
    for asked, step in enumerate((5, 6, 7, 7, 7, 7)):
        offers.add(offer(step, asked=0.1 * asked, cap=step))
    assert offers.current(5, 0.6) is not None
    current = offers.current(7, 0.6)
    assert current is not None
    assert current.asked_seconds == 0.5


def test_time_runs_from_the_question_on_the_engines_own_clock() -> None:
    offers = Offers()
    offers.add(offer(asked=100.0, duration_seconds=1.0))
    assert offers.current(0, 100.9) is not None
    assert offers.current(0, 101.0) is None


def test_a_younger_offer_that_has_ended_is_not_outlived_by_an_older_one() -> None:
    offers = Offers()
    offers.add(offer(1, asked=0.0, duration_seconds=9.0))
    offers.add(offer(2, asked=0.0, duration_seconds=1.0))
    assert offers.current(2, 5.0) is None


def test_a_rank_fills_up_to_the_rows_of_its_group() -> None:
    shared = Offer.of(BudgetLease(cap=3, padded_tokens=20), report(num_requests=4, prefill=6), 0.0)
    assert [shared.share(running).cap for running in (4, 6, 2, 14, 40)] == [10, 8, 12, 0, 0]


def times_of_reports(rhythm: Rhythm, lease: BudgetLease | None, start: int, end: int) -> list[int]:
    """Milliseconds at which an engine reports that steps and looks every 7 ms, if every answer is this lease."""
    times = []
    for now in range(start, end, 7):
        newest = report(step=now)
        if rhythm.is_due(newest, now / 1000):
            times.append(now)
            rhythm.asked(newest, now / 1000)
            rhythm.answered(lease)
    return times


def test_reports_become_rare_while_the_lease_stays_and_come_at_once_for_other_requests() -> None:
    rhythm = Rhythm(settles=True)
    settled = times_of_reports(rhythm, BudgetLease(cap=3, price=0.1), 0, 2000)
    assert [b - a for a, b in itertools.pairwise(settled)][:5] == [28, 56, 105, 203, 203]
    assert rhythm.is_due(report(step=3000, num_requests=3), settled[-1] / 1000 + 0.01)
    assert not rhythm.is_due(report(step=3000), settled[-1] / 1000 + 0.01)
    fewer = replace(report(step=3000), survival=encode_survival([[0.5, 0.25], []], 2))
    assert rhythm.is_due(fewer, settled[-1] / 1000 + 0.01), "other requests are drafted for"
    changed = times_of_reports(rhythm, BudgetLease(cap=4), 2002, 2500)
    assert changed[1] - changed[0] == 28, "another cap is news"


@pytest.mark.parametrize(
    ("settles", "lease"),
    [(True, None), (True, BudgetLease(cap=3, floors=(0.0, 1.5))), (False, BudgetLease(cap=0))],
    ids=["no lease", "a promised speed", "a lockstep group"],
)
def test_who_has_news_in_every_step_reports_often(settles: bool, lease: BudgetLease | None) -> None:
    assert len(times_of_reports(Rhythm(settles), lease, 0, 1000)) == 36


def test_a_line_reports_less_often_while_its_lease_stays() -> None:
    """The engine's end and the real scheduler in one process, on the real clock."""
    asyncio.run(_settle())


async def _settle() -> None:
    scheduler, engine = ConfidenceScheduler(), SteppingEngine()
    line = Line("e", engine, lambda: MEMBER, settles=True)
    line.connect(SimpleNamespace(report=SimpleNamespace(remote=scheduler.report)))
    running = asyncio.create_task(line.run())
    await asyncio.sleep(2.5)
    running.cancel()
    seconds = [asked for _, asked in engine.offers]
    assert len(seconds) > 2, "no lease came"
    assert max(later - earlier for earlier, later in itertools.pairwise(seconds)) >= SETTLED_SECONDS
    assert len(seconds) <= 16, "at REPORT_SECONDS and a round each there would be some 45"


async def _lose_a_report(scheduler: Any, loss: type[BaseException]) -> None:
    """The engine's next introduction follows at once, with what the lost one held."""
    engine, brought = SteppingEngine(), Evidence.none(4)
    line = Line("e", engine, lambda: replace(MEMBER, evidence=brought), settles=True)
    line.connect(SimpleNamespace(report=SimpleNamespace(remote=scheduler)))
    line.observe(STEP)
    with pytest.raises(loss):
        await asyncio.wait_for(line._ask(line._scheduler, report(step=1), 0.0), 0.1)
    assert engine.returned == [brought]


def test_evidence_of_a_report_that_is_lost_is_kept() -> None:
    async def freeze(*_: Any) -> None:
        await asyncio.sleep(60)

    async def die(*_: Any) -> None:
        raise RayError

    asyncio.run(_lose_a_report(freeze, TimeoutError))
    asyncio.run(_lose_a_report(die, RayError))


def test_an_idle_engine_still_says_who_decided_its_last_step() -> None:
    async def told() -> list[str]:
        modes = []

        async def keep(_: str, __: LoadReport, experience: Experience, *___: Any) -> Answer:
            modes.append(experience.mode)
            return Answer(known=True)

        line = Line("e", SteppingEngine(), lambda: None, settles=True)  # type: ignore[arg-type, return-value]
        line.observe(STEP)
        for step in (1, 2):
            await line._ask(SimpleNamespace(report=SimpleNamespace(remote=keep)), report(step=step), 0.0)
        return modes

    assert asyncio.run(told()) == ["local", "local"]


class SteppingEngine:
    """A report every time that somebody looks."""

    def __init__(self) -> None:
        self.clock = time.monotonic
        self.offers: list[tuple[BudgetLease, float]] = []
        self.returned: list[Evidence] = []
        self._steps = itertools.count()

    @property
    def last_report(self) -> LoadReport:
        return report(step=next(self._steps))

    def offer(self, lease: BudgetLease, report: LoadReport, asked_seconds: float) -> None:
        self.offers.append((lease, asked_seconds))

    def return_evidence(self, evidence: Evidence) -> None:
        self.returned.append(evidence)


def test_an_engine_that_stands_still_is_heard_now_and_then() -> None:
    rhythm, still = Rhythm(settles=True), report(step=7)
    rhythm.asked(still, 1.0)
    assert not rhythm.is_due(still, 1.0 + IDLE_SECONDS - 0.01)
    assert rhythm.is_due(still, 1.0 + IDLE_SECONDS)


def scheduled(folder: Path, cost: Any, **settings: Any) -> tuple[Engine, list[float]]:
    """An engine whose clock stands where the returned list says; its curve learns nothing."""
    now = [0.0]
    engine = make_engine(folder, random_drafter(VOCAB), cost, speculation="scheduled", **settings)
    engine._scheduler.refresh = lambda result: None  # type: ignore[method-assign]
    engine.clock = lambda: now[0]
    return engine, now


def running(engine: Engine, count: int = 8, max_tokens: int = 60, warm: int = 8) -> None:
    for prompt in prompts(count):
        engine.add(request(prompt, max_tokens=max_tokens, temperature=1.0))
    for _ in range(warm):
        engine.step()


def test_a_lease_is_used_two_steps_on_and_until_it_ends(tiny: tuple[Path, Any]) -> None:
    engine, now = scheduled(tiny[0], curve(0.1))
    running(engine)
    result = engine.step()
    engine.offer(BudgetLease(cap=5, duration_seconds=1.0), result.report, asked_seconds=0.0)
    following = [engine.step() for _ in range(10)]
    first = next(step for step in following if step.mode == "lease")
    assert first.step >= result.step + 2
    assert first.cap == 5
    assert sum(r.num_verified for r in first.rounds) == 5
    assert first.lease_age_seconds == 0.0
    assert [s.mode for s in following[following.index(first) :]] == ["lease"] * (10 - following.index(first))
    now[0] = 0.99
    result = engine.step()
    assert (result.mode, result.lease_age_seconds) == ("lease", 0.99)
    now[0] = 1.0
    result = engine.step()
    assert (result.mode, result.lease_age_seconds) == ("local", None), "at once, not at the next search"


@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_a_lease_from_a_report_of_the_last_step_waits(tiny: tuple[Path, Any], data_parallel_size: int) -> None:
    """The engine asks after every step and is answered at once: what it uses is still two steps old."""
    engine, _ = scheduled(tiny[0], curve(0.1), data_parallel_size=data_parallel_size)
    running(engine)
    used = []
    for _ in range(14):
        result = engine.step()
        used.append((result.step, result.cap, result.mode))
        assert 0 < result.step < 32, "so many drafts fit, so the cap names the step whose report was answered"
        rows = 8 + result.step if data_parallel_size > 1 else 0
        engine.offer(BudgetLease(cap=result.step, padded_tokens=rows), result.report, asked_seconds=0.0)
    leased = [(step, cap) for step, cap, mode in used if mode == "lease"]
    assert len(leased) > 4
    assert all(answered <= step - 2 for step, answered in leased)
    if data_parallel_size > 1:
        assert all(answered == step - 2 for step, answered in leased), "ranks follow at once, and together"


def test_a_lease_for_other_requests_is_none(tiny: tuple[Path, Any]) -> None:
    engine, _ = scheduled(tiny[0], curve(0.1))
    running(engine, max_tokens=100)
    result = engine.step()
    engine.offer(BudgetLease(cap=5, duration_seconds=99.0), result.report, asked_seconds=0.0)
    modes = [engine.step().mode for _ in range(6)]
    assert modes[-1] == "lease"
    engine.abort(result.report.request_ids[3])
    assert {engine.step().mode for _ in range(6)} == {"local"}, "as good as with nobody's advice"


def test_low_load_needs_no_lease(tiny: tuple[Path, Any]) -> None:
    engine, _ = scheduled(tiny[0], curve(1e-3))
    running(engine, count=2)
    engine.offer(BudgetLease(cap=0, duration_seconds=99.0), engine.step().report, asked_seconds=0.0)
    assert {engine.step().mode for _ in range(8)} == {"bypass"}


@pytest.mark.parametrize("speculation", ["scheduled", "fixed"])
def test_only_scheduled_engines_obey(tiny: tuple[Path, Any], speculation: str) -> None:
    engine = make_engine(tiny[0], random_drafter(VOCAB), curve(0.1), speculation=speculation)
    engine._scheduler.refresh = lambda result: None  # type: ignore[method-assign]
    running(engine)
    lease = BudgetLease(cap=0, duration_seconds=1e9)
    engine.offer(lease, engine.step().report, engine.clock())
    caps = {engine.step().cap for _ in range(8)}
    assert (0 in caps) == (speculation == "scheduled")


def test_a_lease_that_stops_drafting_is_probed(tiny: tuple[Path, Any]) -> None:
    engine, _ = scheduled(tiny[0], curve(0.1))
    running(engine, count=4, max_tokens=110)
    engine.offer(BudgetLease(cap=0, duration_seconds=1e9), engine.step().report, asked_seconds=0.0)
    steps = [engine.step() for _ in range(80)][4:]
    drafted = [number for number, step in enumerate(steps) if step.report.drafted]
    assert len(drafted) == 2 and drafted[1] - drafted[0] == LOOK_EVERY_STEPS + 1, "by its own curve drafting comes near"
    assert {step.mode for step in steps} == {"lease"}


def test_random_leases_change_no_greedy_or_seeded_text(tiny: tuple[Path, Any]) -> None:
    """Every cap from 0 to more than there are slots, any price, a fresh one for each step."""
    asked = [
        request(p, f"r{i}", max_tokens=30, **({} if i % 2 else {"temperature": 1.0, "seed": i}))
        for i, p in enumerate(prompts(8))
    ]
    texts = []
    for adversarial in (False, True):
        engine, _ = scheduled(tiny[0], curve(0.1))
        outputs, dice = Outputs(), random.Random(5)
        for each in asked:
            engine.add(replace(each))
        while engine.has_work:
            result = engine.step()
            outputs.observe(result)
            if adversarial:
                lease = BudgetLease(cap=dice.choice([0, 1, 3, 9, 99]), price=dice.choice([0.0, 0.3, 0.9]))
                engine.offer(lease, result.report, asked_seconds=0.0)
        texts.append(outputs.tokens)
        modes = Counter(step.mode for step in outputs.steps)
        assert (modes["lease"] > 5) == adversarial, modes
    assert texts[0] == texts[1]
