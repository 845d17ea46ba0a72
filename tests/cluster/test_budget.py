"""The budget: the global optimum of a jagged curve, admitted by rank, causal by construction."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.budget import (
    LEVELS,
    MIN_GAIN,
    admit,
    algorithm_1,
    depth,
    encode_survival,
    everything_admitted,
    slot_values,
    survival_levels,
)
from cluster.fleet import Group, allocate
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sps import CostCurve, DraftSample, Provenance, Surface, VerifySample

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
HERE = Provenance(model="m", dtype="bfloat16", device="cpu", num_threads=2, versions="", date="")


def sent(confidences: list[float]) -> tuple[float, ...]:
    """Survivals as a report holds them: 255ths, and at least one of a slot that may be verified."""
    return tuple((np.maximum(np.rint(np.cumprod(confidences) * LEVELS), 1) / LEVELS).tolist())


survivals = st.lists(st.floats(0.1, 1), max_size=4).map(sent)
batches = st.lists(survivals, min_size=1, max_size=4)


def curve_of(milliseconds: list[float], draft_ms: float = 0.0) -> CostCurve:
    """One entry per batch size from 1 on."""
    drafts = [DraftSample(1, 1, draft_ms / 1000)] if draft_ms else []
    samples = [VerifySample(n + 1, 0, ms / 1000) for n, ms in enumerate(milliseconds)]
    return CostCurve.fit(samples, drafts, HERE)


def report_of(batch: list[tuple[float, ...]], prefill: int = 0, most: int = 2**31) -> LoadReport:
    return LoadReport(
        step=0,
        survival=encode_survival(batch, max(map(len, batch), default=0)),
        tiers=bytes(len(batch)),
        num_prefill_tokens=prefill,
        context_tokens=0,
        num_waiting=0,
        drafted=True,
        max_draft_tokens=most,
    )


def lease_for(
    report: LoadReport, curve: CostCurve, previous: BudgetLease | None = None, min_gain: float = MIN_GAIN
) -> BudgetLease:
    """What one engine alone gets."""
    [[lease]] = allocate([Group([report], curve, [previous] if previous else [])], min_gain=min_gain)
    return lease


@st.composite
def jagged_curves(draw: st.DrawFn) -> CostCurve:
    """Stairs of random widths and heights, and a draft that may cost a lot or nothing."""
    steps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 1.0, 5.0, 30.0]), min_size=30, max_size=30))
    steps[-1] += 10.0  # never flat
    return curve_of((20.0 + np.cumsum(steps)).tolist(), draw(st.sampled_from([0.0, 2.0, 15.0])))


def rate_of(batch: list[tuple[float, ...]], lengths: tuple[int, ...], curve: CostCurve, prefill: int) -> float:
    """Expected tokens per second of one choice of lengths, from the definition."""
    expected = len(batch) + sum(sum(slots[:n]) for slots, n in zip(batch, lengths, strict=True))
    seconds = float(curve.step_seconds(len(batch) + prefill + sum(lengths), 0))
    seconds -= float(
        curve.step_seconds(len(batch) + prefill, 0) - curve.step_seconds(len(batch), 0)
    )  # the prompts' own
    return expected / (seconds + (curve.draft_seconds(sum(map(bool, batch)), max(lengths)) if sum(lengths) else 0.0))


@UNTIMED
@given(batches, jagged_curves(), st.integers(0, 8))
def test_allocate_and_admit_reach_the_brute_force_optimum(
    batch: list[tuple[float, ...]], curve: CostCurve, prefill: int
) -> None:
    choices = product(*[range(len(slots) + 1) for slots in batch])
    best = max(rate_of(batch, lengths, curve, prefill) for lengths in choices)
    lease = lease_for(report_of(batch, prefill), curve, min_gain=0.0)
    padded = [[*slots, *[0.0] * (4 - len(slots))] for slots in batch]
    lengths = admit(padded, [len(slots) for slots in batch], lease)
    assert rate_of(batch, tuple(lengths), curve, prefill) == pytest.approx(best, rel=1e-9)


@UNTIMED
@given(batches, jagged_curves(), st.integers(0, 12), st.integers(0, 12))
def test_a_lease_respects_its_limits_and_is_kept_unless_much_is_gained(
    batch: list[tuple[float, ...]], curve: CostCurve, most: int, before: int
) -> None:
    report = report_of(batch, most=most)
    lease = lease_for(report, curve, BudgetLease(cap=before, epoch=6))
    slots = sum(map(len, batch))
    assert 0 <= lease.cap <= min(most, slots) and lease.epoch == 7 and lease.price >= 0
    again = lease_for(report, curve, lease)
    assert again.cap == lease.cap  # the same report never moves it twice
    if lease.cap != min(before, most, slots):
        ranked = sorted((a for request in batch for a in request), reverse=True)

        def rate(cap: int) -> float:
            draft = curve.draft_seconds(sum(map(bool, batch)), 1) if cap else 0.0
            return (len(batch) + sum(ranked[:cap])) / (float(curve.step_seconds(len(batch) + cap, 0)) + draft)

        assert rate(lease.cap) > rate(min(before, most, slots)) * (1 + MIN_GAIN) * (1 - 1e-9)


def test_noise_in_the_survivals_does_not_make_the_batch_size_flap() -> None:
    curve = curve_of([20.0 + 0.5 * n for n in range(64)], draft_ms=3.0)
    generator = np.random.default_rng(0)
    caps, free = set(), set()
    lease = None
    for _ in range(50):
        batch = [tuple(np.cumprod(np.clip(0.75 + 0.02 * generator.normal(size=7), 0, 1)).tolist()) for _ in range(4)]
        lease = lease_for(report_of(batch), curve, lease)
        caps.add(lease.cap)
        free.add(lease_for(report_of(batch), curve, min_gain=0.0).cap)
    assert len(caps) <= 2 < len(free)


def test_a_draft_pass_that_costs_more_than_it_returns_is_skipped() -> None:
    batch = [(0.5, 0.3)]
    assert lease_for(report_of(batch), curve_of([20.0, 20.5, 21.0, 22.0])).cap == 2
    assert lease_for(report_of(batch), curve_of([20.0, 20.5, 21.0, 22.0], draft_ms=30.0)).cap == 0


def test_the_search_looks_behind_a_step_that_is_not_worth_it() -> None:
    """The stair from 2 to 3 rows costs more than one draft returns, but once climbed it carries four."""
    curve = curve_of([10.0, 10.0, 15.0, 15.0, 15.0, 15.0, 40.0])
    batch = [(0.95, 0.9, 0.85, 0.8, 0.75, 0.7)]
    assert lease_for(report_of(batch), curve).cap == 5
    lengths = algorithm_1(batch, lambda n: 1 / float(curve.step_seconds(n, 0)))
    assert lengths == [1]  # the early stop can't see it


def test_load_lowers_the_budget_per_request() -> None:
    """Figure 8's shape: full blocks when alone, less and less towards saturation."""
    curve = curve_of([28.0 + 0.2 * min(n, 8) + 1.5 * max(n - 8, 0) for n in range(600)], draft_ms=4.0)
    request = tuple(np.cumprod([0.8] * 7).tolist())
    per_request = [lease_for(report_of([request] * n), curve).cap / n for n in (1, 4, 16, 64)]
    assert per_request[0] >= 6
    assert per_request == sorted(per_request, reverse=True) and per_request[-1] < per_request[0] / 2


@UNTIMED
@given(
    batches,
    jagged_curves(),
    st.integers(0, 8),
    st.integers(0, 16),
    st.sampled_from([0, 64, 96, 255]),
    st.floats(0, 200),
)
def test_the_bypass_never_contradicts_the_search_for_promises(
    batch: list[tuple[float, ...]], curve: CostCurve, prefill: int, most: int, pace: int, speed: float
) -> None:
    tiers = (SlaTier("standard"), SlaTier("fast", speed, weight=8.0))
    owners = bytes(index % 2 for index in range(len(batch)))
    report = replace(report_of(batch, prefill, most), tiers=owners, paces=bytes([pace] * len(batch)))
    if everything_admitted(report, curve, tiers):
        everything = BudgetLease(cap=np.count_nonzero(survival_levels(report)))
        [[lease]] = allocate([Group([report], curve, [everything])], tiers, min_gain=1e-6)
        assert lease.cap == everything.cap, "no other budget is worth more, but for rounding"


@UNTIMED
@given(batches, jagged_curves(), st.integers(0, 8), st.sampled_from([0.0, 0.5, 3.0]))
@example([sent([0.9, 0.13])], curve_of([20.0 + 0.05 * n for n in range(30)], 2.0), 0, 3.0)  # a dear second place
def test_the_bypass_never_contradicts_the_search(
    batch: list[tuple[float, ...]], curve: CostCurve, prefill: int, each_ms: float
) -> None:
    if curve.draft and each_ms:
        rows, slots = curve.draft.rows, np.arange(1, 5)
        longer = curve.draft.seconds + each_ms / 1000 * slots * rows[:, None]
        curve = replace(curve, draft=Surface.of(rows, slots, longer))
    if everything_admitted(report_of(batch, prefill), curve):
        choices = product(*[range(len(slots) + 1) for slots in batch])
        worth_reporting = tuple(sum(value > 0 for value in slots) for slots in batch)
        everything = rate_of(batch, worth_reporting, curve, prefill)
        assert everything >= max(rate_of(batch, lengths, curve, prefill) for lengths in choices) * (1 - 1e-9)


def test_the_bypass_is_not_taken_where_somebody_must_catch_up() -> None:
    """Four could be drafted for, the fifth can't and wants short steps: all are 60 tokens per second, it needs 90."""
    curve = curve_of([5.0 + n for n in range(1, 20)])
    tiers = (SlaTier("standard"), SlaTier("fast", 60.0, weight=16.0))
    on_time = replace(report_of([(1.0,)] * 4 + [()]), tiers=bytes([0, 0, 0, 0, 1]), paces=bytes([64] * 5))
    behind = replace(on_time, paces=bytes([96] * 5))
    [[lease]] = allocate([Group([behind], curve)], tiers, min_gain=0.0)
    assert lease.cap < 4
    assert everything_admitted(on_time, curve, tiers) and not everything_admitted(behind, curve, tiers)


def test_a_long_prompt_does_not_make_drafts_look_cheap() -> None:
    """Its time is spent anyway: what would not be drafted without it is not drafted beside it either."""
    curve = curve_of([20.0 + 2.0 * n for n in range(400)], draft_ms=8.0)
    batch = [(0.4, 0.1)] * 4
    assert lease_for(report_of(batch), curve).cap == 0
    assert lease_for(report_of(batch, prefill=200), curve).cap == 0


def test_the_bypass_is_taken_at_low_load_only() -> None:
    curve = curve_of([28.0 + 0.1 * min(n, 8) + 1.5 * max(n - 8, 0) for n in range(200)], draft_ms=2.0)
    request = tuple(np.cumprod([0.8] * 7).tolist())
    assert everything_admitted(report_of([request]), curve)
    assert not everything_admitted(report_of([request] * 16), curve)


# --- admit ---

blocks = st.integers(1, 6).flatmap(
    lambda r: st.lists(
        st.lists(st.sampled_from([1.0, 0.9, 0.9, 0.5, 0.1, 0.0]), min_size=5, max_size=5), min_size=r, max_size=r
    )
)


@UNTIMED
@given(blocks, st.data())
def test_admit_takes_the_best_slots_and_breaks_ties_by_position_then_request(
    confidences: list[list[float]], data: st.DataObject
) -> None:
    survival = np.cumprod(confidences, axis=1)
    limits = data.draw(st.lists(st.integers(0, 5), min_size=len(survival), max_size=len(survival)))
    lease = BudgetLease(cap=data.draw(st.integers(0, 40)), price=data.draw(st.sampled_from([0.0, 0.2, 0.9])))
    lengths = admit(survival, limits, lease)
    ranked = sorted(
        (-survival[r, j], j, r) for r in range(len(survival)) for j in range(limits[r]) if survival[r, j] >= lease.price
    )[: lease.cap]
    assert lengths == [sum(1 for _, _, owner in ranked if owner == r) for r in range(len(survival))]
    for _, j, r in ranked:
        assert j < lengths[r]  # prefixes: no admitted slot behind a refused one


@UNTIMED
@given(blocks, st.integers(0, 30))
def test_a_larger_cap_or_a_lower_price_never_takes_a_slot_away(confidences: list[list[float]], cap: int) -> None:
    survival, limits = np.cumprod(confidences, axis=1), [5] * len(confidences)
    before = admit(survival, limits, BudgetLease(cap=cap, price=0.3))
    assert sum(before) <= cap
    for lease in (BudgetLease(cap=cap + 1, price=0.3), BudgetLease(cap=cap, price=0.1)):
        more = admit(survival, limits, lease)
        assert sum(more) >= sum(before)
    assert all(
        a <= b for a, b in zip(before, admit(survival, limits, BudgetLease(cap=cap + 1, price=0.3)), strict=True)
    )


def test_a_large_engine_is_decided_in_well_under_a_step() -> None:
    """256 requests of 7 slots: no quadratic work. (Correctness of the size; docs hold the timings.)"""
    generator = np.random.default_rng(1)
    survival = generator.uniform(0.3, 1.0, size=(256, 7)).cumprod(axis=1)
    curve = curve_of([20.0 + 0.3 * n for n in range(2048)])
    lease = lease_for(report_of([tuple(row) for row in survival.tolist()]), curve)
    assert sum(admit(survival, [7] * 256, lease)) == lease.cap > 0


@UNTIMED
@given(
    blocks, st.floats(0.0, 2.0), st.sampled_from([0.0, 1.5, 3.0]), st.floats(1.0, 8.0), st.sampled_from([1, 3, 2**31])
)
def test_what_is_drafted_is_one_slot_more_than_would_be_admitted(
    confidences: list[list[float]], price: float, need: float, weight: float, cap: int
) -> None:
    survivals = np.cumprod(confidences, axis=1)
    lease = BudgetLease(cap=cap, price=price)
    lengths = admit(survivals, [5] * len(survivals), lease, need, weight)
    drafted = depth(survivals, lease, need, weight)
    assert drafted >= min(max(lengths) + 1, 5)
    values = slot_values(survivals, np.full(len(survivals), need), np.full(len(survivals), weight)).ravel()
    if cap >= len(values) or (np.abs(values - np.sort(values)[-cap]) > 1e-9).sum() == len(values) - 1:  # no tie there
        assert drafted == min(max(lengths) + 1, 5)


def test_a_binding_cap_bounds_the_depth() -> None:
    survivals = [[0.9, 0.5, 0.2, 0.1], [0.8, 0.4, 0.1, 0.1]]
    assert [depth(survivals, BudgetLease(cap=cap)) for cap in (1, 2, 4, 5, 99)] == [2, 2, 3, 4, 4]


def test_nothing_drafted_admits_nothing() -> None:
    assert admit([], [], BudgetLease(cap=4, price=0.2)) == []
