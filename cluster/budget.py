"""How many drafts to verify, and which: pure arithmetic on survivals and the cost curve.

Knows no clock, actor, tensor or token. Two functions share the work so that speculation stays exact (paper section 5,
appendix A): `allocate` looks at a report that is two steps old and decides the SIZE of the next batch; `admit` looks at
the current survivals and only RANKS. Survival of slot j depends on the drafts before j alone and never grows along a
request, so whether slot j is admitted can't depend on the token it holds, which is what keeps the output unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.messages import BudgetLease, LoadReport
from cluster.sps import CostCurve

Array = NDArray[np.float64]

MIN_GAIN = 0.02
"""A new cap must promise this much more than the last one: the curve isn't known better than that."""


def allocate(
    report: LoadReport,
    curve: CostCurve,
    *,
    max_draft_tokens: int | None = None,
    previous: BudgetLease | None = None,
    min_gain: float = MIN_GAIN,
) -> BudgetLease:
    """The lease that maximises expected tokens per second over all batch sizes, on a report two steps old.

    B* = argmax (R + sum of the B highest survivals) / (draft cost + verify cost of R + prefill + B tokens), searched
    globally because the curve may be a jagged staircase. B = 0 costs no draft pass: a lease with cap 0 means "do not
    draft". A request's survival tuple has as many slots as it may verify (none for a plain one).

    max_draft_tokens: most drafts that fit a step. previous: the last lease; it (cap 0 if none) is kept unless the best
    cap promises more than `min_gain` over it, so that noise does not make the batch size flap.
    """
    ranked = -np.sort(-_slots(report))
    most = len(ranked) if max_draft_tokens is None else min(len(ranked), max(max_draft_tokens, 0))
    epoch = 0 if previous is None else previous.epoch + 1
    rates, seconds = _rates(report, curve, ranked[:most])
    cap = int(np.argmax(rates))
    kept = min(previous.cap, most) if previous is not None else 0
    if rates[cap] <= rates[kept] * (1 + min_gain):
        cap = kept
    if cap == 0:
        return BudgetLease(cap=0, epoch=epoch)
    # What the last slot costs at the going rate: below this survival, time is better spent on the next step.
    last_slot_seconds = seconds[cap] - seconds[cap - 1]
    return BudgetLease(cap=cap, price=float(min(rates[cap] * last_slot_seconds, ranked[cap - 1])), epoch=epoch)


def everything_admitted(report: LoadReport, curve: CostCurve) -> bool:
    """True when the load is so low that every slot repays its own verification: no search is needed.

    Sufficient, not necessary: each slot's survival covers the dearest extra token at the highest rate possible, and
    drafting everything beats not drafting. Then the rate rises with every slot, and `allocate`'s argmax is all of them.
    """
    survivals = _slots(report)
    if not survivals.size:
        return True
    running = len(report.requests)
    base = running + report.num_prefill_tokens
    seconds = curve.step_seconds(base + np.arange(survivals.size + 1), report.context_tokens)
    draft = curve.draft_seconds(running)
    most_tokens = running + survivals.sum()
    rate_limit = most_tokens / (draft + seconds[0])
    repaid = survivals.min() >= rate_limit * np.diff(seconds).max()
    return bool(repaid and most_tokens / (draft + seconds[-1]) >= running / seconds[0] * (1 + MIN_GAIN))


def admit(survival: ArrayLike, limits: ArrayLike, lease: BudgetLease) -> list[int]:
    """Verify lengths of the current drafts: the `lease.cap` slots of highest survival, at most limits[r] of request r.

    survival [R][G], current; limits [R]. Slots under lease.price are not worth their time. Ties break by (position,
    request), never by value, and survival is taken as non-increasing along a request, so what is admitted is a prefix.
    """
    if not len(np.asarray(limits)):
        return []  # nothing was drafted: a lease outlives the drafts that it was made for
    # Rounding must not let a later slot beat an earlier one of its request.
    ordered = np.minimum.accumulate(np.asarray(survival, dtype=np.float64), axis=1)
    num_requests, num_slots = ordered.shape
    allowed = np.arange(num_slots) < np.asarray(limits, dtype=np.int64)[:, None]
    eligible = allowed & (ordered >= lease.price)
    lengths = eligible.sum(axis=1)
    if lengths.sum() > lease.cap:
        # Transposed, a stable sort breaks ties by position, then by request.
        ranks = np.where(eligible, -ordered, np.inf).T.ravel()
        best = np.argsort(ranks, kind="stable")[: max(lease.cap, 0)]
        lengths = np.bincount(best % num_requests, minlength=num_requests)
    return [int(length) for length in lengths]


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


def _slots(report: LoadReport) -> Array:
    """All survivals of a report, flat."""
    return np.array([value for request in report.requests for value in request.survival], dtype=np.float64)


def _rates(report: LoadReport, curve: CostCurve, ranked: Array) -> tuple[Array, Array]:
    """Expected tokens per second and verify seconds for 0, 1, .. len(ranked) drafts: each [B + 1]."""
    running = len(report.requests)
    base = running + report.num_prefill_tokens
    seconds = curve.step_seconds(base + np.arange(len(ranked) + 1), report.context_tokens)
    step = seconds + curve.draft_seconds(running)
    step[0] = seconds[0]
    return (running + np.concatenate([[0.0], ranked.cumsum()])) / step, seconds
