"""Who decides how much is verified: the policies that the simulator compares, all by the engine's own functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.budget import admit
from cluster.fleet import Group, allocate
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sla import needs_by_request
from cluster.sps import CostCurve

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class Policy:
    """Decides the lengths of a round: reports by group, two steps old, and current survivals by engine."""

    max_length: int = 2**31

    def lengths(
        self,
        groups: Sequence[Sequence[LoadReport]],
        curve: CostCurve,
        tiers: Sequence[SlaTier],
        survivals: Sequence[Array],
    ) -> list[Ints]:
        """[I][R]."""
        raise NotImplementedError


@dataclass
class Fixed(Policy):
    """The same length for all, always: 0 is plain decoding, 1 what a single multi-token-prediction head does."""

    max_length: int

    def lengths(
        self,
        groups: Sequence[Sequence[LoadReport]],
        curve: CostCurve,
        tiers: Sequence[SlaTier],
        survivals: Sequence[Array],
    ) -> list[Ints]:
        return [np.full(len(table), min(self.max_length, table.shape[1])) for table in survivals]


@dataclass
class EachForItself(Policy):
    """Every engine maximises its own expected throughput, as if it stepped alone and nothing were promised."""

    leases: list[list[BudgetLease]] = field(default_factory=list)

    def lengths(
        self,
        groups: Sequence[Sequence[LoadReport]],
        curve: CostCurve,
        tiers: Sequence[SlaTier],
        survivals: Sequence[Array],
    ) -> list[Ints]:
        reports = [report for group in groups for report in group]
        previous = self.leases or [[] for _ in reports]
        self.leases = allocate([Group([r], curve, p) for r, p in zip(reports, previous, strict=True)])
        return _admitted(reports, self.leases, survivals)


@dataclass
class Central(Policy):
    """The fleet's scheduler: one row count per lockstep group, promised speeds first."""

    leases: list[list[BudgetLease]] = field(default_factory=list)

    def lengths(
        self,
        groups: Sequence[Sequence[LoadReport]],
        curve: CostCurve,
        tiers: Sequence[SlaTier],
        survivals: Sequence[Array],
    ) -> list[Ints]:
        previous = self.leases or [[] for _ in groups]
        self.leases = allocate([Group(g, curve, p) for g, p in zip(groups, previous, strict=True)], tiers)
        return _admitted([report for group in groups for report in group], self.leases, survivals, tiers)


def _admitted(
    reports: Sequence[LoadReport],
    leases: Sequence[Sequence[BudgetLease]],
    survivals: Sequence[Array],
    tiers: Sequence[SlaTier] = (),
) -> list[Ints]:
    """What each engine makes of its lease."""
    flat = [lease for group in leases for lease in group]
    weights = np.array([tier.weight for tier in tiers] or [1.0])
    lengths = []
    for report, lease, table in zip(reports, flat, survivals, strict=True):
        needs = list(needs_by_request(report, lease.floors).values()) or 0.0
        own = weights[np.frombuffer(report.tiers, np.uint8)] if tiers else 1.0
        limits = np.full(len(table), table.shape[1])
        lengths.append(np.array(admit(table, limits, lease, needs, own), dtype=np.int64))
    return lengths
