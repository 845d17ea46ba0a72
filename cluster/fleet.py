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
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.budget import LEVELS, MIN_GAIN, Levels, decode_seconds, survival_levels
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sla import Promises
from cluster.sps import CostCurve

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

ENGINES_AT_ONCE = 8
"""So many are searched together: enough that numpy's calls are long, few enough that their arrays stay in the cache."""


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

    Without drafts a step costs no draft pass: cap 0 means "do not draft". The last budget is kept unless another
    promises more than `min_gain` over it, so that noise does not make the batch size flap. Where speeds are promised,
    the budget is worth the best's but for `min_gain`; else it is the best, or the last one.
    """
    ends = accumulate(len(group.reports) for group in groups)
    batches = groupby(zip(groups, ends, strict=True), key=lambda pair: (pair[1] - 1) // ENGINES_AT_ONCE)
    return [leases for _, batch in batches for leases in _allocate([group for group, _ in batch], tiers, min_gain)]


def _allocate(groups: Sequence[Group], tiers: Sequence[SlaTier], min_gain: float) -> list[list[BudgetLease]]:
    loads = _Loads(groups)
    best_Q, kept_Q = loads.rates.argmax(axis=1), np.array(loads.previous())
    if any(tier.min_tokens_per_second and tier.weight > 1 for tier in tiers):
        options_Q = _Promised(loads, tiers).best(np.maximum(best_Q, 1), kept_Q, min_gain)
    else:
        best_rates, kept_rates = (loads.rates[np.arange(len(groups)), options] for options in (best_Q, kept_Q))
        options_Q = np.where(best_rates - kept_rates > min_gain * kept_rates, best_Q, kept_Q)
    return [loads.leases(q, option, tiers) for q, option in enumerate(options_Q.tolist())]


class _Loads:
    """All options of some groups. Option 0 drafts nothing; option 1 + k drafts and fills the ranks up to T = first + k.

    Shape letters: I engines of the groups, Q groups, A those of either that are asked about, N options but the first,
    G slots, R requests, S slots of all requests.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.reports = [report for group in groups for report in group.reports]
        self.all_alone = len(groups) == len(self.reports)
        self.sizes_Q = np.array([len(group.reports) for group in groups])
        self.starts_Q = np.cumsum([0, *self.sizes_Q])[:-1]
        self.owner_I = np.repeat(np.arange(len(groups)), self.sizes_Q)
        self.running_I = np.array([len(report.tiers) for report in self.reports])
        self.bases_I = self.running_I + [report.num_prefill_tokens for report in self.reports]
        self.levels_IGR = _levels(self.reports)
        missing_IS = _sorted_missing(self.levels_IGR)
        deepens = any(group.curve.deepens for group in groups)
        self.enters_IG = _enters(self.levels_IGR, missing_IS) if deepens else None
        """With so many slots verified, the first of this place in a block is; None where that costs nothing."""
        self.cumulative_IS, self.most_I = _cumulative(missing_IS, [r.max_draft_tokens for r in self.reports])
        self.first_Q = self.by_group(np.maximum, self.bases_I)
        self.spans_Q = self.by_group(np.maximum, self.bases_I + self.most_I) - self.first_Q
        self.running_Q = self.by_group(np.add, self.running_I)
        self.below_I = self.first_Q[self.owner_I] - self.bases_I
        """Slots that are verified already where T is the group's first."""

        # Who has no slot isn't drafted for: near the end, inside a prompt, or too hard (cluster/bypass.py).
        self.drafted_Q = self.by_group(np.maximum, np.count_nonzero(self.levels_IGR[:, :1], axis=(1, 2)))
        self.num_options = int(self.spans_Q.max(initial=0)) + 1
        options_N = np.arange(self.num_options)
        self.seconds_QN = np.empty((len(groups), self.num_options))
        """[Q, N] of a step, the draft pass included."""
        for q, seconds_N in enumerate(self.seconds_QN):
            seconds_N[:] = self._verify_seconds(q, options_N)
        self.without_Q = self.seconds_QN[:, 0].copy()
        """[Q] of a step without drafts; nobody drafts before it."""
        for q, seconds_N in enumerate(self.seconds_QN):
            self._add_draft_seconds(q, seconds_N)
        verified_IN = self.by_option(self.cumulative_IS, np.arange(len(self.reports)))
        self.rates = np.empty((len(groups), 1 + self.num_options))
        """[Q, 1 + N] expected tokens per second of each option, nothing promised. More room than slots never wins."""
        np.divide(self.running_Q, self.without_Q, out=self.rates[:, 0])
        np.add(self.by_group(np.add, verified_IN), self.running_Q[:, None], out=self.rates[:, 1:])
        self.rates[:, 1:] /= self.seconds_QN

    def by_option(self, sums_AS: Array, engines_A: Ints) -> Array:
        """[A, 1 + S] sums over slots, best ones first -> [A, N] what some of the engines verify of them."""
        if self.all_alone:
            return sums_AS[:, : self.num_options]
        verified_AN = np.empty((len(engines_A), self.num_options))
        for row_N, sums_S, i in zip(verified_AN, sums_AS, engines_A.tolist(), strict=True):
            sums_S = sums_S[: self.most_I[i] + 1]
            filled = sums_S[self.below_I[i] :][: self.num_options]
            row_N[: len(filled)], row_N[len(filled) :] = filled, sums_S[-1]
        return verified_AN

    def by_group(self, reduction: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        """[I, ...] -> [Q, ...]"""
        return values if self.all_alone else reduction.reduceat(values, self.starts_Q)

    def _verify_seconds(self, q: int, options_N: Ints) -> Array:
        context = max(report.context_tokens for report in self.groups[q].reports)
        ranks = slice(self.starts_Q[q], self.starts_Q[q] + len(self.groups[q].reports))
        anchors = int(self.running_I[ranks].max(initial=0))
        return decode_seconds(self.groups[q].curve, anchors, int(self.first_Q[q]) - anchors, options_N, context)

    def _add_draft_seconds(self, q: int, seconds_N: Array) -> None:
        """Ranks in lockstep draft whole blocks. An engine that steps alone drafts a slot more than the deepest one that
        is verified (`budget.depth`), here by survival: where promises rank, that comes near."""
        curve, num_drafted = self.groups[q].curve, int(self.drafted_Q[q])
        num_slots = max(len(report.survival) // max(len(report.tiers), 1) for report in self.groups[q].reports)
        if self.enters_IG is None or self.sizes_Q[q] > 1 or not num_slots:
            seconds_N += float(curve.draft_seconds(num_drafted, max(num_slots, 1)))
            return
        seconds_G = curve.draft_seconds(num_drafted, np.minimum(np.arange(num_slots) + 2, num_slots))
        seconds_N += seconds_G[0]
        enters_G = self.enters_IG[self.starts_Q[q]]
        for slot in np.diff(seconds_G).nonzero()[0] + 1:
            seconds_N[enters_G[slot] :] += seconds_G[slot] - seconds_G[slot - 1]

    def previous(self) -> list[int]:
        """[Q] the option that the last leases amount to."""
        return [self._previous(q, group) for q, group in enumerate(self.groups)]

    def _previous(self, q: int, group: Group) -> int:
        if not any(lease.cap for lease in group.previous):
            return 0
        lease = group.previous[0]
        rows = lease.padded_tokens or self.bases_I[self.starts_Q[q]] + lease.cap
        kept = 1 + min(max(int(rows - self.first_Q[q]), 0), int(self.spans_Q[q]))
        return kept if kept > 1 or len(group.reports) > 1 else 0

    def leases(self, q: int, option: int, tiers: Sequence[SlaTier]) -> list[BudgetLease]:
        """The group's, for that option."""
        ranks = range(self.starts_Q[q], self.starts_Q[q] + len(self.groups[q].reports))
        epochs = [lease.epoch + 1 for lease in self.groups[q].previous] or [0] * len(ranks)
        if option == 0:
            seconds = float(self.without_Q[q])
            leases = zip(ranks, epochs, strict=True)
            return [BudgetLease(cap=0, floors=self._floors(i, seconds, tiers), epoch=epoch) for i, epoch in leases]
        seconds, alone = float(self.seconds_QN[q, option - 1]), len(ranks) == 1
        padded, price = (0, self._price(q, option)) if alone else (int(self.first_Q[q] + option - 1), 0.0)
        return [
            BudgetLease(
                cap=self._room(i, option),
                price=price,
                padded_tokens=padded,
                floors=self._floors(i, seconds, tiers),
                epoch=epoch,
            )
            for i, epoch in zip(ranks, epochs, strict=True)
        ]

    def _floors(self, i: int, seconds: float, tiers: Sequence[SlaTier]) -> tuple[float, ...]:
        return tuple(tier.min_tokens_per_second * seconds / self.reports[i].decode_share for tier in tiers)

    def _room(self, i: int, option: int) -> int:
        """Slots that engine i verifies."""
        return int(min(self.below_I[i] + option - 1, self.most_I[i]))

    def _price(self, q: int, option: int) -> float:
        """What the last slot costs at the going rate: below this survival, time is better spent on the next step."""
        i, cap = self.starts_Q[q], self._room(self.starts_Q[q], option)
        last_slot_seconds = self.seconds_QN[q, option - 1] - self.seconds_QN[q, max(option - 2, 0)]
        last_survival = self.cumulative_IS[i, cap] - self.cumulative_IS[i, max(cap - 1, 0)]
        # Rounded to 255ths: where that is up, it would shut out the very slot that it is the value of.
        last_survival = max(last_survival - 0.5 / LEVELS, 0.0)
        return float(min(self.rates[q, option] * last_slot_seconds, last_survival))


class _Promised:
    """All options when promised tokens count more: values where somebody looked, bounds everywhere else.

    Looking at one option of a group sorts its slots, which bounds all others. Verifying as many slots in a shorter step
    gives no more weighted tokens; in a longer one, no more per second. So a few looks find the option, out of hundreds,
    that no other beats by much, and prove it. All groups are looked at together, each at an option of its own.
    """

    def __init__(self, loads: _Loads, tiers: Sequence[SlaTier]) -> None:
        self._loads = loads
        self._promises = Promises(loads.levels_IGR, loads.reports, tiers)
        num_groups, num_options = loads.seconds_QN.shape
        self._rates_QN = 1 / loads.seconds_QN
        self._bounds_QN = np.where(np.arange(num_options) <= loads.spans_Q[:, None], np.inf, -np.inf)
        everybody = np.arange(len(loads.reports))
        sure_I = self._promises.sure_tokens(everybody, loads.without_Q[loads.owner_I])
        self._best_Q = np.zeros(num_groups, np.int64)
        self._values_Q = loads.by_group(np.add, sure_I) / loads.without_Q
        """[Q] of the best option so far."""

    def best(self, guesses_Q: Ints, kept_Q: Ints, min_gain: float) -> Ints:
        """[Q] options that no other beats by `min_gain`: the kept one unless that is beaten.

        guesses_Q: where to look first when nothing is kept, at least 1.
        """
        undrafted_Q = self._values_Q.copy()
        unsure = np.arange(len(kept_Q))
        values_Q = self._look(unsure, np.where(kept_Q, kept_Q, guesses_Q))  # one look bounds all
        enough_Q = np.where(kept_Q, values_Q, undrafted_Q) * (1 + min_gain)
        while True:
            beaten_Q = np.where(self._values_Q > enough_Q, self._values_Q * (1 + min_gain), enough_Q)
            most = self._bounds_QN[unsure].argmax(axis=1)
            hopeful = self._bounds_QN[unsure, most] > beaten_Q[unsure]
            unsure = unsure[hopeful]
            if not unsure.size:
                return np.where(self._values_Q > enough_Q, self._best_Q, kept_Q)
            self._look(unsure, 1 + most[hopeful])

    def _look(self, groups_A: Ints, options_A: Ints) -> Array:
        """[A] values of the options, at least 1, of those groups."""
        loads, at_A, rows = self._loads, options_A - 1, np.arange(len(groups_A))
        rates_AN, rate_A = self._rates_QN[groups_A], self._rates_QN[groups_A, at_A]
        tokens_AN = self._weighted_tokens(groups_A, loads.seconds_QN[groups_A, at_A])
        values_A = tokens_AN[rows, at_A] * rate_A
        # In a shorter step these tokens are the most that there can be; in a longer one these tokens per second, and
        # each request has at least one token, which is worth less per second there.
        running_A1 = loads.running_Q[groups_A, None]
        bounds_AN = tokens_AN - running_A1
        bounds_AN *= np.maximum(rates_AN, rate_A[:, None])
        bounds_AN += running_A1 * rates_AN
        bounds_AN[rows, at_A] = -np.inf
        self._bounds_QN[groups_A] = np.minimum(self._bounds_QN[groups_A], bounds_AN)
        values_before_A = self._values_Q[groups_A]
        better = values_A > values_before_A
        better |= (values_A == values_before_A) & (options_A < self._best_Q[groups_A])
        self._values_Q[groups_A[better]], self._best_Q[groups_A[better]] = values_A[better], options_A[better]
        return values_A

    def _weighted_tokens(self, groups_A: Ints, seconds_A: Array) -> Array:
        """[A, N] of steps of so many seconds, by option."""
        loads = self._loads
        sizes_A = loads.sizes_Q[groups_A]
        engines = np.concatenate([np.arange(loads.starts_Q[q], loads.starts_Q[q] + loads.sizes_Q[q]) for q in groups_A])
        sums = self._promises.weighted_tokens(engines, np.repeat(seconds_A, sizes_A))
        by_option = loads.by_option(sums, engines)
        return by_option if loads.all_alone else np.add.reduceat(by_option, np.cumsum([0, *sizes_A])[:-1])


def _levels(reports: Sequence[LoadReport]) -> Levels:
    """[I, G, R] all reports' survivals; 0 where somebody has fewer slots or requests. Long rows are quickest."""
    tables = [survival_levels(report) for report in reports]
    num_requests, num_slots = (max((table.shape[axis] for table in tables), default=0) for axis in (0, 1))
    levels_IGR = np.zeros((len(tables), num_slots, num_requests), np.uint8)
    for levels_GR, table in zip(levels_IGR, tables, strict=True):
        levels_GR[: table.shape[1], : len(table)] = table.T
    return levels_IGR


def _sorted_missing(levels_IGR: Levels) -> Levels:
    """[I, S] what each engine's slots lack of certainty, best ones first."""
    missing_IS = LEVELS - levels_IGR.reshape(len(levels_IGR), -1)
    missing_IS.sort(axis=1, kind="stable")  # by radix, since these are bytes
    return missing_IS


def _enters(levels_IGR: Levels, missing_IS: Levels) -> Ints:
    """[I, G] how many slots are verified when the first one of each place is: as `admit` breaks ties, by place."""
    best_IG = levels_IGR.max(axis=2, initial=0)
    enters_IG = np.ones(best_IG.shape, np.int64)
    for enters_G, missing_S, best_G in zip(enters_IG, missing_IS, best_IG, strict=True):
        enters_G += missing_S.searchsorted(LEVELS - best_G)
    for slot in range(1, best_IG.shape[1]):
        enters_IG[:, slot] += (levels_IGR[:, :slot] == best_IG[:, slot, None, None]).sum(axis=(1, 2))
    return enters_IG


def _cumulative(missing_IS: Levels, limits: Sequence[int]) -> tuple[Array, Ints]:
    """[I, S + 1] sums of each engine's highest survivals, for 0, 1, .. S slots; [I] how many may be verified.

    Where no more may be, the sums rise no more. Overwrites `missing_IS` there.
    """
    for row, limit in zip(missing_IS, limits, strict=True):
        row[limit:] = LEVELS
    cumulative_IS = np.zeros((len(missing_IS), missing_IS.shape[1] + 1))
    np.cumsum(LEVELS - missing_IS, axis=1, dtype=np.float64, out=cumulative_IS[:, 1:])
    cumulative_IS /= LEVELS
    return cumulative_IS, (missing_IS < LEVELS).sum(axis=1)
