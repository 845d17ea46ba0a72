"""What promised speeds make of a step: how many tokens each request needs from it, and what giving them is worth.

A request of a tier with m tokens per second needs m * S tokens from a step of S seconds, the drafts' own cost included.
Its tokens up to there count `weight` times, those beyond once. S follows from how many drafts are verified, promised
ones included: nobody iterates to that fixed point, since the search goes over S, and needs are a function of it. Where
steps spend time on prompts as well, S is only a share of what passes meanwhile, and needs are more by as much.

A speed is promised for a whole answer, so a request that is behind needs more than m now (its pace). One that is ahead
needs a little more than m all the same: whoever aims at just the promised speed misses it half of the time. Pure; a
pace comes from tokens that were committed two steps ago, so it knows nothing of current drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.budget import LEVELS, PACE, survival_levels
from cluster.messages import LoadReport, SlaTier

Array = NDArray[np.float64]

MARGIN = 1.125
"""Least pace."""
CATCH_UP_SECONDS = 0.5
"""What a request is behind its promise, it makes good within so many seconds."""


def encode_paces(promised: ArrayLike, seconds: ArrayLike, num_tokens: ArrayLike) -> bytes:
    """A report's `paces`: [R] promised tokens per second (0: none), seconds since the first token, tokens since."""
    speed = np.asarray(promised, dtype=np.float64)
    due = np.asarray(num_tokens, dtype=np.float64) / np.maximum(speed, 1e-9)
    behind = np.where(speed > 0, np.asarray(seconds, dtype=np.float64) - due, 0.0)
    return np.clip(np.rint(PACE * (MARGIN + behind / CATCH_UP_SECONDS)), PACE * MARGIN, 255).astype(np.uint8).tobytes()


def paces(report: LoadReport) -> Array:
    """[R] what each request needs now, as a multiple of the speed it was promised."""
    if not report.paces:
        return np.ones(len(report.tiers))
    return np.frombuffer(report.paces, np.uint8) / PACE


def needs_by_request(report: LoadReport, floors: Sequence[float]) -> dict[str, float]:
    """Tokens that each request needs from a step, by request id; without promises nobody is named.

    floors: by tier, `BudgetLease.floors`.
    """
    if not any(floors):
        return {}
    needs = np.array(floors)[np.frombuffer(report.tiers, np.uint8)] * paces(report)
    return dict(zip(report.request_ids, needs.tolist(), strict=True))


class Promises:
    """What one engine's step is worth when tokens up to promised speeds count more, as a function of its seconds."""

    def __init__(self, report: LoadReport, tiers: Sequence[SlaTier]) -> None:
        owners = np.frombuffer(report.tiers, np.uint8)
        # [G, R]: long rows are what numpy is fast at.
        self._survival = np.ascontiguousarray(survival_levels(report).T / LEVELS)
        self._before = 1 + self._survival.cumsum(axis=0) - self._survival
        speeds = np.array([tier.min_tokens_per_second for tier in tiers])[owners] * paces(report)
        self._speeds = speeds / report.decode_share  # [R]
        self._extra = np.array([tier.weight for tier in tiers])[owners] - 1  # [R]

    def weighted_tokens(self, seconds: float) -> Array:
        """[1 + R * G] of a step of so many seconds that verifies its 0, 1, 2, .. slots of highest value.

        Sure tokens included. Never falls as seconds grow; divided by seconds, it never rises, whoever is verified.
        """
        needs = self._speeds * seconds
        values = needs - self._before
        np.maximum(values, 0, out=values)
        np.minimum(values, self._survival, out=values)
        values *= self._extra
        values += self._survival
        tokens = np.empty(values.size + 1)
        tokens[0] = -(1 + self._extra * np.minimum(needs, 1)).sum()
        np.negative(values.ravel(), out=tokens[1:])
        tokens[1:].sort()
        np.cumsum(tokens, out=tokens)
        return np.negative(tokens, out=tokens)
