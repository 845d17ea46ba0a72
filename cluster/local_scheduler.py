"""The scheduler that every engine carries: leases from its own reports of two steps ago, by the fleet's own arithmetic.

Knows running sequences, plans and the cost curve; knows no tensor, no drafted token and no clock. The cap and
the price of a step rest on reports that are REPORT_AGE_STEPS old, and on who and what is there to be computed; current
survivals rank, and those under the price are left out (dspark.md section 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from cluster import budget, fleet, sla
from cluster.batcher import Batcher, Chunk, Plan, Sequence
from cluster.budget import LEVELS, survival_levels
from cluster.bypass import Returns, Round
from cluster.config import EngineConfig
from cluster.leases import Offer, Offers
from cluster.messages import BudgetLease, CostCurveError, LoadReport, SchedulerMode, SlaTier, StepResult
from cluster.speeds import expected_rate, rooms, speeds
from cluster.sps import CostCurve, DraftSample, VerifySample

UNLIMITED = BudgetLease(cap=2**31)
"""All that requests and rows allow."""
PLAIN = BudgetLease(cap=0)
FIRST_PROBE_STEPS, LONGEST_PROBE_STEPS = 64, 1024
"""A step that skips drafting learns nothing about drafts: after so many in a row, one drafts to look again. Each time
that it comes to nothing the next look waits twice as long; when load falls, no look is needed to draft again."""
LOOK_EVERY_STEPS, NEAR = 32, 1.25
"""A machine on which all steps draft never sees what a plain one takes, nor the other way round: where the rates come
so near, one step in so many is of the other kind, or a mistake about the times would last."""
LEASE_STEPS = 4
"""A lease stands for so many steps while the same requests decode: what it rests on changes slowly, and searching costs
time."""
REFRESH_EVERY_STEPS = 8
"""The curve learns from so many steps at a time, which is cheaper than from each."""
EXPECTATION_RATE = 0.2
"""How fast expected confidences follow the drafted ones. A block says little about the next block of its request, so a
budget made from the last one alone would give a good block the room of the bad one before it."""
PROBE_RATE = 0.5
"""The same for what a probe finds: there is one in so many steps."""
SHARE_RATE = 0.05
"""How fast the share of decoding follows the steps: about twenty of them tell what newcomers have to expect."""
YIELD_PRIOR_TOKENS, YIELD_FADING, YIELD_FORGETTING = 50.0, 0.98, 0.999
"""Of the drafts that confidences say will pass, a few percent fewer do: those that look best are chosen. The budget
learns how many, over about fifty drafted steps; where a batch just pays or doesn't, that decides. Undrafted steps
forget it, over about a thousand, so that what was bad is tried again."""
REPORT_AGE_STEPS = 2
"""The budget may only use confidences that are at least so old."""


class LocalScheduler:
    """What one engine may verify, step by step."""

    def __init__(
        self, config: EngineConfig, max_drafts: int, curve: CostCurve | None, tiers: tuple[SlaTier, ...] = ()
    ) -> None:
        """`curve` may be None only where nothing is scheduled (plain decoding, or speculation "fixed")."""
        if curve is None and max_drafts and config.speculation == "scheduled":
            raise CostCurveError("scheduled speculation needs a cost curve")
        self._config = config
        self._max_drafts = max_drafts
        self._curve = curve
        self._tiers = tiers
        self._reports: deque[LoadReport] = deque(maxlen=REPORT_AGE_STEPS)
        self._is_informed = False
        """Whether some draft is as old as a report must be."""
        self._num_steps_undrafted = self._num_steps_drafted = self._num_drafts_seen = 0
        self._num_steps_to_plain = LOOK_EVERY_STEPS
        self._is_plain_look = self._is_probe = False
        """Whether the next step is plain only to see what that takes, or drafts only to see what comes of it."""
        self._probe_after_steps = FIRST_PROBE_STEPS
        self._last_lease = UNLIMITED
        self._leased_mode: SchedulerMode = "bypass"
        self._leased_for: tuple[list[Sequence], int] = [], 0
        """Who decoded when the last lease was found, and how many prompt rows there were beside them, in octaves."""
        self._num_steps_leased = 0
        self._offers = Offers()
        self._offer: Offer | None = None
        self._needs: dict[str, float] = {}
        self._returns = Returns()
        self._num_expected = self._num_passed = YIELD_PRIOR_TOKENS
        self._timed: list[tuple[VerifySample, DraftSample | None]] = []
        self._seconds_expected = 0.0
        self._prompts_expected = 0.0
        self._decode_seconds = self._prompts_seconds = 0.0
        self._expected_confidences = [1.0] * max_drafts

    @property
    def curve(self) -> CostCurve | None:
        """As it is now; a value, so another thread may read it."""
        return self._curve

    @property
    def last_report(self) -> LoadReport:
        """Of the last step; before the first, that of an engine on which nothing runs."""
        if self._reports:
            return self._reports[-1]
        return LoadReport(
            step=-1, num_prefill_tokens=0, context_tokens=0, num_waiting=0, drafted=False, newcomer=self._newcomer()
        )

    def outlook(self, num_requests: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """By tier: `speeds.speeds` and `speeds.rooms`, for an engine that has so many requests. () if unscheduled."""
        if self._curve is None:
            return (), ()
        report = self.last_report
        # Who came since the report waits.
        report = replace(report, num_waiting=max(num_requests - len(report.tiers), 0))
        known = report, self._last_lease, self._curve, self._tiers, self._config.max_num_seqs
        return speeds(*known), rooms(*known)

    def offer(self, offer: Offer) -> None:
        """The fleet's scheduler answered. From any thread; the step thread takes it when it is due."""
        self._offers.add(offer)

    def lease_age(self, now: float) -> float | None:
        """Seconds since the engine asked for the newest lease that it holds, used or not; None when it has none."""
        return self._offers.age(now)

    def lease(self, batcher: Batcher, now: float) -> tuple[BudgetLease, SchedulerMode]:
        """How many drafts the next step may verify; it begins at `now` seconds of the engine's clock."""
        if not self._max_drafts:
            return PLAIN, "plain"
        if self._config.speculation == "fixed" or self._curve is None:
            return UNLIMITED, "fixed"
        self._is_informed |= len(self._reports) == REPORT_AGE_STEPS and self._reports[0].drafted
        if not self._is_informed:
            return UNLIMITED, "bypass"  # nothing is known yet: every slot gets its chance
        self._num_steps_leased += 1
        num_prompt_rows = batcher.num_prompt_rows
        decoding = [sequence for sequence in batcher.running if sequence.num_pending == 1]
        self._returns.judge([s.draft_return for s in decoding if batcher.draft_limit(s)], self._pass_seconds)
        offer = self._offers.current(self._reports[0].step, now)
        if offer is not None and self._config.data_parallel_size > 1:
            # Followed from step to step, because all ranks of the group are to have it at once; and no bypass: drafts
            # that are cheap for this rank may be dear for its group.
            self._adopt(offer.share(len(batcher.running)), "lease", offer.report, offer)
        elif (
            self._num_steps_leased >= LEASE_STEPS
            or self._leased_for != (decoding, num_prompt_rows.bit_length())
            or self._has_ended(now)
        ):
            self._search(self._curve, batcher, num_prompt_rows, offer)
            self._leased_for, self._num_steps_leased = (decoding, num_prompt_rows.bit_length()), 0
        self._is_plain_look = self._looks_at_plain(self._curve)
        probe = BudgetLease(cap=max(self._max_drafts, len(batcher.running)))
        self._is_probe = self._probes(self._curve, probe)
        lease = PLAIN if self._is_plain_look else probe if self._is_probe else self._last_lease
        return lease, self._leased_mode

    def _looks_at_plain(self, curve: CostCurve) -> bool:
        """Whether it is due, and plain comes near as far as the curve can tell. A lockstep group's steps aren't one
        rank's to choose."""
        if self._num_steps_to_plain or not self._last_lease.cap or self._config.data_parallel_size > 1:
            return False
        self._num_steps_to_plain = LOOK_EVERY_STEPS
        return self._rate(self._last_lease, curve) < NEAR * self._rate(PLAIN, curve)

    def _probes(self, curve: CostCurve, probe: BudgetLease) -> bool:
        """Whether it is due to draft although that isn't said to pay."""
        if self._last_lease.cap or not self._num_steps_undrafted:
            return False
        if self._num_steps_undrafted >= self._probe_after_steps:
            return True
        if self._num_steps_undrafted % LOOK_EVERY_STEPS or self._config.data_parallel_size > 1:
            return False
        return self._rate(PLAIN, curve) < NEAR * self._rate(probe, curve)

    def _rate(self, lease: BudgetLease, curve: CostCurve) -> float:
        return expected_rate(self._reports[0], lease, curve)

    def _search(self, curve: CostCurve, batcher: Batcher, num_prompt_rows: int, offer: Offer | None) -> None:
        """All that was proposed, if that is cheap; else the fleet's lease, if it was made for such a step; else the
        engine's own, by the same arithmetic."""
        report = self._current_load(batcher, num_prompt_rows)
        if budget.everything_admitted(report, curve, self._tiers):
            self._adopt(UNLIMITED, "bypass", report)
        elif offer is not None and offer.fits(report.request_ids, self._drafting(batcher), num_prompt_rows):
            self._adopt(offer.lease, "lease", report, offer)
        else:
            [[lease]] = fleet.allocate([fleet.Group([report], curve, [self._last_lease])], self._tiers)
            self._adopt(lease, "local", report)

    def _adopt(self, lease: BudgetLease, mode: SchedulerMode, report: LoadReport, offer: Offer | None = None) -> None:
        self._needs = sla.needs_by_request(report, lease.floors)
        if lease.cap and mode != "bypass" and self._config.data_parallel_size == 1:
            promised = self._promised(report.request_ids, report.tiers)
            lease = replace(lease, depth=budget.depth(survival_levels(report) / LEVELS, lease, *promised))
        self._last_lease, self._leased_mode, self._offer = lease, mode, offer

    def _pass_seconds(self, num_requests: int) -> float:
        """Of a draft pass as deep as the last lease lets it be."""
        assert self._curve is not None
        return float(self._curve.draft_seconds(num_requests, min(self._last_lease.depth, self._max_drafts)))

    def _promised(self, request_ids: Seq[str], tiers: Seq[int]) -> tuple[list[float], ArrayLike]:
        """Needs and weights of these requests, as `budget.slot_values` takes them."""
        needs = [self._needs.get(name, 0.0) for name in request_ids]
        return needs, [self._tiers[tier].weight for tier in tiers] if any(needs) else 1.0

    def _has_ended(self, now: float) -> bool:
        return self._offer is not None and now >= self._offer.ends_seconds

    def _drafting(self, batcher: Batcher) -> list[str]:
        """The running requests whose drafts might be verified."""
        return [
            s.request_id
            for s in batcher.running
            if s.num_pending == 1 and s.draft_return.expected and batcher.draft_limit(s)
        ]

    def drafted(self, sequences: Seq[Sequence], num_slots: int) -> None:
        """Learn from the confidences of these sequences' new blocks; there are none when the step drafts nothing."""
        if self._is_plain_look:
            return
        if not sequences:
            self._num_steps_undrafted, self._num_steps_drafted = self._num_steps_undrafted + 1, 0
            self._num_expected = _faded(self._num_expected, YIELD_FORGETTING)
            self._num_passed = _faded(self._num_passed, YIELD_FORGETTING)
            return
        in_vain = self._is_probe and self._num_steps_undrafted >= self._probe_after_steps
        self._num_steps_undrafted, self._num_steps_drafted = 0, self._num_steps_drafted + 1
        self._num_steps_to_plain = max(self._num_steps_to_plain - 1, 0)
        if in_vain:
            self._probe_after_steps = min(2 * self._probe_after_steps, LONGEST_PROBE_STEPS)
        elif self._num_steps_drafted >= FIRST_PROBE_STEPS:  # it pays again
            self._probe_after_steps = FIRST_PROBE_STEPS
        self._num_drafts_seen += 1
        for sequence in sequences:
            if not sequence.expected_survival:
                sequence.expected_confidences = list(self._expected_confidences)
        rate = PROBE_RATE if self._is_probe else EXPECTATION_RATE
        rate = max(rate, 1 / self._num_drafts_seen)  # first, the plain mean
        for slot in range(num_slots):
            for sequence in sequences:
                _follow(sequence.expected_confidences, slot, sequence.confidences[slot], rate)
            mean = sum(sequence.confidences[slot] for sequence in sequences) / len(sequences)
            _follow(self._expected_confidences, slot, mean, rate)
        for sequence in sequences if self._curve is not None else ():  # else nobody reads it
            sequence.expected_survival = self._encoded(sequence.expected_confidences)

    def admit(self, plan: Plan, lease: BudgetLease) -> list[int]:
        """The lengths of the prefixes to verify, one for each drafted chunk of the plan."""
        chunks = plan.drafted
        limits = [len(chunk.proposed) for chunk in chunks]
        if not chunks or (sum(limits) <= plan.max_drafts and not lease.price):
            return limits
        confidences = [chunk.sequence.confidences for chunk in chunks]
        survivals = np.minimum(self._passing * np.cumprod(confidences, axis=1), 1.0)  # as reports have them
        requests = [chunk.sequence.request for chunk in chunks]
        promised = self._promised([r.request_id for r in requests], [r.tier for r in requests])
        return budget.admit(survivals, limits, replace(lease, cap=plan.max_drafts), *promised)

    def learn(self, chunks: Seq[Chunk], num_known: Seq[int], num_passed: Seq[int]) -> None:
        """From what became of a step's drafts, of which `num_known` say something: how many pass of those expected to.

        It counts in the rows that are made at the next draft, for budgets of two steps after that, and when the next
        drafts are held against the price.
        """
        pairs = zip(chunks, num_known, strict=True)
        expected = sum(sum(budget.survival(chunk.sequence.confidences[:known])) for chunk, known in pairs)
        self._num_expected = _faded(self._num_expected, YIELD_FADING) + expected
        self._num_passed = _faded(self._num_passed, YIELD_FADING) + sum(num_passed)

    def report(
        self, step: int, plan: Plan, batcher: Batcher, num_waiting: int, drafted: bool, now: float
    ) -> LoadReport:
        """The summary of a step that ended at `now` seconds of the engine's clock; kept for the lease two steps on."""
        running, newcomer = batcher.running, self._newcomer()
        report = LoadReport(
            step=step,
            # Without a curve nobody reads it.
            survival=self._survivals(running, batcher, newcomer) if self._curve is not None else b"",
            tiers=bytes(sequence.request.tier for sequence in running),
            paces=self._paces(running, now) if self._tiers else b"",
            request_ids=tuple(sequence.request_id for sequence in running),
            max_draft_tokens=self._draft_room(batcher),
            num_prefill_tokens=plan.num_prefill_tokens,
            context_tokens=plan.context_tokens,
            num_waiting=num_waiting,
            drafted=drafted,
            newcomer=newcomer,
            decode_share=self._decode_share(plan),
        )
        self._reports.append(report)
        decoded = plan.decoding
        drafts = tuple((chunk.sequence.draft_return, chunk.num_accepted) for chunk in decoded if chunk.proposed)
        num_tokens = sum(1 + chunk.num_accepted for chunk in decoded)
        if decoded:  # else nobody made tokens, and the rate at which they are made stays what it was
            self._returns.observe(Round(drafts, num_tokens, self._seconds_expected))
        return report

    def _decode_share(self, plan: Plan) -> float:
        """Of LoadReport, this step included."""
        if plan.decoding:  # else a prompt keeps nobody waiting
            self._decode_seconds += SHARE_RATE * (self._seconds_expected - self._decode_seconds)
            self._prompts_seconds += SHARE_RATE * (self._prompts_expected - self._prompts_seconds)
        total = self._decode_seconds + self._prompts_seconds
        return self._decode_seconds / total if total else 1.0

    def predict(self, plan: Plan) -> tuple[float, float, float] | None:
        """Seconds that the curve expects of the plan, of its anchors alone, and of its prompt rows beside them."""
        # Without rows, as while only other replicas of a group have any, none.
        self._seconds_expected = self._prompts_expected = 0.0
        if self._curve is None or not plan.chunks:
            return None
        without_drafts = plan.num_tokens - sum(chunk.num_admitted for chunk in plan.drafted)
        num_anchors = len(plan.decoding)
        sizes = [plan.num_tokens, without_drafts, num_anchors]
        verify, plain, anchors = self._curve.step_seconds(sizes, plan.context_tokens).tolist()
        if not num_anchors:
            anchors = 0.0  # a curve has no such point
        num_slots = max((len(chunk.proposed) for chunk in plan.drafted), default=0)
        draft = float(self._curve.draft_seconds(len(plan.drafted), num_slots))
        self._prompts_expected = plain - anchors
        self._seconds_expected = verify + draft - self._prompts_expected
        return verify + draft, anchors, plain - anchors

    def refresh(self, result: StepResult) -> None:
        """The curve follows the machine: it learns from every step, some of them at a time."""
        if self._curve is None or result.predicted is None:
            return
        seconds = result.seconds - result.draft_seconds
        verify = VerifySample(result.num_tokens, result.report.context_tokens, seconds)
        num_drafted = sum(verify_round.num_proposed > 0 for verify_round in result.rounds)
        draft = DraftSample(num_drafted, result.num_slots, result.draft_seconds) if num_drafted else None
        self._timed.append((verify, draft))
        if len(self._timed) == REFRESH_EVERY_STEPS:
            self._curve = self._curve.observed(self._timed)
            self._timed = []

    def _current_load(self, batcher: Batcher, num_prompt_rows: int) -> LoadReport:
        """The report of two steps ago, less the requests that have left, plus those that came since; with the prompts
        of the step to come, beside which drafts cost another price."""
        report, size, running = self._reports[0], self._max_drafts, batcher.running
        known = {name: index for index, name in enumerate(report.request_ids)}
        places = [known.get(sequence.request_id) for sequence in running]
        rows = [b"" if place is None else report.survival[place * size :][:size] for place in places]
        # Who was absent or inside its prompt then has not been drafted since: what is expected of it is no younger.
        rows = [
            row if any(row) else self._survivals([sequence], batcher, report.newcomer)
            for sequence, row in zip(running, rows, strict=True)
        ]
        start = round(budget.PACE * sla.START_PACE)
        paces = [start if place is None else report.paces[place] for place in places] if self._tiers else []
        return replace(
            report,
            survival=b"".join(rows),
            tiers=bytes(sequence.request.tier for sequence in running),
            paces=bytes(paces),
            request_ids=tuple(sequence.request_id for sequence in running),
            max_draft_tokens=self._draft_room(batcher),
            num_prefill_tokens=num_prompt_rows,
        )

    def _survivals(self, sequences: Seq[Sequence], batcher: Batcher, newcomer: bytes) -> bytes:
        """Rows of a report. `newcomer`: of whoever was never drafted for."""
        # None inside a prompt, none for whom drafting doesn't pay.
        drafted = [s.num_pending == 1 and s.draft_return.expected for s in sequences]
        limits = [batcher.draft_limit(s) if yes else 0 for s, yes in zip(sequences, drafted, strict=True)]
        size = self._max_drafts
        expected = [s.expected_survival or newcomer for s in sequences]
        return b"".join(row[:limit].ljust(size, b"\0") for row, limit in zip(expected, limits, strict=True))

    def _draft_room(self, batcher: Batcher) -> int:
        """Of the next step."""
        return batcher.draft_room(sum(sequence.num_pending == 1 for sequence in batcher.running))

    @property
    def _passing(self) -> float:
        """How many drafts pass, of each that confidences say will."""
        return self._num_passed / self._num_expected

    def _newcomer(self) -> bytes:
        return self._encoded(self._expected_confidences)

    def _encoded(self, confidences: list[float]) -> bytes:
        """One row of a report."""
        passing = self._passing
        survivals = [min(passing * p, 1.0) for p in budget.survival(confidences)]
        return budget.encode_survival([survivals], self._max_drafts)

    def _paces(self, running: list[Sequence], now: float) -> bytes:
        speeds = [self._tiers[s.request.tier].min_tokens_per_second for s in running]
        seconds = [now - s.began_seconds if s.began_seconds else 0.0 for s in running]
        return sla.encode_paces(speeds, seconds, [max(s.num_output - s.began_output, 0) for s in running])


def _faded(num_tokens: float, fading: float) -> float:
    """What was counted counts less, down to the prior."""
    return YIELD_PRIOR_TOKENS + fading * (num_tokens - YIELD_PRIOR_TOKENS)


def _follow(expected: list[float], slot: int, seen: float, rate: float) -> None:
    expected[slot] += rate * (seen - expected[slot])
