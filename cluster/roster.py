"""Who belongs to the fleet and what each of them last said: the scheduler's whole memory, rebuilt from a few reports.

Knows members, groups and how long ago somebody spoke, on a clock that is passed in; decides nothing itself. Whoever is
silent is forgotten, and a lockstep group of which somebody is missing gets no leases: a step of it can't be sized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

from cluster import fleet
from cluster.calibration import Evidence, errors, refit
from cluster.fleet import Group
from cluster.messages import BudgetLease, LoadReport, PositionCalibration, SchedulerMode, SlaTier
from cluster.sps import CostCurve

SILENT_SECONDS = 3.0
"""Who says nothing for so long is forgotten. Idle engines speak as well, more often than this."""
LEASE_SECONDS = 1.0
FADING = 0.9
"""An engine's measured rate is that of about its last ten reports, a second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What an engine says about itself at first, and again now and then, because its curve is learned."""

    engine: str
    """Its own name, which no other engine ever had."""
    replica: str
    """What people call its replica now: the metrics' label."""
    group: str
    """Of its lockstep group; empty for an engine that steps alone."""
    rank: int
    group_size: int
    max_num_seqs: int
    tiers: tuple[SlaTier, ...]
    curve: CostCurve
    temperatures: tuple[float, ...] = ()
    """What its confidence logits are divided by now; empty when there are none."""
    evidence: Evidence | None = None
    """What became of its drafts since it last said so."""


@dataclass(frozen=True, slots=True)
class Experience:
    """What an engine did since it last reported: prompt rows' time left out, as budgets leave it out."""

    mode: SchedulerMode = "plain"
    """Of the last step."""
    num_tokens: float = 0
    """That verify rounds committed."""
    seconds: float = 0.0
    """Of the steps, less what the curve says that prompts took."""

    def and_then(self, mode: SchedulerMode, num_tokens: int, seconds: float) -> Experience:
        """With one more step."""
        return Experience(mode, self.num_tokens + num_tokens, self.seconds + seconds)

    def after(self, earlier: Experience) -> Experience:
        """With what came before it, which counts less and less."""
        return Experience(
            self.mode, self.num_tokens + FADING * earlier.num_tokens, self.seconds + FADING * earlier.seconds
        )

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine gets for a report."""

    known: bool
    """False: introduce yourself; the report was not kept."""
    lease: BudgetLease | None = None
    """None: the engine is on its own for now."""


@dataclass(slots=True)
class Entry:
    """All that is known of one engine."""

    member: Member
    said_seconds: float
    report: LoadReport | None = None
    has_news: bool = False
    """Its report isn't answered yet."""
    experience: Experience = Experience()
    lease: BudgetLease | None = None


Company: TypeAlias = list[Entry]
"""Who steps together, ranks in order."""


class Roster:
    """The fleet as it is known. Every method is quick but `allocate`, whose time is that of `fleet.allocate`."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._temperatures: tuple[float, ...] = ()
        self._evidence = self._recent = Evidence.none(0)

    def introduce(self, member: Member, now: float) -> None:
        """Somebody new, or somebody known whose curve or name has changed."""
        entry = self.entries.setdefault(member.engine, Entry(member, now))
        entry.member, entry.said_seconds = replace(member, evidence=None), now
        if member.evidence is not None and member.temperatures:
            self._learn(member.evidence, member.temperatures)

    def note(self, engine: str, report: LoadReport, experience: Experience, now: float) -> bool:
        """Keep a report. False when nobody of this name has introduced itself."""
        entry = self.entries.get(engine)
        if entry is None:
            return False
        entry.report, entry.has_news, entry.said_seconds = report, True, now
        entry.experience = experience.after(entry.experience)
        return True

    def _learn(self, evidence: Evidence, temperatures: tuple[float, ...]) -> None:
        """All engines have one drafter, so what became of anybody's drafts moves the temperatures of all."""
        if len(self._temperatures) != len(temperatures):  # the first that is heard of it: nothing else is remembered
            self._temperatures = temperatures
            self._evidence = self._recent = Evidence.none(len(temperatures))
        self._recent = (self._recent + evidence).recent()
        self._temperatures, self._evidence = refit(self._evidence + evidence, self._temperatures)

    def calibration(self) -> tuple[PositionCalibration, ...]:
        """How true the fleet's confidences are lately."""
        return errors(self._recent, self._temperatures)

    def forget_silent(self, now: float) -> None:
        """A dead engine must not weigh on the others, nor hold up its group's successor."""
        self.entries = {
            engine: entry for engine, entry in self.entries.items() if now - entry.said_seconds < SILENT_SECONDS
        }

    def lease(self, engine: str) -> BudgetLease | None:
        entry = self.entries.get(engine)
        return entry.lease if entry else None

    def allocate(self) -> int:
        """New leases for everybody who said something since the last ones and can have one; returns how many."""
        num_leases = 0
        alone = set(self.entries)
        for tiers, companies in self.companies():
            alone.difference_update(entry.member.engine for company in companies for entry in company)
            asking = [company for company in companies if any(entry.has_news for entry in company)]
            leases = fleet.allocate([group_of(company) for company in asking], tiers)
            for entry, lease in zip(chain(*asking), chain(*leases), strict=True):
                entry.lease, entry.has_news = self._published(entry, lease), False
                num_leases += 1
        for engine in alone:
            self.entries[engine].lease = None
        return num_leases

    def _published(self, entry: Entry, lease: BudgetLease) -> BudgetLease:
        fits = len(entry.member.temperatures) == len(self._temperatures)
        return replace(
            lease,
            temperatures=self._temperatures if fits else (),
            duration_seconds=LEASE_SECONDS,
        )

    def companies(self) -> Iterator[tuple[tuple[SlaTier, ...], list[Company]]]:
        """Who steps together and is complete, ranks in order; those who promise the same are served together."""
        together: dict[str, dict[int, Entry]] = {}
        for entry in self.entries.values():
            if entry.report is not None:
                member = entry.member
                together.setdefault(member.group or member.engine, {})[member.rank if member.group else 0] = entry
        by_tiers: dict[tuple[SlaTier, ...], list[Company]] = {}
        for ranks in together.values():
            company = [ranks[rank] for rank in sorted(ranks)]
            if not company[0].member.group or (len(company) == company[0].member.group_size and _decodes(company)):
                by_tiers.setdefault(company[0].member.tiers, []).append(company)
        yield from by_tiers.items()


def _decodes(company: Company) -> bool:
    """Where nothing runs there is nothing to share, and a lease for nothing would hold the next request back."""
    return any(entry.report.tiers for entry in company if entry.report is not None)


def group_of(company: Company) -> Group:
    """What steps together, as `fleet.allocate` takes it."""
    reports = [entry.report for entry in company if entry.report is not None]
    # All wait for the prompts of whoever has most.
    share = min(report.decode_share for report in reports)
    reports = [replace(report, decode_share=share) for report in reports]
    previous = [entry.lease for entry in company if entry.lease is not None]
    # Only the fullest rank's steps teach it what they cost: the others wait for it.
    curve = max(company, key=lambda entry: len(entry.report.tiers) if entry.report else 0).member.curve
    return Group(reports, curve, previous if len(previous) == len(company) else ())
