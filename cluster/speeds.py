"""What speed one more request of each tier would get from an engine: what the router looks at. Pure arithmetic.

The newcomer, and whoever waits already, join those that run, as far as there are places. The newcomer is expected to
accept what requests of this engine accept, and competes for drafts with those that are there. With

    V    its slots whose value (budget.slot_values: a promise counts `weight` times) reaches what the last verified slot
         of the engine is worth now, and the lease's price
    S    seconds of a step that computes one more row for each who joins, V more drafts for each, and what is verified
         now; in a lockstep group, at least the rows that the group computes anyway

its speed is (1 + the sum of the survivals of V) / S. An engine on which nothing runs would draft what is best for this
one request. Prompts cost what they cost whatever is drafted, and are left out here as they are in the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.budget import LEVELS, decode_seconds, slot_values, survival_levels
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sla import MARGIN, paces
from cluster.sps import CostCurve

Array = NDArray[np.float64]


def speeds(
    report: LoadReport, lease: BudgetLease, curve: CostCurve, tiers: Sequence[SlaTier], max_num_seqs: int
) -> tuple[float, ...]:
    """[tiers] tokens per second; without tiers, one number for everybody. `lease`: what the report was answered."""
    promised = tiers or (SlaTier("everybody"),)
    return tuple(_speed(report, lease, curve, tiers, tier, max_num_seqs) for tier in promised)


def expected_rate(report: LoadReport, lease: BudgetLease, curve: CostCurve) -> float:
    """Tokens per second that the reported requests get from steps under this lease, by the curve."""
    levels = np.sort(survival_levels(report), axis=None)[::-1]
    cap, running = min(lease.cap, int(np.count_nonzero(levels))), len(report.tiers)
    if not running:
        return 0.0
    seconds = _seconds(report, lease, curve, running, np.array([cap]))
    return float((running + levels[:cap].sum() / LEVELS) / seconds[0])


def _speed(
    report: LoadReport,
    lease: BudgetLease,
    curve: CostCurve,
    tiers: Sequence[SlaTier],
    tier: SlaTier,
    max_num_seqs: int,
) -> float:
    survival_G = np.frombuffer(report.newcomer, np.uint8) / LEVELS
    running, cap = len(report.tiers), min(lease.cap, int(np.count_nonzero(survival_levels(report))))
    joining = min(1 + report.num_waiting, max(max_num_seqs - running, 0))
    num_slots = np.arange(len(survival_G) + 1)
    seconds_N = _seconds(report, lease, curve, running + joining, cap + joining * num_slots)
    tokens_N = 1 + np.concatenate([[0.0], survival_G.cumsum()])
    if not running:
        return float((tokens_N / seconds_N).max())
    if not cap:
        return float(tokens_N[0] / seconds_N[0])
    need = tier.min_tokens_per_second * MARGIN * seconds_N[0]
    values_G = slot_values(survival_G[None], np.array([need]), np.array([tier.weight]))[0]
    chosen = int((np.minimum.accumulate(values_G) >= _least_value(report, lease, cap, tiers)).sum())
    return float(tokens_N[chosen] / seconds_N[chosen])


def _seconds(
    report: LoadReport, lease: BudgetLease, curve: CostCurve, anchors: int, num_drafts: NDArray[np.int64]
) -> Array:
    """[N] of a step with so many anchors and drafts, the draft pass included."""
    context = report.context_tokens * anchors / max(len(report.tiers), 1)
    filled = np.maximum(num_drafts, lease.padded_tokens - anchors - report.num_prefill_tokens)
    seconds = decode_seconds(curve, anchors, report.num_prefill_tokens, filled, context)
    drafted = anchors - int((~survival_levels(report).any(axis=1)).sum())
    return seconds + np.where(num_drafts > 0, curve.draft_seconds(drafted), 0.0)


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
