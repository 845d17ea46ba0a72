"""One engine's verify budget: which drafts are verified, and when no search is needed. Pure arithmetic.

Knows no clock, actor, tensor or token. Two functions share the work so that speculation stays exact (paper section 5,
appendix A): `fleet.allocate` looks at a report that is two steps old and decides the SIZE of the next batch and the
price of a slot; `admit` RANKS by the current survivals, and leaves out what they say is under that price. Survival of
slot j depends on the drafts before j alone and never grows along a request, so whether slot j is admitted can't depend
on the token it holds, which keeps the output unbiased.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sps import CostCurve

Array = NDArray[np.float64]
Levels = NDArray[np.uint8]

LEVELS, PACE = 255, 64
"""A report holds survivals in steps of 1/255: finer than any calibration, and 256 requests of 7 slots fit 2 KB.
Paces come in 1/64: 255 is almost four times the promised speed."""
MIN_GAIN = 0.02
"""A new budget must promise this much more than the last one: the curve isn't known better than that."""


def survival(confidences: Sequence[float]) -> list[float]:
    """Confidences of consecutive slots -> probability that the prefix through each passes (their running product)."""
    return list(accumulate(confidences, operator.mul))


def encode_survival(rows: Sequence[Sequence[float]], num_slots: int) -> bytes:
    """A report's `survival`: [R][<= num_slots] probabilities, one row per request and as long as its slot limit."""
    # 0 is a slot that may not be verified. Every step does this for a few short rows: plain Python is quicker.
    assert all(len(row) <= num_slots for row in rows)
    return b"".join(bytes([max(1, round(LEVELS * p)) for p in row]).ljust(num_slots, b"\0") for row in rows)


def survival_levels(report: LoadReport) -> Levels:
    """[R, G] uint8, as sent."""
    num_requests = len(report.tiers)
    return np.frombuffer(report.survival, np.uint8).reshape(num_requests, len(report.survival) // max(num_requests, 1))


def paces(report: LoadReport) -> Array:
    """[R] what each request needs now, as a multiple of the speed it was promised (sla.encode_paces)."""
    if not report.paces:
        return np.ones(len(report.tiers))
    return np.frombuffer(report.paces, np.uint8) / PACE


def decode_seconds(curve: CostCurve, running: int, others: int, num_drafts: ArrayLike, context_tokens: float) -> Array:
    """Seconds of a step of `running` anchors, `others` prompt rows and so many drafts, less the prompt rows' own time.

    That is spent whatever is drafted. Were it counted, a step with a long prompt would make drafts look cheap, though
    what they cost comes on top.
    """
    rows = np.append([running, running + others], running + others + np.asarray(num_drafts))
    seconds = curve.step_seconds(rows, context_tokens)
    return np.asarray(seconds[2:] - (seconds[1] - seconds[0])).reshape(np.shape(num_drafts))


def everything_admitted(report: LoadReport, curve: CostCurve, tiers: Sequence[SlaTier] = ()) -> bool:
    """True when the load is so low that every slot repays its own verification: no search is needed.

    Sufficient, not necessary: each slot's survival covers the dearest extra token and place at the highest rate,
    drafting everything beats not drafting, and gives all that promised speeds need. Then the rate rises with every
    slot, and `allocate`'s argmax is all of them.
    """
    levels = survival_levels(report)
    survivals = levels[levels > 0] / LEVELS
    if not survivals.size:
        return True
    if survivals.size > report.max_draft_tokens:
        return False
    running = len(levels)
    num_drafts = np.arange(survivals.size + 1)
    seconds = decode_seconds(curve, running, report.num_prefill_tokens, num_drafts, report.context_tokens)
    passes = curve.draft_seconds(int(levels.any(axis=1).sum()), np.arange(1, int(levels.any(axis=0).sum()) + 1))
    shortest, draft = float(passes[0]), float(passes[-1])
    most_tokens = running + survivals.sum()
    rate_limit = most_tokens / (shortest + seconds[0])
    # The first slot of its place makes the pass longer for all others of that place, too.
    repaid = survivals.min() >= rate_limit * (np.diff(seconds).max() + np.diff(passes).max(initial=0.0))
    worth_drafting = most_tokens / (draft + seconds[-1]) >= running / seconds[0] * (1 + MIN_GAIN)
    speeds = np.array([tier.min_tokens_per_second for tier in tiers] or [0.0])[np.frombuffer(report.tiers, np.uint8)]
    needed = speeds * paces(report)
    promises_kept = (1 + levels.sum(axis=1) / LEVELS >= needed * (draft + seconds[-1]) / report.decode_share).all()
    return bool(repaid and worth_drafting and promises_kept)


def slot_values(survival: Array, needs: Array, weights: Array) -> Array:
    """[..., R, G] what verifying each slot is worth, given the slots before it: it never grows along a request.

    Tokens that a request needs to keep its promised speed count `weights` times, the others once. survival
    [..., R, G]; needs [..., R] tokens per step, the sure one included; weights [R], at least 1. The value of slot j
    follows from the survivals of slots 0..j, so from drafts before j: ranking by it is as causal as by survival.
    """
    before = 1 + np.cumsum(survival, axis=-1) - survival
    return np.asarray(survival + (weights[:, None] - 1) * np.clip(needs[..., None] - before, 0, survival))


def admit(
    survival: ArrayLike, limits: ArrayLike, lease: BudgetLease, needs: ArrayLike = 0.0, weights: ArrayLike = 1.0
) -> list[int]:
    """Verify lengths of the current drafts: the `lease.cap` slots of highest value, at most limits[r] of request r.

    survival [R][G], current; limits [R]; needs [R] and weights [R] as in `slot_values`: without promises a slot's value
    is its survival. Slots under lease.price are not worth their time. Ties break by (position, request), never by
    value, and values never grow along a request, so what is admitted is a prefix.
    """
    num_requests = len(np.asarray(limits))
    if not num_requests:
        return []  # nothing was drafted: a lease outlives the drafts that it was made for
    ordered = _values(survival, needs, weights)
    allowed = np.arange(ordered.shape[1]) < np.asarray(limits, dtype=np.int64)[:, None]
    eligible = allowed & (ordered >= lease.price)
    lengths = eligible.sum(axis=1)
    if lengths.sum() > lease.cap:
        # Transposed, a stable sort breaks ties by position, then by request.
        ranks = np.where(eligible, -ordered, np.inf).T.ravel()
        best = np.argsort(ranks, kind="stable")[: max(lease.cap, 0)]
        lengths = np.bincount(best % num_requests, minlength=num_requests)
    return [int(length) for length in lengths]


def depth(survival: ArrayLike, lease: BudgetLease, needs: ArrayLike = 0.0, weights: ArrayLike = 1.0) -> int:
    """How many slots of each request to draft: those that `admit` would take some of, and one for a surprise.

    survival [R][G] of a report, so two steps old; needs and weights as in `admit`. Each slot makes a draft pass longer.
    """
    values = _values(survival, needs, weights)
    ranked = np.sort(values, axis=None)[::-1]
    least = max(lease.price, float(ranked[min(lease.cap, len(ranked)) - 1]))
    return min(int(np.count_nonzero((values >= least).any(axis=0))) + 1, int(values.shape[1]))


def _values(survival: ArrayLike, needs: ArrayLike, weights: ArrayLike) -> Array:
    """[R, G] what each slot is worth."""
    values = np.asarray(survival, dtype=np.float64)
    if np.any(needs):
        needs, weights = (np.broadcast_to(np.asarray(x, dtype=np.float64), len(values)) for x in (needs, weights))
        values = slot_values(values, needs, weights)
    # Rounding must not let a later slot beat an earlier one of its request.
    return np.asarray(np.minimum.accumulate(values, axis=1))


def algorithm_1(survival: Sequence[Sequence[float]], steps_per_second: Callable[[int], float]) -> list[int]:
    """The paper's Algorithm 1: admit in order of survival, stop at the first slot that does not raise the rate.

    The early stop is what makes it causal on CURRENT survivals (a later slot never changes the decision on an earlier
    one); it is exact when the rate has one peak over the batch size. survival [R][<= G] -> lengths [R].
    """
    lengths = [0] * len(survival)
    num_tokens, expected = len(survival), float(len(survival))
    best = expected * steps_per_second(num_tokens)
    order = sorted((-value, slot, r) for r, slots in enumerate(survival) for slot, value in enumerate(slots))
    for negated, _, request in order:
        num_tokens, expected = num_tokens + 1, expected - negated
        rate = expected * steps_per_second(num_tokens)
        if rate <= best:
            break
        best = rate
        lengths[request] += 1
    return lengths
