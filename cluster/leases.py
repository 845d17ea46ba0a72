"""Leases from the fleet's scheduler, as one engine holds them: which of them a step may use, and what is left of it.

Knows no scheduler, no tensor and no clock: times are the engine's own and are passed in. A lease answers one report of
this engine, so it is known for whom it was made and how old the confidences behind it are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from cluster.budget import survival_levels
from cluster.messages import BudgetLease, LoadReport

KEPT_OFFERS = 3
"""The newest answers may rest on confidences that are too young yet; by the time that the oldest of so many is needed,
the next one is old enough."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A lease and the report that it answers."""

    lease: BudgetLease
    report: LoadReport
    """With its request ids: as the engine made it, not as it was sent."""
    asked_seconds: float
    """When the report went out, on the engine's clock. The lease's time runs from here: a late answer is an old one."""
    drafting: frozenset[str]
    """The requests of the report whose drafts might be verified."""

    @classmethod
    def of(cls, lease: BudgetLease, report: LoadReport, asked_seconds: float) -> Self:
        return cls(lease, report, asked_seconds, drafting(report))

    def fits(self, running: Iterable[str], drafting: Iterable[str], num_prompt_rows: int) -> bool:
        """Whether it was made for the requests that run now, with or without prompts as now, and reckoned with all of
        these drafts: beside prompts a draft costs less than alone."""
        same_kind = (self.report.num_prefill_tokens > 0) == (num_prompt_rows > 0)
        return same_kind and self.drafting.issuperset(drafting) and set(running) == set(self.report.request_ids)

    @property
    def ends_seconds(self) -> float:
        return self.asked_seconds + self.lease.duration_seconds

    def share(self, num_running: int) -> BudgetLease:
        """What a rank of a lockstep group may verify: whatever its own rows leave of those that the group computes.

        The rows are reckoned as the scheduler reckoned them: a row for each running request, and the report's prompts.
        Requests that came since need rows of their own, and those that left leave theirs to drafts.
        """
        own_rows = num_running + self.report.num_prefill_tokens
        return replace(self.lease, cap=max(self.lease.padded_tokens - own_rows, 0))


def drafting(report: LoadReport) -> frozenset[str]:
    """The requests of the report whose drafts might be verified."""
    has_slots = survival_levels(report).max(axis=1, initial=0).tolist()
    return frozenset(name for name, drafts in zip(report.request_ids, has_slots, strict=True) if drafts)


class Offers:
    """The latest offers. `add` may be called by one thread while another asks for the `current` one."""

    def __init__(self) -> None:
        self._offers: tuple[Offer, ...] = ()  # newest first; replaced as a whole

    def add(self, offer: Offer) -> None:
        others = [other for other in self._offers if other.report.step != offer.report.step]
        self._offers = (offer, *others[: KEPT_OFFERS - 1])

    def age(self, now: float) -> float | None:
        """Seconds since the newest lease was asked for; None when there is none or it has ended."""
        newest = next(iter(self._offers), None)  # looked up once: another thread may add one meanwhile
        if newest is None or now >= newest.ends_seconds:
            return None
        return now - newest.asked_seconds

    def current(self, newest_step: int, now: float) -> Offer | None:
        """The newest offer that hasn't ended and rests on a report of `newest_step` or an earlier step, if any."""
        for offer in self._offers:
            if offer.report.step <= newest_step:
                return offer if now < offer.ends_seconds else None
        return None
