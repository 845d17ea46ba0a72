"""What speed one more request of each tier would get from an engine, and for how many more its tier's promise holds.

What the router looks at; pure arithmetic. Newcomers, and whoever waits already, join those that run, as far as there
are places. A newcomer is expected to accept what requests of this engine accept, and competes for drafts with those
that are there. With

    V    its slots whose value (budget.slot_values: a promise counts `weight` times) reaches what the last verified slot
         of the engine is worth now, and the lease's price
    S    seconds of a step that computes one more row for each who joins, V more drafts for each, and what is verified
         now; in a lockstep group, at least the rows that the group computes anyway

its speed is (1 + the sum of the survivals of V) / S, times the share of late steps' time that went to decoding: what
goes to prompts doesn't depend on drafts, so the budget leaves it out, but whoever waits for tokens waits for it. An
engine on which nothing runs would draft what is best for this one request, and has no prompts to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.budget import LEVELS, decode_seconds, paces, slot_values, survival_levels
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sps import CostCurve

Array = NDArray[np.float64]

MARGIN = 1.125
"""A newcomer needs more than its promise until it is ahead, and then just that: so many times as much in all, about."""
EVERYBODY = (SlaTier("everybody"),)
"""Where nothing is promised."""


def speeds(
    report: LoadReport, lease: BudgetLease, curve: CostCurve, tiers: Sequence[SlaTier], max_num_seqs: int
) -> tuple[float, ...]:
    """[tiers] tokens per second; without tiers, one number for everybody. `lease`: what the report was answered."""
    newcomers = _Newcomers(report, lease, curve, tiers, max_num_seqs)
    return tuple(newcomers.speed(tier, 1) for tier in tiers or EVERYBODY)


def rooms(
    report: LoadReport, lease: BudgetLease, curve: CostCurve, tiers: Sequence[SlaTier], max_num_seqs: int
) -> tuple[int, ...]:
    """[tiers] how many more requests of each tier get a place and the speed that it promises. As in `speeds`."""
    newcomers = _Newcomers(report, lease, curve, tiers, max_num_seqs)
    return tuple(newcomers.room(tier) for tier in tiers or EVERYBODY)


def expected_rate(report: LoadReport, lease: BudgetLease, curve: CostCurve) -> float:
    """Tokens per second that the reported requests get from steps under this lease, by the curve."""
    levels = np.sort(survival_levels(report), axis=None)[::-1]
    cap, running = min(lease.cap, int(np.count_nonzero(levels))), len(report.tiers)
    if not running:
        return 0.0
    seconds = _seconds(report, lease, curve, running, np.array([cap]))
    return float((running + levels[:cap].sum() / LEVELS) / seconds[0])


class _Newcomers:
    """What requests that come now would get. What doesn't depend on their tier or number is computed once."""

    def __init__(
        self, report: LoadReport, lease: BudgetLease, curve: CostCurve, tiers: Sequence[SlaTier], max_num_seqs: int
    ) -> None:
        self._report, self._lease, self._curve = report, lease, curve
        self._running = len(report.tiers)
        self._num_places = max(max_num_seqs - self._running, 0)
        self._survival_G = np.frombuffer(report.newcomer, np.uint8) / LEVELS
        self._tokens_N = 1 + np.concatenate([[0.0], self._survival_G.cumsum()])
        self._cap = min(lease.cap, int(np.count_nonzero(survival_levels(report))))
        self._least_value = _least_value(report, lease, self._cap, tiers) if self._cap else np.inf

    def room(self, tier: SlaTier) -> int:
        """Up to the first one that would be too slow: a slot that begins to count for the promise makes the next faster
        again, but nobody comes next before that one."""
        most = max(self._num_places - self._report.num_waiting, 0)
        promised = tier.min_tokens_per_second
        if not promised:
            return most
        return next((num for num in range(most) if self.speed(tier, num + 1) < promised), most)

    def speed(self, tier: SlaTier, num_newcomers: int) -> float:
        """Tokens per second of each of so many requests of a tier."""
        joining = min(num_newcomers + self._report.num_waiting, self._num_places)
        num_drafts = self._cap + joining * np.arange(len(self._tokens_N))
        seconds_N = _seconds(self._report, self._lease, self._curve, self._running + joining, num_drafts)
        if not self._running:
            return float((self._tokens_N / seconds_N).max())
        need = tier.min_tokens_per_second * MARGIN * seconds_N[0] / self._report.decode_share
        values_G = slot_values(self._survival_G[None], np.array([need]), np.array([tier.weight]))[0]
        chosen = int((np.minimum.accumulate(values_G) >= self._least_value).sum())
        return float(self._tokens_N[chosen] / seconds_N[chosen] * self._report.decode_share)


def _seconds(
    report: LoadReport, lease: BudgetLease, curve: CostCurve, anchors: int, num_drafts: NDArray[np.int64]
) -> Array:
    """[N] of a step with so many anchors and drafts, the draft pass included."""
    context = report.context_tokens * anchors / max(len(report.tiers), 1)
    filled = np.maximum(num_drafts, lease.padded_tokens - anchors - report.num_prefill_tokens)
    seconds = decode_seconds(curve, anchors, report.num_prefill_tokens, filled, context)
    levels = survival_levels(report)
    drafted = anchors - int((~levels.any(axis=1)).sum())
    block = max(levels.shape[1], len(report.newcomer))
    num_slots: ArrayLike = min(lease.depth, block)
    # Where nothing runs the lease was for others: as deep as `budget.depth` would have it.
    if not report.tiers and not lease.padded_tokens:
        num_slots = np.minimum(num_drafts // anchors + 1, block)
    return seconds + np.where(num_drafts > 0, curve.draft_seconds(drafted, num_slots), 0.0)


def _least_value(report: LoadReport, lease: BudgetLease, cap: int, tiers: Sequence[SlaTier]) -> float:
    """What a draft must be worth to be verified beside those that are."""
    survival = survival_levels(report) / LEVELS
    if cap == np.count_nonzero(survival):  # all of them are
        return lease.price
    owners = np.frombuffer(report.tiers, np.uint8)
    needs = np.array(lease.floors or (0.0,))[owners] * paces(report)
    weights = np.array([tier.weight for tier in tiers] or (1.0,))[owners]
    values = np.sort(slot_values(survival, needs, weights), axis=None)
    return max(lease.price, float(values[-cap]))
