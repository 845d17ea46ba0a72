"""What a promised speed asks of a step: floors, the prefixes that requests need whatever their drafts return.

A request of a tier with m tokens per second needs 1 + (expected accepted drafts) >= m * S tokens from a step of S
seconds, the drafts' own cost included. The least prefix that gives so many is its floor. S follows from how many drafts
are verified, floors included: nobody iterates to that fixed point, since the search goes over S and floors are a
function of it. A request that can't keep its speed at S, even with all of its drafts, has no floor there.

Pure; survivals are the 255ths of a LoadReport, never those of the current step: whether a request can keep its speed
depends on all of its drafts, so a floor made from current survivals would look at the token it decides about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.budget import LEVELS, survival_levels
from cluster.messages import LoadReport, SlaTier

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def floor_lengths(report: LoadReport, needs: Sequence[float]) -> dict[str, int]:
    """Slots of each floor, by request id; without promises nobody is named.

    needs: tokens per step that each tier asks for, `BudgetLease.floors`.
    """
    if not any(needs):
        return {}
    levels = survival_levels(report)
    asked = np.array(needs)[np.frombuffer(report.tiers, np.uint8)]
    tokens = np.concatenate([np.ones((len(levels), 1)), 1 + levels.cumsum(axis=1) / LEVELS], axis=1)
    lengths = (tokens[:, :-1] < asked[:, None]).sum(axis=1)
    lengths[tokens[:, -1] < asked] = 0
    return dict(zip(report.request_ids, lengths.tolist(), strict=True))


class Floors:
    """The floors of one engine as a function of its step's seconds.

    Rank of a slot: its place when all slots of the engine stand in order of survival, highest first.
    """

    def __init__(self, report: LoadReport, tiers: Sequence[SlaTier]) -> None:
        levels = survival_levels(report)
        owners = np.frombuffer(report.tiers, np.uint8)
        speeds = np.array([tier.min_tokens_per_second for tier in tiers])[owners]
        promised = np.flatnonzero(speeds)
        self._speeds = speeds[promised]
        self._worth = self._speeds * np.array([tier.weight for tier in tiers])[owners[promised]]
        reached = 1 + levels[promised].cumsum(axis=1) / LEVELS  # [P, G] tokens of a step with slots 0..k
        before = np.concatenate([np.ones((len(promised), 1)), reached], axis=1)
        self._longest = before[:, -1] / self._speeds  # [P] longest step at which the speed can be kept

        ranks = np.empty(levels.size, dtype=np.int64)
        ranks[np.argsort(LEVELS - levels.ravel(), kind="stable")] = np.arange(levels.size)
        slots = ranks.reshape(levels.shape)[promised].ravel()
        order = np.argsort(slots)
        self._ranks = slots[order]  # [S] of the promised requests' slots, ascending
        self._survival = levels[promised].ravel()[order] / LEVELS
        self._shortest = (before[:, :-1] / self._speeds[:, None]).ravel()[order]  # shorter steps don't need the slot
        self._until = np.repeat(self._longest, levels.shape[1])[order]

    def kept(self, seconds: Array) -> Array:
        """[C] what the promises are worth that can be kept in steps of so many seconds, in tokens per second."""
        return np.asarray((seconds[:, None] <= self._longest) @ self._worth)

    def kept_without_drafts(self, seconds: float) -> float:
        return float(self._worth[self._speeds * seconds <= 1].sum())

    def expected(self, room: Ints, seconds: Array, cumulative: Array) -> Array:
        """[C] expected accepted drafts when floors come first and survival decides about the rest.

        room [C] drafts, seconds [C] of the step; cumulative [n + 1] sums of the engine's survivals by rank. -inf where
        the floors alone need more room. The best `room` slots are a prefix of the ranks plus the floor slots behind it;
        a prefix and what lies behind it grow together with the prefix's end, so the end is where both fill the room.
        """
        if not len(self._ranks):
            return np.asarray(cumulative[room])
        floor = (self._shortest < seconds[:, None]) & (seconds[:, None] <= self._until)  # [C, S]
        behind = np.cumsum(floor[:, ::-1], axis=1)[:, ::-1]  # floor slots from this one on
        worth_behind = np.cumsum((floor * self._survival)[:, ::-1], axis=1)[:, ::-1]
        enough = self._ranks + behind >= room[:, None]
        first = enough.argmax(axis=1)[:, None]
        found = enough.any(axis=1)
        num_behind = np.where(found, np.take_along_axis(behind, first, 1)[:, 0], 0)
        rest = np.where(found, np.take_along_axis(worth_behind, first, 1)[:, 0], 0.0)
        fits = behind[:, 0] <= room
        return np.where(fits, cumulative[np.where(fits, room - num_behind, 0)] + rest, -np.inf)
