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
Bools = NDArray[np.bool_]


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
        speeds = speeds[promised]
        tokens = np.concatenate([np.ones((len(promised), 1)), 1 + levels[promised].cumsum(axis=1) / LEVELS], axis=1)
        # A slot is in its request's floor in steps longer than `shortest` seconds, up to the longest the request bears.
        shortest = tokens[:, :-1] / speeds[:, None]
        longest = tokens[:, -1] / speeds

        ranks = np.empty(levels.size, dtype=np.int64)
        ranks[np.argsort(LEVELS - levels.ravel(), kind="stable")] = np.arange(levels.size)
        ever = shortest < longest[:, None]
        order = np.argsort(ranks.reshape(levels.shape)[promised][ever])
        self._ranks = ranks.reshape(levels.shape)[promised][ever][order]  # [S] of slots that may be floors, ascending
        self._survival = levels[promised][ever][order] / LEVELS
        self._shortest = shortest[ever][order]
        self._until = np.broadcast_to(longest[:, None], shortest.shape)[ever][order]
        self._starts, self._ends = np.sort(self._shortest), np.sort(self._until)

        worth = speeds * np.array([tier.weight for tier in tiers])[owners[promised]]
        self._bearable, self._worth = _steps_worth(longest, worth)
        self._bearable_alone, self._worth_alone = _steps_worth(1 / speeds, worth)

    def kept(self, seconds: Array) -> Array:
        """[C] what the promises are worth that can be kept in steps of so many seconds, in tokens per second."""
        return np.asarray(self._worth[np.searchsorted(self._bearable, seconds)])

    def kept_without_drafts(self, seconds: float) -> float:
        return float(self._worth_alone[np.searchsorted(self._bearable_alone, seconds)])

    def fit(self, room: Ints, seconds: Array) -> Bools:
        """[C] whether `room` drafts hold the floors of steps of so many seconds."""
        num_floor = np.searchsorted(self._starts, seconds) - np.searchsorted(self._ends, seconds)
        return np.asarray(num_floor <= room)

    def expected(self, room: Ints, seconds: Array, cumulative: Array) -> Array:
        """[C] expected accepted drafts when floors, which must fit, come first and survival decides about the rest.

        room [C] drafts, seconds [C] of the step; cumulative [n + 1] sums of the engine's survivals by rank. The best
        `room` slots are a prefix of the ranks plus the floor slots behind it; a longer prefix has fewer of those
        behind it but never fills less room, so its end is where the room is full.
        """
        if not len(self._ranks):
            return np.asarray(cumulative[room])
        floor = (self._shortest < seconds[:, None]) & (seconds[:, None] <= self._until)  # [C, S]
        behind = floor[:, ::-1].cumsum(axis=1, dtype=np.int32)[:, ::-1]  # floor slots from this one on
        enough = self._ranks + behind >= room[:, None]
        first, found = enough.argmax(axis=1)[:, None], enough.any(axis=1)
        num_behind = np.where(found, np.take_along_axis(behind, first, 1)[:, 0], 0)
        late = floor & (np.arange(floor.shape[1]) >= first) & found[:, None]
        return np.asarray(cumulative[room - num_behind] + late @ self._survival)


def _steps_worth(longest: Array, worth: Array) -> tuple[Array, Array]:
    """[P] the longest steps, ascending; [P + 1] what promises are worth that bear a step longer than the first n."""
    order = np.argsort(longest)
    return longest[order], np.append(worth[order][::-1].cumsum()[::-1], 0.0)
