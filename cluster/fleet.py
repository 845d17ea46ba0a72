"""How many drafts every engine of a fleet may verify: one search over what the steps cost and what drafts return.

Engines that step together form a group: the ranks of a lockstep group, or one engine alone. A group's step lasts as
long as its rank with the most rows needs, so the search goes over T, the rows of that rank: each other rank fills up to
T at no cost. T maximises expected tokens per second, where tokens up to a promised speed count more (`sla`), globally,
because the cost curve may be a jagged staircase. Independent groups share no step, so each is optimal for itself.

Pure: reports that are two steps old in, leases out; nothing here sees a current survival. A report's survivals are
255ths, which sorts and sums 256 engines of 1792 slots in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.budget import LEVELS, MIN_GAIN, Levels, decode_seconds, survival_levels
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sla import Promises
from cluster.sps import CostCurve

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """What steps together."""

    reports: Sequence[LoadReport]
    """One per rank; a single one for an engine that steps alone."""
    curve: CostCurve
    """Seconds of a step by the rows of its largest rank."""
    previous: Sequence[BudgetLease] = ()
    """The ranks' last leases; with none, the group is taken to draft nothing."""


def allocate(
    groups: Sequence[Group], tiers: Sequence[SlaTier] = (), min_gain: float = MIN_GAIN
) -> list[list[BudgetLease]]:
    """A lease for each rank of each group. Reports name their requests' tiers by their place in `tiers`.

    Without drafts a step costs no draft pass: cap 0 means "do not draft". The last budget is kept unless the best
    promises more than `min_gain` over it, so that noise does not make the batch size flap.
    """
    loads = _Loads(groups)
    best, kept = loads.rates.argmax(axis=1).tolist(), loads.previous()
    promised = any(tier.min_tokens_per_second and tier.weight > 1 for tier in tiers)
    leases = []
    for g in range(len(groups)):
        if promised:
            option = loads.best_with_promises(g, max(best[g], 1), kept[g], tiers, min_gain)
        else:
            gain = loads.rates[g, best[g]] - loads.rates[g, kept[g]]
            option = best[g] if gain > min_gain * loads.rates[g, kept[g]] else kept[g]
        leases.append(loads.leases(g, option, tiers))
    return leases


class _Loads:
    """All options of all groups. Option 0 drafts nothing; option 1 + k drafts and fills the ranks up to T = first + k.

    Shape letters: I engines of all groups, Q groups, N options but the first, S sorted slots.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.reports = [report for group in groups for report in group.reports]
        sizes = [len(group.reports) for group in groups]
        self.starts = np.cumsum([0, *sizes])[:-1]
        owner = np.repeat(np.arange(len(groups)), sizes)
        self.running_I = np.array([len(report.tiers) for report in self.reports])
        self.bases_I = self.running_I + [report.num_prefill_tokens for report in self.reports]
        tables = [survival_levels(report) for report in self.reports]
        limits = [report.max_draft_tokens for report in self.reports]
        self.cumulative_IS, self.most_I = _cumulative(tables, limits)
        self.first_Q = self._by_group(np.maximum, self.bases_I)
        self.spans_Q = self._by_group(np.maximum, self.bases_I + self.most_I) - self.first_Q
        self.running_Q = self._by_group(np.add, self.running_I)
        self.below_I = self.first_Q[owner] - self.bases_I
        """Slots that are verified already where T is the group's first."""

        # Who has no slot isn't drafted for: near the end, inside a prompt, or too hard (cluster/bypass.py).
        drafted_I = np.array([np.count_nonzero(table[:, :1]) for table in tables])
        ranks = zip(groups, self._by_group(np.maximum, drafted_I), strict=True)
        draft_Q = np.array([group.curve.draft_seconds(int(most)) for group, most in ranks])
        options_N = np.arange(int(self.spans_Q.max(initial=0)) + 1)
        # Such arrays are megabytes, and making one costs more than filling it: as few as possible.
        self.seconds_QN = np.empty((len(groups), len(options_N)))
        for q, seconds_N in enumerate(self.seconds_QN):
            seconds_N[:] = self._verify_seconds(q, options_N)
        self.without_Q = self.seconds_QN[:, 0].copy()
        """[Q] of a step without drafts; nobody drafts before it."""
        self.seconds_QN += draft_Q[:, None]
        """[Q, N] of a step, the draft pass included."""
        verified_IN = self._verified(len(options_N))
        self.rates = np.empty((len(groups), 1 + len(options_N)))
        """[Q, 1 + N] expected tokens per second of each option, nothing promised. More room than slots never wins."""
        np.divide(self.running_Q, self.without_Q, out=self.rates[:, 0])
        np.add(self._by_group(np.add, verified_IN), self.running_Q[:, None], out=self.rates[:, 1:])
        self.rates[:, 1:] /= self.seconds_QN

    def _verified(self, num_options: int) -> Array:
        """[I, N] drafts that pass, as expected, by option."""
        if not self.below_I.any():
            return self.cumulative_IS[:, :num_options]
        verified_IN = np.empty((len(self.reports), num_options))
        for i, below in enumerate(self.below_I.tolist()):
            sums = self.cumulative_IS[i, below : below + num_options]
            verified_IN[i, : len(sums)], verified_IN[i, len(sums) :] = sums, self.cumulative_IS[i, -1]
        return verified_IN

    def _by_group(self, reduction: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        """[I, ...] -> [Q, ...]"""
        alone = len(self.groups) == len(self.reports)  # a third of the time for what changes nothing
        return values if alone else reduction.reduceat(values, self.starts)

    def _verify_seconds(self, q: int, options_N: Ints) -> Array:
        context = max(report.context_tokens for report in self.groups[q].reports)
        ranks = slice(self.starts[q], self.starts[q] + len(self.groups[q].reports))
        anchors = int(self.running_I[ranks].max(initial=0))
        return decode_seconds(self.groups[q].curve, anchors, int(self.first_Q[q]) - anchors, options_N, context)

    def previous(self) -> list[int]:
        """[Q] the option that the last leases amount to."""
        return [self._previous(q, group) for q, group in enumerate(self.groups)]

    def _previous(self, q: int, group: Group) -> int:
        if not any(lease.cap for lease in group.previous):
            return 0
        lease = group.previous[0]
        rows = lease.padded_tokens or self.bases_I[self.starts[q]] + lease.cap
        kept = 1 + min(max(int(rows - self.first_Q[q]), 0), int(self.spans_Q[q]))
        return kept if kept > 1 or len(group.reports) > 1 else 0

    def leases(self, q: int, option: int, tiers: Sequence[SlaTier]) -> list[BudgetLease]:
        """The group's, for that option."""
        ranks = range(self.starts[q], self.starts[q] + len(self.groups[q].reports))
        epochs = [lease.epoch + 1 for lease in self.groups[q].previous] or [0] * len(ranks)
        if option == 0:
            return [BudgetLease(cap=0, epoch=epoch) for epoch in epochs]
        seconds, alone = float(self.seconds_QN[q, option - 1]), len(ranks) == 1
        padded, price = (0, self._price(q, option)) if alone else (int(self.first_Q[q] + option - 1), 0.0)
        return [
            BudgetLease(
                cap=self._room(i, option),
                price=price,
                padded_tokens=padded,
                floors=tuple(tier.min_tokens_per_second * seconds / self.reports[i].decode_share for tier in tiers),
                epoch=epoch,
            )
            for i, epoch in zip(ranks, epochs, strict=True)
        ]

    def _room(self, i: int, option: int) -> int:
        """Slots that engine i verifies."""
        return int(min(self.below_I[i] + option - 1, self.most_I[i]))

    def _price(self, q: int, option: int) -> float:
        """What the last slot costs at the going rate: below this survival, time is better spent on the next step."""
        i, cap = self.starts[q], self._room(self.starts[q], option)
        last_slot_seconds = self.seconds_QN[q, option - 1] - self.seconds_QN[q, max(option - 2, 0)]
        last_survival = self.cumulative_IS[i, cap] - self.cumulative_IS[i, max(cap - 1, 0)]
        # Rounded to 255ths: where that is up, it would shut out the very slot that it is the value of.
        last_survival = max(last_survival - 0.5 / LEVELS, 0.0)
        return float(min(self.rates[q, option] * last_slot_seconds, last_survival))

    def best_with_promises(self, q: int, start: int, kept: int, tiers: Sequence[SlaTier], min_gain: float) -> int:
        """The best option when promised tokens count more; the kept one unless that promises `min_gain` more."""
        ranks = range(self.starts[q], self.starts[q] + len(self.groups[q].reports))
        options = np.arange(self.spans_Q[q] + 1)
        return _Promised(
            [Promises(self.reports[i], tiers) for i in ranks],
            [np.minimum(self.below_I[i] + options, self.most_I[i]) for i in ranks],
            self.seconds_QN[q, : len(options)],
            float(self.without_Q[q]),
            int(self.running_Q[q]),
        ).best(start, kept, min_gain)


class _Promised:
    """One group's options when promised tokens count more: values where somebody looked, bounds everywhere else.

    Looking at one option sorts its slots, which bounds all others. Verifying as many slots in a shorter step gives no
    more weighted tokens; in a longer one, no more per second. So a few looks find the best of hundreds and prove it.
    """

    def __init__(
        self,
        promises: Sequence[Promises],
        room_N: Sequence[Ints],
        seconds_N: Array,
        seconds_without: float,
        num_running: int,
    ) -> None:
        self._promises, self._room, self._seconds, self._running = promises, room_N, seconds_N, num_running
        self._rates = 1 / seconds_N
        self._bounds = np.full(len(seconds_N), np.inf)
        tokens = sum(rank.weighted_tokens(seconds_without)[0] for rank in promises)
        self._values = {0: float(tokens / seconds_without)}

    def best(self, start: int, kept: int, min_gain: float) -> int:
        """`start`: where to look first when nothing is kept, at least 1."""
        self._look(kept or start)  # one look bounds all
        enough = self._values[kept] * (1 + min_gain)
        while self._bounds.max() > max(enough, *self._values.values()):
            self._look(1 + int(self._bounds.argmax()))
        best = max(self._values, key=lambda option: (self._values[option], -option))
        gain = self._values[best] - self._values[kept]
        return best if gain > min_gain * self._values[kept] else kept

    def _look(self, option: int) -> None:
        if option in self._values:
            return
        at = option - 1
        seconds, rate = self._seconds[at], self._rates[at]
        tokens_N = np.zeros(len(self._seconds))
        for rank, room_N in zip(self._promises, self._room, strict=True):
            tokens_N += rank.weighted_tokens(seconds).take(room_N)
        self._values[option] = float(tokens_N[at] * rate)
        shorter, longer = self._bounds[:at], self._bounds[at:]
        np.minimum(shorter, tokens_N[:at] * self._rates[:at], out=shorter)
        # Each request has at least one token, and that one is worth less per second in a longer step.
        np.minimum(longer, tokens_N[at:] * rate - self._running * (rate - self._rates[at:]), out=longer)
        self._bounds[at] = -np.inf


def _cumulative(tables: Sequence[Levels], limits: Sequence[int]) -> tuple[Array, Ints]:
    """[I, S + 1] sums of each table's highest survivals, for 0, 1, .. S slots; [I] how many may be verified.

    Where no more may be, the sums rise no more.
    """
    widest = max((table.size for table in tables), default=0)
    missing_IS = np.full((len(tables), widest), LEVELS, np.uint8)
    for row, table in zip(missing_IS, tables, strict=True):
        np.subtract(LEVELS, table.ravel(), out=row[: table.size])
    missing_IS.sort(axis=1, kind="stable")  # by radix, since these are bytes
    for row, limit in zip(missing_IS, limits, strict=True):
        row[limit:] = LEVELS
    cumulative_IS = np.zeros((len(tables), widest + 1))
    np.cumsum(LEVELS - missing_IS, axis=1, dtype=np.float64, out=cumulative_IS[:, 1:])
    cumulative_IS /= LEVELS
    return cumulative_IS, (missing_IS < LEVELS).sum(axis=1)
