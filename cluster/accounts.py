"""What people are told of the fleet's budget: who may verify how much, what decided that, and whether it came true.

Looks at what the scheduler knows and changes nothing. What binds an engine:

    idle        nothing runs
    undrafted   nobody may have drafts: all are inside prompts, at their end or want none, or theirs didn't pay lately
    load        every draft is verified: the load is low
    rows        as many drafts as a step's rows hold (max_num_batched_tokens)
    cost        one more draft would lower the rate of tokens; with cap 0, drafts don't repay their pass
    promises    promised speeds: without them the budget would be another
    group       the ranks of the lockstep group share one number of rows
    alone       no lease: a part of its lockstep group is missing, or it has just come
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cluster import fleet
from cluster.budget import survival_levels
from cluster.messages import BudgetLease, LoadReport, PositionCalibration, SchedulerMode, SlaTier
from cluster.roster import Company, Entry, Roster, group_of
from cluster.speeds import expected_rate, speeds

ROUNDING = 1e-6
"""Of what budgets are worth when promises count."""

Binding = Literal["idle", "undrafted", "load", "rows", "cost", "promises", "group", "alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccount:
    """One engine. Rates are tokens per second of all its requests; prompts' time is left out of all but `speeds`."""

    replica: str
    """As the metrics name it."""
    engine: str
    group: str
    rank: int
    mode: SchedulerMode
    """Who decided its last step."""
    num_running: int
    num_waiting: int
    cap: int | None
    """None, like all that a lease says: it has none."""
    price: float | None
    padded_tokens: int | None
    epoch: int | None
    floors: tuple[float, ...]
    speeds: tuple[float, ...]
    """By tier: tokens per second that one more request would get."""
    binding: Binding
    predicted_tokens_per_second: float
    """Of steps under this lease, by the cost curve and the expected survivals."""
    predicted_plain_tokens_per_second: float
    """Without drafts."""
    measured_tokens_per_second: float
    """Lately."""
    report_age_seconds: float


@dataclass(frozen=True, slots=True)
class FleetAccount:
    """Everybody, as the scheduler knows them now."""

    tiers: tuple[SlaTier, ...]
    engines: tuple[EngineAccount, ...]
    calibration: tuple[PositionCalibration, ...]
    """How true confidences are lately; of positions that were seen often enough since the scheduler was started."""
    scheduler_age_seconds: float
    """Since it was started, or started again."""


def account(roster: Roster, now: float, age_seconds: float) -> FleetAccount:
    """The fleet at `now`, on the roster's clock."""
    companies = [company for _, each in roster.companies() for company in each]
    whole = {entry.member.engine: company for company in companies for entry in company}
    engines = [_engine(entry, whole.get(entry.member.engine), now) for entry in roster.entries.values()]
    tiers = next((entry.member.tiers for entry in roster.entries.values()), ())
    engines.sort(key=lambda e: (e.replica, e.engine))
    return FleetAccount(tiers, tuple(engines), roster.calibration(), age_seconds)


def _engine(entry: Entry, company: Company | None, now: float) -> EngineAccount:
    member, report, lease = entry.member, entry.report, entry.lease
    rates: list[float] = [0.0, 0.0]
    newcomers: tuple[float, ...] = ()
    if report is not None:
        rates = [expected_rate(report, each, member.curve) for each in (lease or BudgetLease(0), BudgetLease(0))]
    if report is not None and lease is not None:
        newcomers = speeds(report, lease, member.curve, member.tiers, member.max_num_seqs)
    return EngineAccount(
        replica=member.replica,
        engine=member.engine,
        group=member.group,
        rank=member.rank,
        mode=entry.experience.mode,
        num_running=len(report.tiers) if report else 0,
        num_waiting=report.num_waiting if report else 0,
        cap=lease.cap if lease else None,
        price=lease.price if lease else None,
        padded_tokens=lease.padded_tokens if lease else None,
        epoch=lease.epoch if lease else None,
        floors=lease.floors if lease else (),
        speeds=newcomers,
        binding=binding(report, lease, company),
        predicted_tokens_per_second=rates[0],
        predicted_plain_tokens_per_second=rates[1],
        measured_tokens_per_second=entry.experience.tokens_per_second if report and report.tiers else 0.0,
        report_age_seconds=now - entry.said_seconds,
    )


def binding(report: LoadReport | None, lease: BudgetLease | None, company: Company | None) -> Binding:
    """What decided this lease; see the module. `company`: all that step with the engine, itself included."""
    if report is not None and not report.tiers:
        return "idle"
    if report is None or lease is None or company is None:
        return "alone"
    num_slots = int(np.count_nonzero(survival_levels(report)))
    if not num_slots:
        return "undrafted"
    if lease.cap >= num_slots:
        return "load"
    if lease.cap >= report.max_draft_tokens:
        return "rows"
    if _promises_matter(company):
        return "promises"
    return "group" if len(company) > 1 and lease.padded_tokens else "cost"


def _promises_matter(company: Company) -> bool:
    """Whether the company's budget would be another if nothing was promised."""
    tiers = company[0].member.tiers
    if not any(tier.min_tokens_per_second and tier.weight > 1 for tier in tiers):
        return False
    group = replace(group_of(company), previous=())
    nothing = [replace(tier, min_tokens_per_second=0.0) for tier in tiers]
    [free] = fleet.allocate([group], nothing, min_gain=0.0)
    # Worth that is equal but for rounding must not look like a reason.
    [promised] = fleet.allocate([replace(group, previous=free)], tiers, min_gain=ROUNDING)
    return [lease.cap for lease in promised] != [lease.cap for lease in free]
