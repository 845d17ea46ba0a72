"""What promised speeds make of a step: how many tokens each request needs from it, and what giving them is worth.

A request of a tier with m tokens per second needs m * S tokens from a step of S seconds, the drafts' own cost included.
Its tokens up to there count `weight` times, those beyond once. S follows from how many drafts are verified, promised
ones included: nobody iterates to that fixed point, since the search goes over S, and needs are a function of it. Where
steps spend time on prompts as well, S is only a share of what passes meanwhile, and needs are more by as much.

A speed is promised for a whole answer, so a request that is behind needs more than m now, and one that is ahead less
(its pace). It aims at being a little ahead: whoever aims at just the promised speed misses it half of the time. Pure; a
pace comes from tokens that were committed two steps ago, so it knows nothing of current drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.budget import LEVELS, PACE, Levels, paces
from cluster.messages import LoadReport, SlaTier

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

CATCH_UP_SECONDS, CATCH_UP_TOKENS = 0.5, 8.0
"""What a request is behind, it makes good within so many seconds, and what it is ahead it may lose as fast; where so
many promised tokens take longer, within that: one step's tokens must not turn haste into leisure."""
START_PACE = 1.5
"""Of whoever is exactly on time. It needs its promise alone once it is half of the catch-up time ahead. Simulated, this
and CATCH_UP_SECONDS keep the most promises for what they cost, of those tried (the `sla` scenario)."""


def encode_paces(promised: ArrayLike, seconds: ArrayLike, num_tokens: ArrayLike) -> bytes:
    """A report's `paces`: [R] promised tokens per second (0: none), seconds since the first token, tokens since."""
    speed_R = np.maximum(np.asarray(promised, dtype=np.float64), 1e-9)
    behind_R = np.asarray(seconds, dtype=np.float64) - np.asarray(num_tokens, dtype=np.float64) / speed_R
    paces_R = START_PACE + behind_R / np.maximum(CATCH_UP_SECONDS, CATCH_UP_TOKENS / speed_R)
    return np.clip(np.rint(PACE * paces_R), 0, LEVELS).astype(np.uint8).tobytes()


def needs_by_request(report: LoadReport, floors: Sequence[float]) -> dict[str, float]:
    """Tokens that each request needs from a step, by request id; without promises nobody is named.

    floors: by tier, `BudgetLease.floors`.
    """
    if not any(floors):
        return {}
    needs = np.array(floors)[np.frombuffer(report.tiers, np.uint8)] * paces(report)
    return dict(zip(report.request_ids, needs.tolist(), strict=True))


class Promises:
    """What steps of several engines are worth when tokens up to promised speeds count more, by their seconds.

    Shape letters: I engines, A those asked about, G slots, R requests. Survivals are 255ths here, which fp32 holds
    exactly in half the time of fp64.
    """

    def __init__(self, levels_IGR: Levels, reports: Sequence[LoadReport], tiers: Sequence[SlaTier]) -> None:
        self._survival_IGR = levels_IGR.astype(np.float32)
        # The sure token comes before all drafts.
        self._before_IGR = LEVELS + self._survival_IGR.cumsum(axis=1, dtype=np.float32) - self._survival_IGR
        num_requests = levels_IGR.shape[2]
        self._needs_IR = np.zeros((len(reports), num_requests), np.float32)
        """255ths of a token per second, pace and prompts' share included."""
        self._extra_IR = np.zeros((len(reports), num_requests), np.float32)
        speeds = np.array([tier.min_tokens_per_second for tier in tiers])
        extra = np.array([tier.weight for tier in tiers]) - 1
        for i, report in enumerate(reports):
            owners = np.frombuffer(report.tiers, np.uint8)
            self._needs_IR[i, : len(owners)] = LEVELS * speeds[owners] * paces(report) / report.decode_share
            self._extra_IR[i, : len(owners)] = extra[owners]
        self._running_I = np.array([len(report.tiers) for report in reports])

    def sure_tokens(self, engines_A: Ints, seconds_A: Array) -> Array:
        """[A] of steps of so many seconds that verify nothing."""
        promised_AR = self._extra_IR[engines_A] * np.minimum(self._needs(engines_A, seconds_A), LEVELS)
        return np.asarray(self._running_I[engines_A] + promised_AR.sum(axis=1, dtype=np.float64) / LEVELS)

    def weighted_tokens(self, engines_A: Ints, seconds_A: Array) -> Array:
        """[A, 1 + G * R] of steps of so many seconds that verify their 0, 1, 2, .. slots of highest value.

        Sure tokens included. Never falls as seconds grow; divided by seconds, it never rises, whoever is verified: to
        the precision of fp32.
        """
        survival_AGR = self._survival_IGR[engines_A]
        values = self._needs(engines_A, seconds_A)[:, None] - self._before_IGR[engines_A]
        np.maximum(values, 0, out=values)
        np.minimum(values, survival_AGR, out=values)
        values *= self._extra_IR[engines_A][:, None]
        values += survival_AGR
        ranked_AS = np.negative(values, out=values).reshape(len(values), -1)
        ranked_AS.sort(axis=1)
        tokens = np.empty((len(values), 1 + ranked_AS.shape[1]))
        tokens[:, 0] = -LEVELS * self.sure_tokens(engines_A, seconds_A)
        tokens[:, 1:] = ranked_AS
        np.cumsum(tokens, axis=1, out=tokens)
        tokens /= -LEVELS
        return tokens

    def _needs(self, engines_A: Ints, seconds_A: Array) -> NDArray[np.float32]:
        """[A, R] 255ths of tokens."""
        return np.asarray(self._needs_IR[engines_A] * seconds_A.astype(np.float32)[:, None])
