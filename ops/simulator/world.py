"""The simulated fleet: engines that draft, admit, verify and commit by a policy, on clocks that follow the cost curve.

Rounds: in each, every group takes one step, as long as the true curve says for its rank with the most rows. Groups
share nothing but the policy, so their clocks may drift apart. A place whose request ends gets a new one at once (closed
loop). The causality of the real engine is kept: sizes come from reports that are two steps old, ranks from current
survivals, requests that a report doesn't know count as sure to pass.

Shape letters: I engines, Q requests of all engines, G slots of a block, L groups.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cluster.budget import LEVELS, PACE
from cluster.messages import LoadReport, SlaTier
from cluster.sla import START_PACE, encode_paces
from cluster.sps import CostCurve
from ops.simulator.inputs import Acceptance
from ops.simulator.policies import Policy

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

REPORT_AGE_STEPS = 2
PROBE_EVERY_STEPS = 64
WARM_UP = 0.25
"""Share of the rounds that fills the places and is not counted."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated, except by which policy."""

    curve: CostCurve
    acceptance: Acceptance
    loads: tuple[tuple[int, ...], ...]
    """Running requests of each rank, by lockstep group; an engine alone is a group of one."""
    tiers: tuple[SlaTier, ...] = ()
    tier_shares: tuple[float, ...] = (1.0,)
    output_tokens: tuple[int, int] = (64, 512)
    """Each request asks for a uniform number in between."""
    num_rounds: int = 200
    seed: int = 0


@dataclass
class Outcome:
    """What a run came to, after the warm-up."""

    tokens_per_second: float
    """Of the whole fleet."""
    tokens_per_second_per_user: float
    """Mean over the requests that finished: their own tokens over their own time."""
    verified_per_request: float
    """Rows per request and step, its anchor included: the paper's verification budget."""
    accepted_length: float
    wasted_share: float
    """Verified drafts that were rejected."""
    step_milliseconds: float
    attainment: dict[str, float] = field(default_factory=dict)
    """Share of each tier's finished requests that were as fast as promised."""
    num_finished: int = 0


def simulate(fleet: Fleet, policy: Policy) -> Outcome:
    """Run one policy. The same fleet draws the same requests for every policy."""
    return _Run(fleet, policy).run()


class _Run:
    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.fleet, self.policy = fleet, policy
        self.sizes_I = np.array([load for group in fleet.loads for load in group])
        self.starts_I = np.concatenate([[0], np.cumsum(self.sizes_I)])
        ranks = [len(group) for group in fleet.loads]
        self.group_of_I = np.repeat(np.arange(len(ranks)), ranks)
        self.first_of_L = np.concatenate([[0], np.cumsum(ranks)])[:-1]
        self.owner_Q = np.repeat(np.arange(len(self.sizes_I)), self.sizes_I)
        num_requests, self.num_slots = len(self.owner_Q), len(fleet.acceptance.offsets)
        self.draft_L = np.array([float(fleet.curve.draft_seconds(max(g), self.num_slots)) for g in fleet.loads])

        self.generator = np.random.default_rng(fleet.seed)
        self.ease_Q = fleet.acceptance.ease(num_requests, self.generator)
        self.tier_Q = self._draw_tiers(num_requests)
        self.wanted_Q = self.generator.integers(*fleet.output_tokens, num_requests, endpoint=True)
        # Places are met somewhere in the middle of a request; those first requests fill the warm-up.
        self.done_Q = (self.wanted_Q * self.generator.uniform(0, 1, num_requests)).astype(np.int64)
        self.counted_Q = self.done_Q.copy()
        self.began_Q = np.zeros(num_requests)
        self.clock_L = np.zeros(len(ranks))
        self.levels_QG = np.full((num_requests, self.num_slots), LEVELS, np.uint8)
        self.age_Q = np.zeros(num_requests, dtype=np.int64)
        self.undrafted_I = np.zeros(len(self.sizes_I), dtype=np.int64)
        self.reported: deque[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = deque(maxlen=REPORT_AGE_STEPS)
        self.finished: list[tuple[int, float, float]] = []

    def _draw_tiers(self, count: int) -> Ints:
        return self.generator.choice(len(self.fleet.tier_shares), count, p=self.fleet.tier_shares)

    def run(self) -> Outcome:
        warm_up = int(self.fleet.num_rounds * WARM_UP)
        totals = np.zeros(4)  # tokens, verified drafts, request steps, step seconds
        began_L, tokens_L = self.clock_L, np.zeros(len(self.clock_L))
        for number in range(self.fleet.num_rounds):
            if number == warm_up:
                began_L, tokens_L, totals = self.clock_L.copy(), np.zeros(len(self.clock_L)), np.zeros(4)
                self.finished.clear()
            lengths_Q, tokens_Q, seconds_L = self._step()
            tokens_L += np.bincount(self.group_of_I[self.owner_Q], tokens_Q, minlength=len(tokens_L))
            totals += [tokens_Q.sum(), lengths_Q.sum(), len(tokens_Q), seconds_L.mean()]
        return self._outcome(
            totals, float((tokens_L / (self.clock_L - began_L)).sum()), self.fleet.num_rounds - warm_up
        )

    def _outcome(self, totals: Array, tokens_per_second: float, num_rounds: int) -> Outcome:
        tokens, verified, request_steps, seconds = totals
        tier, speed = (np.array([row[column] for row in self.finished]) for column in (0, 1))
        named = {
            tier_.name: float((speed[tier == index] >= tier_.min_tokens_per_second).mean())
            for index, tier_ in enumerate(self.fleet.tiers)
            if (tier == index).any()
        }
        return Outcome(
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_user=float(speed.mean()) if len(speed) else 0.0,
            verified_per_request=1 + verified / request_steps,
            accepted_length=tokens / request_steps,
            wasted_share=float(1 - (tokens - request_steps) / verified) if verified else 0.0,
            step_milliseconds=1000 * seconds / num_rounds,
            attainment=named,
            num_finished=len(self.finished),
        )

    def _step(self) -> tuple[Ints, Ints, Array]:
        """One round: lengths [Q], tokens [Q], seconds [L]."""
        # Drawn whatever the policy does, so that policies meet the same luck.
        confidences = self.fleet.acceptance.confidences(self.ease_Q, self.generator)
        passes = self.generator.random(confidences.shape) < confidences
        survival_QG = confidences.cumprod(axis=1)
        lengths_Q = self._lengths(survival_QG)
        accepted_Q = np.minimum(passes.cumprod(axis=1).sum(axis=1), lengths_Q)

        rows_I = self.sizes_I + np.bincount(self.owner_Q, lengths_Q, minlength=len(self.sizes_I))
        drafting_L = np.add.reduceat(rows_I - self.sizes_I, self.first_of_L) > 0
        seconds_L = self.fleet.curve.step_seconds(np.maximum.reduceat(rows_I, self.first_of_L), 0)
        seconds_L = seconds_L + self.draft_L * drafting_L
        self.clock_L = self.clock_L + seconds_L
        tokens_Q = 1 + accepted_Q
        self.done_Q = self.done_Q + tokens_Q
        self._look(survival_QG, drafting_L[self.group_of_I])
        self._commit()
        return lengths_Q, tokens_Q, seconds_L

    def _lengths(self, survival_QG: Array) -> Ints:
        if len(self.reported) < REPORT_AGE_STEPS:
            return np.full(len(survival_QG), min(self.num_slots, self.policy.max_length), dtype=np.int64)
        new_Q = self.age_Q < REPORT_AGE_STEPS
        levels_QG, paces_Q = self.reported[0]
        levels_QG = np.where(new_Q[:, None], LEVELS, levels_QG).astype(np.uint8)
        paces_Q = np.where(new_Q, round(PACE * START_PACE), paces_Q).astype(np.uint8)
        probes_I = (self.undrafted_I >= PROBE_EVERY_STEPS) & (self.policy.max_length > 0)
        reports = [
            self._report(levels_QG[first:last], self.tier_Q[first:last], paces_Q[first:last])
            for first, last in self._spans()
        ]
        groups = np.split(np.array(reports, dtype=object), self.first_of_L[1:])
        lengths = self.policy.lengths(
            [list(group) for group in groups],
            self.fleet.curve,
            self.fleet.tiers,
            [survival_QG[first:last] for first, last in self._spans()],
        )
        return np.where(probes_I[self.owner_Q], 1, np.concatenate(lengths))

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.starts_I[:-1].tolist(), self.starts_I[1:].tolist(), strict=True))

    def _report(self, levels: NDArray[np.uint8], tiers: Ints, paces: NDArray[np.uint8]) -> LoadReport:
        return replace(
            _IDLE,
            survival=levels.tobytes(),
            paces=paces.tobytes(),
            tiers=tiers.astype(np.uint8).tobytes(),
            request_ids=tuple(map(str, range(len(tiers)))),
        )

    def _look(self, survival_QG: Array, drafting_I: NDArray[np.bool_]) -> None:
        """Engines that drafted know new survivals; the others keep the last ones."""
        drafted = drafting_I[self.owner_Q][:, None]
        self.levels_QG = np.where(drafted, np.rint(survival_QG * LEVELS), self.levels_QG).astype(np.uint8)
        self.undrafted_I = np.where(drafting_I, 0, self.undrafted_I + 1)
        promised_Q = np.array([tier.min_tokens_per_second for tier in self.fleet.tiers] or [0.0])[self.tier_Q]
        seconds_Q = self.clock_L[self.group_of_I[self.owner_Q]] - self.began_Q
        paces = encode_paces(promised_Q, seconds_Q, self.done_Q - self.counted_Q)
        self.reported.append((self.levels_QG, np.frombuffer(paces, np.uint8)))

    def _commit(self) -> None:
        self.age_Q = self.age_Q + 1
        ended = np.flatnonzero(self.done_Q >= self.wanted_Q)
        if not len(ended):
            return
        now = self.clock_L[self.group_of_I[self.owner_Q[ended]]]
        own = self.done_Q[ended] - self.counted_Q[ended]
        speeds = own / (now - self.began_Q[ended])
        self.finished += zip(self.tier_Q[ended].tolist(), speeds.tolist(), own.tolist(), strict=True)
        self.ease_Q[ended] = self.fleet.acceptance.ease(len(ended), self.generator)
        self.tier_Q[ended] = self._draw_tiers(len(ended))
        self.wanted_Q[ended] = self.generator.integers(*self.fleet.output_tokens, len(ended), endpoint=True)
        self.done_Q[ended] = self.counted_Q[ended] = self.age_Q[ended] = 0
        self.began_Q[ended] = now


_IDLE = LoadReport(step=0, num_prefill_tokens=0, context_tokens=0, num_waiting=0, drafted=True)
