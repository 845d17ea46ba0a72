"""The fleet's budget against brute force: all lengths, jagged curves, lockstep ranks, promised speeds."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from cluster.budget import LEVELS, PACE, admit, encode_survival, paces, survival_levels
from cluster.fleet import Group, allocate
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sla import encode_paces, needs_by_request
from cluster.sps import CostCurve, DraftSample, Provenance, VerifySample

UNTIMED = settings(
    deadline=None, max_examples=60, suppress_health_check=list(HealthCheck)
)  # a busy machine is no failure
HERE = Provenance(model="m", dtype="bfloat16", device="cpu", num_threads=2, versions="", date="")
NUM_SLOTS = 3
TIERS = (SlaTier("standard"), SlaTier("fast", 55.0, weight=3.0), SlaTier("faster", 80.0, weight=1.5))
STRICT = tuple(SlaTier(tier.name, tier.min_tokens_per_second, weight=1e9) for tier in TIERS)


@dataclass(frozen=True)
class Rank:
    """One engine's load: [(tier, survivals)], the prompt rows of its step, the pace of all, prompts' share of time."""

    requests: list[tuple[int, tuple[float, ...]]]
    prefill: int = 0
    pace: int = PACE
    decode_share: float = 1.0

    def needed(self, tier: SlaTier) -> float:
        """Tokens per second of each request of the tier."""
        return tier.min_tokens_per_second * self.pace / PACE / self.decode_share

    def report(self, most: int = 2**31) -> LoadReport:
        return LoadReport(
            step=0,
            survival=encode_survival([slots for _, slots in self.requests], NUM_SLOTS),
            tiers=bytes(tier for tier, _ in self.requests),
            num_prefill_tokens=self.prefill,
            context_tokens=0,
            num_waiting=0,
            drafted=True,
            max_draft_tokens=most,
            request_ids=tuple(str(r) for r in range(len(self.requests))),
            paces=bytes([self.pace] * len(self.requests)),
            decode_share=self.decode_share,
        )


survivals = st.lists(st.sampled_from([1.0, 0.95, 0.8, 0.6, 0.3, 0.1]), max_size=NUM_SLOTS).map(
    lambda c: tuple((np.rint(np.cumprod(c) * LEVELS) / LEVELS).tolist())
)


def ranks(max_requests: int) -> st.SearchStrategy[Rank]:
    requests = st.lists(st.tuples(st.integers(0, 2), survivals), min_size=1, max_size=max_requests)
    return st.builds(
        Rank, requests, st.integers(0, 4), st.sampled_from([0, 32, PACE, 96, 255]), st.sampled_from([1.0, 0.5])
    )


@st.composite
def jagged_curves(draw: st.DrawFn) -> CostCurve:
    """Stairs of random widths and heights from 10 ms on, and a draft that may cost a lot or nothing."""
    steps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.2, 1.0, 4.0, 15.0]), min_size=20, max_size=20))
    milliseconds = 10.0 + np.cumsum([*steps[:-1], steps[-1] + 10.0])
    draft = draw(st.sampled_from([0.0, 1.0, 6.0]))
    samples = [VerifySample(n + 1, 0, ms / 1000) for n, ms in enumerate(milliseconds.tolist())]
    return CostCurve.fit(samples, [DraftSample(n, 1, n * draft / 1000) for n in (1, 3)] if draft else [], HERE)


FOUR_ROWS = CostCurve.fit([VerifySample(n, 0, 0.010 + 0.015 * max(n - 4, 0)) for n in range(1, 20)], [], HERE)
"""A step of five rows is more than twice as long."""


# --- the definition, straight ---


def tokens_of(rank: Rank, lengths: tuple[int, ...]) -> list[float]:
    return [1 + sum(slots[:n]) for (_, slots), n in zip(rank.requests, lengths, strict=True)]


def seconds_of(group: list[Rank], lengths: list[tuple[int, ...]], curve: CostCurve) -> float:
    """The rank with the most rows sets the time; a draft pass is paid by all if one drafts."""
    rows = max(len(rank.requests) + rank.prefill + sum(n) for rank, n in zip(group, lengths, strict=True))
    drafted = max(sum(bool(slots) for _, slots in rank.requests) for rank in group)
    drafts = curve.draft_seconds(drafted, 1) if any(map(sum, lengths)) else 0.0
    anchors = max(len(rank.requests) for rank in group)
    prompts = curve.step_seconds(max(len(rank.requests) + rank.prefill for rank in group), 0)
    return float(curve.step_seconds(rows, 0) - (prompts - curve.step_seconds(anchors, 0))) + drafts


def worth_of(group: list[Rank], lengths: list[tuple[int, ...]], curve: CostCurve, tiers: tuple[SlaTier, ...]) -> float:
    """Tokens per second, those up to a promised speed counted `weight` times."""
    seconds = seconds_of(group, lengths, curve)
    total = 0.0
    for rank, own in zip(group, lengths, strict=True):
        for (tier, _), tokens in zip(rank.requests, tokens_of(rank, own), strict=True):
            total += tokens / seconds
            if tiers:
                promised = min(tokens / seconds, rank.needed(tiers[tier]))
                total += (tiers[tier].weight - 1) * promised
    return total


def all_lengths(group: list[Rank]) -> list[list[tuple[int, ...]]]:
    own = [list(product(*[range(len(slots) + 1) for _, slots in rank.requests])) for rank in group]
    return [list(choice) for choice in product(*own)]


def admitted(group: list[Rank], leases: list[BudgetLease], tiers: tuple[SlaTier, ...] = TIERS) -> list[tuple[int, ...]]:
    """What the engines make of their leases, on the very survivals that were reported."""
    lengths = []
    for rank, lease in zip(group, leases, strict=True):
        table = survival_levels(rank.report()) / LEVELS
        needs = needs_by_request(rank.report(), lease.floors)
        limits = [len(slots) for _, slots in rank.requests]
        weights = [tiers[tier].weight for tier, _ in rank.requests]
        own = admit(table, limits, lease, [needs.get(str(r), 0.0) for r in range(len(limits))], weights)
        lengths.append(tuple(own))
    return lengths


def group_of(ranks: list[Rank], curve: CostCurve, previous: list[BudgetLease] | None = None) -> Group:
    return Group([rank.report() for rank in ranks], curve, previous or [])


# --- against brute force ---


@UNTIMED
@given(st.lists(ranks(2), min_size=1, max_size=3), jagged_curves())
def test_a_lockstep_group_reaches_the_optimum_over_all_lengths(group: list[Rank], curve: CostCurve) -> None:
    best = max(worth_of(group, lengths, curve, ()) for lengths in all_lengths(group))
    [leases] = allocate([group_of(group, curve)], min_gain=0.0)
    lengths = admitted(group, leases)
    assert worth_of(group, lengths, curve, ()) == pytest.approx(best, rel=1e-9)
    if any(map(sum, lengths)) and len(group) > 1:
        rows = [len(r.requests) + r.prefill + sum(n) for r, n in zip(group, lengths, strict=True)]
        assert len({lease.padded_tokens for lease in leases}) == 1 and max(rows) <= leases[0].padded_tokens


@UNTIMED
@given(st.lists(ranks(2), min_size=1, max_size=2), jagged_curves())
def test_promised_speeds_and_throughput_are_traded_as_by_brute_force(group: list[Rank], curve: CostCurve) -> None:
    best = max(worth_of(group, lengths, curve, TIERS) for lengths in all_lengths(group))
    [leases] = allocate([group_of(group, curve)], TIERS, min_gain=0.0)
    assert worth_of(group, admitted(group, leases), curve, TIERS) == pytest.approx(best, rel=1e-9)


@UNTIMED
@given(st.lists(ranks(2), min_size=1, max_size=2), jagged_curves(), st.integers(0, 12), st.sampled_from([0.0, 0.02]))
def test_with_promises_a_lease_is_kept_unless_brute_force_finds_much_more(
    group: list[Rank], curve: CostCurve, before: int, min_gain: float
) -> None:
    best = max(worth_of(group, lengths, curve, TIERS) for lengths in all_lengths(group))
    rows = max(len(rank.requests) + rank.prefill for rank in group) + before
    last = [BudgetLease(cap=before, padded_tokens=rows if len(group) > 1 else 0) for _ in group]
    [leases] = allocate([group_of(group, curve, last)], TIERS, min_gain)
    worth = worth_of(group, admitted(group, leases), curve, TIERS)
    assert worth * (1 + min_gain) >= best * (1 - 1e-9)
    [again] = allocate([group_of(group, curve, leases)], TIERS, min_gain)
    assert [lease.cap for lease in again] == [lease.cap for lease in leases], "the same report never moves it twice"


@settings(UNTIMED, max_examples=400)
@given(st.lists(ranks(2), min_size=2, max_size=2), jagged_curves(), st.integers(1, 2), st.sampled_from([(), TIERS]))
def test_within_its_limits_a_group_does_what_is_best(
    group: list[Rank], curve: CostCurve, most: int, tiers: tuple[SlaTier, ...]
) -> None:
    allowed = [lengths for lengths in all_lengths(group) if max(map(sum, lengths)) <= most]
    best = max(worth_of(group, lengths, curve, tiers) for lengths in allowed)
    reports = [rank.report(most) for rank in group]
    [leases] = allocate([Group(reports, curve)], tiers, min_gain=0.0)
    lengths = admitted(group, leases, tiers or TIERS)
    assert max(map(sum, lengths)) <= most
    assert worth_of(group, lengths, curve, tiers) == pytest.approx(best, rel=1e-9)


@UNTIMED
@given(st.lists(ranks(3), min_size=1, max_size=2), jagged_curves(), st.sampled_from([0.5, 3.0, 9.0]))
@example([Rank([(0, (1.0,) * NUM_SLOTS)] * 2)], FOUR_ROWS, 3.0)  # equal survivals: the first places go first
def test_a_deeper_budget_pays_for_the_longer_draft_pass(group: list[Rank], curve: CostCurve, each_ms: float) -> None:
    """No number of rows is worth more, where a pass drafts a slot more than the deepest one that is verified; in
    lockstep, whole blocks."""
    passes = [DraftSample(n, k, 0.001 * n + each_ms * k / 1000) for n, k in product((1, 3), range(1, NUM_SLOTS + 1))]
    curve = replace(curve, draft=CostCurve.fit([VerifySample(n, 0, n) for n in (1, 2)], passes, HERE).draft)

    def worth(lengths: list[tuple[int, ...]]) -> float:
        deepest = max(map(max, lengths))
        drafted = max(sum(bool(slots) for _, slots in rank.requests) for rank in group)
        num_slots = min(deepest + 1, NUM_SLOTS) if len(group) == 1 else NUM_SLOTS
        longer = curve.draft_seconds(drafted, num_slots) - curve.draft_seconds(drafted, 1)
        seconds = seconds_of(group, lengths, curve) + (float(longer) if deepest else 0.0)
        return sum(sum(tokens_of(rank, own)) for rank, own in zip(group, lengths, strict=True)) / seconds

    bases = [len(rank.requests) + rank.prefill for rank in group]
    rows = range(max(bases), max(bases) + 3 * NUM_SLOTS + 1)
    tried = [admitted(group, [BudgetLease(cap=num - base) for base in bases], TIERS[:1] * 3) for num in rows]
    [leases] = allocate([group_of(group, curve)], min_gain=0.0)
    chosen = worth(admitted(group, leases, TIERS[:1] * 3))
    assert chosen == pytest.approx(max(worth(lengths) for lengths in [*tried, [(0,) * len(r.requests) for r in group]]))


def loaded_curves() -> st.SearchStrategy[CostCurve]:
    """Convex: each row costs at least as much as the one before."""
    return st.lists(st.floats(0.0, 3.0), min_size=24, max_size=24).map(
        lambda steps: CostCurve.fit(
            [
                VerifySample(n + 1, 0, (8.0 + ms) / 1000)
                for n, ms in enumerate(np.cumsum([*sorted(steps), 8.0]).tolist())
            ],
            [],
            HERE,
        )
    )


@UNTIMED
@given(survivals.filter(bool), loaded_curves(), st.integers(1, 4))
def test_more_requests_of_a_kind_never_get_more_each(slots: tuple[float, ...], curve: CostCurve, load: int) -> None:
    """Monotone in load, where each row is dearer than the one before; stairs may well carry a larger batch further."""
    caps = []
    for count in (load, load + 1, 2 * load + 1):
        [[lease]] = allocate([group_of([Rank([(0, slots)] * count)], curve)], min_gain=0.0)
        caps.append(lease.cap / count)
    assert caps[1] <= caps[0] + 1 / load and caps[2] <= caps[0] + 1 / load


@UNTIMED
@given(ranks(3), jagged_curves())
def test_all_promises_are_kept_whenever_that_is_possible(rank: Rank, curve: CostCurve) -> None:
    assume(any(tier for tier, _ in rank.requests))

    def all_kept(lengths: list[tuple[int, ...]]) -> bool:
        seconds = seconds_of([rank], lengths, curve)
        tokens = tokens_of(rank, lengths[0])
        return all(
            t >= rank.needed(STRICT[tier]) * seconds * (1 - 1e-12)
            for (tier, _), t in zip(rank.requests, tokens, strict=True)
        )

    assume(any(all_kept(lengths) for lengths in all_lengths([rank])))
    # Without hysteresis, which leaves alone what is worth less than it.
    [leases] = allocate([group_of([rank], curve)], STRICT, min_gain=0.0)
    assert all_kept(admitted([rank], leases, STRICT))


@UNTIMED
@given(st.lists(ranks(3), min_size=1, max_size=3), jagged_curves(), st.integers(0, 6))
def test_no_rank_gets_more_than_it_has_room_for(group: list[Rank], curve: CostCurve, most: int) -> None:
    reports = [rank.report(most) for rank in group]
    for tiers in ((), TIERS):
        [leases] = allocate([Group(reports, curve)], tiers)
        for rank, lease in zip(group, leases, strict=True):
            assert 0 <= lease.cap <= min(most, sum(len(slots) for _, slots in rank.requests))
            rows = len(rank.requests) + rank.prefill + lease.cap
            assert len(group) == 1 or not lease.padded_tokens or rows <= lease.padded_tokens


@UNTIMED
@given(st.lists(ranks(2), min_size=1, max_size=3), jagged_curves())
def test_groups_do_not_disturb_each_other(group: list[Rank], curve: CostCurve) -> None:
    flat = CostCurve.fit([VerifySample(1, 0, 0.01), VerifySample(64, 0, 0.02)], [], HERE)
    other = group_of([Rank([(1, (0.9, 0.8)), (0, ())], 40)], flat)
    alone, among = allocate([group_of(group, curve)], TIERS), allocate([other, group_of(group, curve), other], TIERS)
    assert among[1] == alone[0] and among[0] == among[2] == allocate([other], TIERS)[0]


@UNTIMED
@given(st.lists(st.lists(ranks(3), min_size=1, max_size=3), min_size=9, max_size=12), jagged_curves())
def test_many_groups_get_what_each_gets_for_itself(groups: list[list[Rank]], curve: CostCurve) -> None:
    """More of them than are searched at once, of all sizes."""
    for tiers in ((), TIERS):
        together = allocate([group_of(group, curve) for group in groups], tiers)
        assert together == [allocate([group_of(group, curve)], tiers)[0] for group in groups]


# --- what lockstep and promises mean ---


def test_ranks_below_the_largest_verify_more_at_no_cost() -> None:
    curve = CostCurve.fit([VerifySample(n, 0, 0.01 + 0.004 * n) for n in range(1, 40)], [], HERE)
    slots = (0.6, 0.36, 0.216)
    busy, idle = Rank([(0, slots)] * 8), Rank([(0, slots)] * 4)
    [leases] = allocate([group_of([busy, idle], curve)])
    [[alone]] = allocate([group_of([idle], curve)])
    assert leases[1].cap - leases[0].cap == 4 and alone.cap == 0
    assert {lease.price for lease in leases} == {0.0}, "trimming below the group's rows saves nothing"


def test_more_load_never_raises_the_drafts_per_request() -> None:
    curve = CostCurve.fit(
        [VerifySample(n, 0, 0.02 + 0.0008 * n) for n in range(1, 600)], [DraftSample(1, 1, 0.002)], HERE
    )
    slots = (0.8, 0.64, 0.512)
    for tiers in ((), TIERS):
        caps = []
        for load in (1, 2, 4, 8, 16, 32, 64):
            [[lease]] = allocate([group_of([Rank([(0, slots)] * load)], curve)], tiers)
            caps.append(lease.cap / load)
        assert caps[0] == NUM_SLOTS and caps[-1] < 2
        assert all(later <= earlier + 1 / 8 for earlier, later in zip(caps, caps[1:], strict=False))


def test_a_promise_shortens_the_step_as_far_as_its_weight_goes() -> None:
    """Eight easy requests want long steps; a hard one is promised a speed that it gets from short steps only."""
    curve = CostCurve.fit([VerifySample(n, 0, 0.010 + 0.001 * n) for n in range(1, 80)], [], HERE)
    rank = Rank([(0, (0.9, 0.81, 0.729))] * 8 + [(1, (0.3, 0.09, 0.027))])

    def decided(weight: float) -> tuple[BudgetLease, tuple[int, ...]]:
        tiers = (SlaTier("any"), SlaTier("fast", 50.0, weight))
        [leases] = allocate([group_of([rank], curve)], tiers)
        [lengths] = admitted([rank], leases, tiers)
        return leases[0], lengths

    seconds = []
    for weight in (1.0, 10.0, 1000.0):
        lease, lengths = decided(weight)
        seconds.append(seconds_of([rank], [lengths], curve))
    assert seconds[0] > seconds[1] >= seconds[2]
    assert tokens_of(rank, lengths)[-1] >= 50 * seconds[2]


def test_budgets_do_not_flap_and_lockstep_keeps_its_rows() -> None:
    curve = CostCurve.fit([VerifySample(n, 0, 0.02 + 0.0005 * n) for n in range(1, 100)], [], HERE)
    generator, leases, seen = np.random.default_rng(0), [], set()
    for _ in range(40):
        noisy = [tuple(np.cumprod(0.75 + 0.02 * generator.normal(size=3)).tolist()) for _ in range(8)]
        group = [Rank([(0, slots) for slots in noisy]), Rank([(0, slots) for slots in noisy[:5]])]
        [leases] = allocate([group_of(group, curve, leases)], TIERS[:1])
        seen.add(leases[0].padded_tokens)
    assert len(seen) <= 2 and leases[0].epoch == 39


def test_a_lease_that_drafts_nothing_still_says_what_was_promised() -> None:
    """So the engine goes on reporting often, and who is behind is ranked first when drafts are tried."""
    cost = CostCurve.fit([VerifySample(n, 0, 0.010 * n) for n in range(1, 20)], [DraftSample(1, 1, 0.05)], HERE)
    tiers = (SlaTier("standard"), SlaTier("fast", min_tokens_per_second=50.0, weight=2.0))
    [[lease]] = allocate([Group([Rank([(1, (0.1,)), (0, (0.1,))]).report()], cost)], tiers)
    assert lease.cap == 0
    assert lease.floors == pytest.approx((0.0, 50.0 * 0.02))


def test_needs_are_named_by_request_where_something_is_promised() -> None:
    report = Rank([(0, (0.5,)), (1, (1.0, 1.0))]).report()
    assert needs_by_request(report, (0.0, 2.5)) == {"0": 0.0, "1": 2.5}
    assert needs_by_request(report, ()) == {} == needs_by_request(report, (0.0, 0.0))
    assert paces(replace(report, paces=b"")).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("second", [0.1, 0.3, 46 / LEVELS, 0.5, 0.599])
def test_the_price_lets_the_last_slot_pass(second: float) -> None:
    """Also where it lies just under what it was rounded to."""
    rank = Rank([(0, (0.6, second))] * 2)
    curve = CostCurve.fit([VerifySample(n, 0, 1 + n) for n in (1, 8)], [], HERE)
    last = [BudgetLease(cap=4)]
    [[kept]] = allocate([group_of([rank], curve, last)], min_gain=1.0)
    assert admitted([rank], [kept]) == [(2, 2)]


def test_where_prompts_take_time_a_step_must_bring_more() -> None:
    curve = CostCurve.fit([VerifySample(n, 0, 0.010 + 0.0005 * n) for n in range(1, 9)], [], HERE)
    rank = Rank([(1, (1.0, 1.0, 0.95)), (0, (0.6, 0.3, 0.1))])
    whole = group_of([rank], curve)
    shared = replace(whole, reports=[replace(whole.reports[0], decode_share=0.5)])
    [[lease], [hurried]] = allocate([whole, shared], TIERS)
    assert lease.cap == hurried.cap > 0
    assert hurried.floors == tuple(2 * floor for floor in lease.floors)


def test_a_request_that_is_behind_needs_more_and_one_that_is_ahead_less() -> None:
    """Promised 100 tokens per second: after a second with 150, 125, 100, 75 and 0 tokens."""
    encoded = encode_paces([100.0] * 5, [1.0] * 5, [150, 125, 100, 75, 0])
    report = replace(Rank([(1, ())] * 5).report(), paces=encoded)
    assert paces(report) == pytest.approx([0.5, 1.0, 1.5, 2.0, 3.5], abs=1 / 64)
    assert needs_by_request(report, (0.0, 2.0))["4"] == pytest.approx(7.0, abs=1 / 32)
    assert list(encode_paces([100.0, 100.0], [1.0, 9.0], [900, 0])) == [0, 255], "no less than nothing, and a byte"


def test_where_tokens_are_rare_one_of_them_changes_no_pace_much() -> None:
    """Promised a token a second, on time and a token ahead."""
    assert list(encode_paces([1.0, 1.0], [9.0, 9.0], [9, 10])) == [96, 88]


def test_a_report_of_256_requests_is_small() -> None:
    table = np.random.default_rng(0).uniform(size=(256, 7)).tolist()
    report = LoadReport(
        step=10**9,
        survival=encode_survival(table, 7),
        tiers=bytes(256),
        paces=bytes(range(256)),
        num_prefill_tokens=8192,
        context_tokens=10**7,
        num_waiting=1000,
        drafted=True,
    )
    assert len(pickle.dumps(report)) <= 4096
    held = np.maximum(table, 1 / LEVELS)  # 0 would be a slot that may not be verified
    assert np.abs(survival_levels(report) / LEVELS - held).max() <= 0.5 / LEVELS + 1e-12


# --- promises and causality in admit ---


@UNTIMED
@given(st.data(), st.integers(1, 4))
def test_a_token_never_decides_about_itself_when_promises_count(data: st.DataObject, num_requests: int) -> None:
    confidence = st.sampled_from([0.0, 0.2, 0.5, 0.5, 0.9, 1.0])
    table = st.lists(st.lists(confidence, min_size=4, max_size=4), min_size=num_requests, max_size=num_requests)
    before = np.array(data.draw(table))
    request, slot = data.draw(st.integers(0, num_requests - 1)), data.draw(st.integers(0, 3))
    after = before.copy()
    after[request, slot + 1 :] = np.array(data.draw(table))[request, slot + 1 :]

    def each(values: st.SearchStrategy[float]) -> list[float]:
        return data.draw(st.lists(values, min_size=num_requests, max_size=num_requests))

    limits, needs = each(st.integers(0, 4)), each(st.sampled_from([0.0, 1.5, 2.0, 3.2, 9.0]))
    weights = each(st.sampled_from([1.0, 1.5, 4.0, 1000.0]))
    lease = BudgetLease(cap=data.draw(st.integers(0, 12)), price=data.draw(st.sampled_from([0.0, 0.1, 0.5])))
    first = admit(before.cumprod(axis=1), limits, lease, needs, weights)
    second = admit(after.cumprod(axis=1), limits, lease, needs, weights)
    assert min(first[request], slot + 1) == min(second[request], slot + 1)
    assert sum(first) <= lease.cap
    assert all(n <= limit for n, limit in zip(first, limits, strict=True))
