"""What one more request would get, against what `allocate` would really give it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_scheduling import HERE, curve

from cluster import fleet
from cluster.budget import LEVELS, PACE, decode_seconds, encode_survival, slot_values, survival_levels
from cluster.fleet import Group
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.speeds import MARGIN, expected_rate, rooms, speeds
from cluster.sps import CostCurve, DraftSample, VerifySample

TIERS = (SlaTier("standard"), SlaTier("fast", min_tokens_per_second=1.2, weight=16.0))
MANY = 1000
PACE_IN_ALL = bytes([round(PACE * MARGIN)])


def load(rng: np.random.Generator, num_requests: int, num_waiting: int = 0, tiers: bool = True) -> LoadReport:
    def row() -> list[float]:
        return np.cumprod(rng.uniform(0.3, 0.98, 5)).tolist()

    return LoadReport(
        step=0,
        survival=encode_survival([row() for _ in range(num_requests)], 5),
        tiers=bytes(rng.integers(0, 2, num_requests).tolist()) if tiers else bytes(num_requests),
        num_prefill_tokens=0,
        context_tokens=100 * num_requests,
        num_waiting=num_waiting,
        drafted=True,
        newcomer=encode_survival([row()], 5),
        paces=PACE_IN_ALL * num_requests,
    )


def real_speed(report: LoadReport, cost: CostCurve, tier: int) -> float:
    """The newcomer's own tokens per second after `allocate` with it, ADMIT's ranking included."""
    joined = replace(
        report,
        survival=report.survival + report.newcomer,
        tiers=report.tiers + bytes([tier]),
        paces=report.paces + PACE_IN_ALL,
        context_tokens=report.context_tokens * (len(report.tiers) + 1) // max(len(report.tiers), 1),
    )
    [[lease]] = fleet.allocate([Group([joined], cost)], TIERS, min_gain=0.0)
    survival = survival_levels(joined) / LEVELS
    running = len(survival)
    seconds = decode_seconds(cost, running, 0, lease.cap, joined.context_tokens) + (
        cost.draft_seconds(running, 1) if lease.cap else 0.0
    )
    owners = np.frombuffer(joined.tiers, np.uint8)
    needs = np.array([TIERS[t].min_tokens_per_second for t in owners]) * MARGIN * seconds
    values = slot_values(survival, needs, np.array([TIERS[t].weight for t in owners]))
    chosen = np.zeros(values.size, bool)
    chosen[np.argsort(-values.ravel(), kind="stable")[: lease.cap]] = True
    return float((1 + survival[-1][chosen.reshape(values.shape)[-1]].sum()) / seconds)


@pytest.mark.parametrize("dear", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("num_requests", [0, 1, 4, 16, 40])
def test_it_is_about_what_allocate_would_give(num_requests: int, dear: float) -> None:
    cost, errors = curve(dear), []
    for seed in range(12):
        report = load(np.random.default_rng(seed), num_requests)
        [[lease]] = fleet.allocate([Group([report], cost)], TIERS, min_gain=0.0)
        promised = speeds(report, lease, cost, TIERS, MANY)
        errors += [promised[tier] / real_speed(report, cost, tier) - 1 for tier in (0, 1)]
    assert np.median(np.abs(errors)) < 0.12
    assert np.quantile(np.abs(errors), 0.9) < 0.35


def test_more_load_is_slower_and_whoever_waits_counts() -> None:
    cost, found = curve(0.1), []
    for num_requests, num_waiting in ((0, 0), (4, 0), (16, 0), (16, 8), (40, 0)):
        report = load(np.random.default_rng(3), num_requests, num_waiting)
        [[lease]] = fleet.allocate([Group([report], cost)], TIERS)
        found.append(speeds(report, lease, cost, TIERS, MANY)[0])
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("last", [BudgetLease(cap=1, depth=2), BudgetLease(cap=0), BudgetLease(cap=9, depth=5)])
def test_an_idle_engine_would_draft_what_is_best_whatever_its_last_lease_was(last: BudgetLease) -> None:
    samples = [VerifySample(n, 100, 0.028 + 0.0005 * n) for n in (1, 8, 64)]
    cost = CostCurve.fit(samples, [DraftSample(1, 1, 0.005), DraftSample(1, 5, 0.025)], HERE)
    idle = load(np.random.default_rng(3), 0)
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.frombuffer(idle.newcomer, np.uint8) / LEVELS)])
    seconds = cost.step_seconds(np.arange(1, 7), 0) + [0.0, *cost.draft_seconds(1, [2, 3, 4, 5, 5])]
    assert speeds(idle, last, cost, TIERS, MANY) == pytest.approx([(tokens / seconds).max()] * 2)


def test_prompts_keep_newcomers_waiting_where_somebody_runs() -> None:
    cost, busy, idle = curve(0.05), load(np.random.default_rng(3), 2), load(np.random.default_rng(3), 0)
    [[lease]] = fleet.allocate([Group([busy], cost)], TIERS)
    slowed, known = replace(busy, decode_share=0.5), (lease, cost, TIERS, MANY)
    assert speeds(slowed, *known)[0] == pytest.approx(speeds(busy, *known)[0] / 2)
    assert rooms(slowed, *known)[1] < rooms(busy, *known)[1]
    assert speeds(replace(idle, decode_share=0.5), *known) == speeds(idle, *known)


@pytest.mark.parametrize("context_seconds", [0.0, 2e-4])
@pytest.mark.parametrize("num_requests", [0, 1, 2, 8, 24])
def test_as_many_have_room_as_come_before_the_first_that_is_too_slow(num_requests: int, context_seconds: float) -> None:
    samples = [VerifySample(n, c, 1 + 0.1 * n + context_seconds * c) for n in (1, 8, 64) for c in (0, 9000)]
    cost, found = CostCurve.fit(samples, [DraftSample(1, 1, 0.01)], HERE), set()
    for seed in range(6):
        report = replace(load(np.random.default_rng(seed), num_requests), max_draft_tokens=6)
        report = replace(report, paces=bytes([197]) * num_requests)
        [[lease]] = fleet.allocate([Group([report], cost)], TIERS)
        first = speeds(report, lease, cost, TIERS, 64)[0]
        for promised in (0.5 * first, 0.8 * first, 1.1 * first):
            tiers = (TIERS[0], replace(TIERS[1], min_tokens_per_second=promised))
            most = rooms(report, lease, cost, tiers, 64)
            assert most[0] == 64 - num_requests, "nothing is promised: places"
            kept = [
                speeds(replace(report, num_waiting=others), lease, cost, tiers, 64)[1] >= promised
                for others in range(64 - num_requests)
            ]
            assert most[1] == (kept.index(False) if False in kept else len(kept))
            found.add(most[1])
    assert len(found) > 1
    assert rooms(replace(report, num_waiting=60), lease, cost, TIERS, 64)[0] == max(4 - num_requests, 0), "who waits"


def test_a_full_engine_gets_no_fuller() -> None:
    cost, report = curve(0.1), load(np.random.default_rng(3), 16, num_waiting=50)
    [[lease]] = fleet.allocate([Group([report], cost)], TIERS)
    full = speeds(report, lease, cost, TIERS, 16)
    assert full == speeds(replace(report, num_waiting=0), lease, cost, TIERS, 16)
    assert full[0] > speeds(report, lease, cost, TIERS, MANY)[0]


def test_in_a_lockstep_group_rows_below_the_largest_rank_are_free_and_above_it_dear() -> None:
    cost = curve(0.1)
    small, large = (load(np.random.default_rng(s), n) for s, n in ((1, 2), (2, 30)))
    [[of_small, of_large]] = fleet.allocate([Group([small, large], cost)], TIERS)
    for report, lease in ((small, of_small), (large, of_large)):
        found = speeds(report, lease, cost, TIERS, MANY)
        step = float(cost.step_seconds(lease.padded_tokens, large.context_tokens))
        assert all(1 / (2 * step) < speed < 6 / step for speed in found), "no faster than steps of the whole group"
    [[alone]] = fleet.allocate([Group([small], cost)], TIERS)
    assert speeds(small, alone, cost, TIERS, MANY)[0] > speeds(small, of_small, cost, TIERS, MANY)[0]


def test_a_promise_makes_faster_where_drafts_are_short() -> None:
    cost, report = curve(0.05), load(np.random.default_rng(1), 24)
    [[lease]] = fleet.allocate([Group([report], cost)], TIERS)
    standard, fast = speeds(report, lease, cost, TIERS, MANY)
    assert fast > standard


def test_without_tiers_one_number_and_without_a_budget_plain_decoding() -> None:
    cost, report = curve(0.1), load(np.random.default_rng(5), 8)
    [plain] = speeds(report, BudgetLease(cap=0), cost, (), MANY)
    assert plain == pytest.approx(1 / float(cost.step_seconds(9, 900)))


def test_the_expected_rate_is_the_one_that_allocate_maximises() -> None:
    cost, report = curve(0.1), load(np.random.default_rng(5), 12, tiers=False)
    [[lease]] = fleet.allocate([Group([report], cost)], ())
    rates = [expected_rate(report, BudgetLease(cap=cap), cost) for cap in range(61)]
    assert lease.cap == int(np.argmax(rates))
    assert expected_rate(report, BudgetLease(cap=10**6), cost) == rates[60]
