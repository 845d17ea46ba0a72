"""One engine: requests in, steps, token events out. Read this file first.

A step is four verbs. DRAFT: the drafter proposes tokens for each decoding sequence. ADMIT: how many of them are worth
verifying. VERIFY: anchors, admitted drafts and prompt chunks go through the target as one ragged batch, and acceptance
says what was generated. COMMIT: sequences grow, events and the step's report come out.

The plan (which rows, whose blocks) and the cap on drafts are made before DRAFT from what earlier steps reported, so no
drafted token can influence how many drafts are verified: that keeps the output's distribution exactly the target's.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from cluster import verifier
from cluster.batcher import Batcher, Chunk, Plan, Sequence
from cluster.calibration import Blocks, Evidence
from cluster.calibrator import Calibrator
from cluster.config import EngineConfig
from cluster.kv_cache import BlockPool
from cluster.leases import Offer
from cluster.local_scheduler import LocalScheduler
from cluster.messages import (
    BudgetLease,
    FinishReason,
    InvalidRequestError,
    LoadReport,
    QueueFullError,
    Request,
    SlaTier,
    Span,
    StepPrediction,
    StepResult,
    TokenEvent,
    VerifyRound,
)
from cluster.shard import Shard, StepTensors
from cluster.sps import CostCurve
from cluster.verifier import Outcome
from drafter.interface import Draft
from drafter.speculative import SamplingRows, draft_sampler

MAX_RETRY_AFTER_SECONDS = 60.0


class Engine:
    """Continuous batching with speculation on a replica's leader. `add`, `abort`: from any thread; `step`: from one."""

    def __init__(
        self,
        config: EngineConfig,
        shard: Shard,
        curve: CostCurve | None,
        clock: Callable[[], float] = time.perf_counter,
        tiers: tuple[SlaTier, ...] = (),
    ) -> None:
        """`curve` may be None only where nothing is scheduled (plain decoding, or speculation "fixed")."""
        self.max_drafts = _max_drafts(config, shard.num_draft_slots)
        self._config = config
        self._shard = shard
        self._scheduler = LocalScheduler(config, self.max_drafts, curve, tiers)
        self._calibrator = Calibrator(shard.temperatures)
        self.clock = clock
        self.tiers = tiers
        self._pool = BlockPool(config.num_kv_blocks, config.kv_block_size, config.enable_prefix_caching)
        self._batcher = Batcher(config, self._pool, self.max_drafts)
        self._lock = threading.Lock()
        self._sequences: dict[str, Sequence] = {}
        self._added: list[Sequence] = []
        self._aborted: list[Sequence] = []
        self._finish_times: deque[float] = deque(maxlen=32)
        self._num_steps = 0

    # --- requests ---

    def add(self, request: Request) -> None:
        """Queue a request for the next step. Raises InvalidRequestError or QueueFullError."""
        self._check(request)
        seed = request.sampling.seed
        sequence = Sequence(request, secrets.randbits(63) if seed is None else seed & (2**63 - 1))
        with self._lock:
            if request.request_id in self._sequences:
                raise InvalidRequestError("request_id", f"{request.request_id!r} is already running")
            if len(self._sequences) >= self._config.capacity:
                raise QueueFullError(self._retry_after_seconds())
            if not self._sequences:
                self._finish_times.clear()  # the idle stretch before says nothing about how fast places come free
            self._sequences[request.request_id] = sequence
            self._added.append(sequence)

    def abort(self, request_id: str) -> None:
        """End a request at the next step, which frees its blocks; nothing happens if it isn't there any more."""
        with self._lock:
            if sequence := self._sequences.get(request_id):
                self._aborted.append(sequence)

    def offer(self, lease: BudgetLease, report: LoadReport, asked_seconds: float) -> None:
        """The fleet's scheduler answers a report of this engine, which was sent when `clock` said `asked_seconds`.

        From any thread. Steps use it once the report is old enough, as long as it lasts and their requests are its own.
        """
        self._scheduler.offer(Offer.of(lease, report, asked_seconds))
        if lease.temperatures:
            self.calibrate(lease.temperatures)

    @property
    def curve(self) -> CostCurve | None:
        """What steps cost, as learned so far; None where nothing is scheduled."""
        return self._scheduler.curve

    @property
    def last_report(self) -> LoadReport:
        """Of the last step. From any thread."""
        return self._scheduler.last_report

    def outlook(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """`speeds` and `rooms` of EngineHealth, under the lease of the last step. From any thread."""
        return self._scheduler.outlook(self.num_running + self.num_waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        return len(self._batcher.running)

    @property
    def num_waiting(self) -> int:
        return len(self._batcher.waiting) + len(self._added)

    @property
    def num_free_kv_blocks(self) -> int:
        return self._pool.num_free

    def request_ids(self) -> tuple[str, ...]:
        """Everything that has been added and not finished."""
        with self._lock:
            return tuple(self._sequences)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """By slot: what confidence logits are divided by now. Empty without a confidence head."""
        return self._calibrator.temperatures

    def take_evidence(self) -> Evidence:
        """What became of drafts since the last time. From any thread; who never asks leaves the engine to itself."""
        return self._calibrator.take()

    def return_evidence(self, evidence: Evidence) -> None:
        """It was taken, but didn't arrive. From any thread."""
        self._calibrator.give_back(evidence)

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        """Draft with these from the next step on. From any thread. ValueError when they don't fit the drafter."""
        self._calibrator.offer(temperatures)

    # --- the step ---

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Run one step. Call it while there is work, and without any every `shard.idle_seconds`."""
        started = self.clock()
        if temperatures := self._calibrator.due():
            self._shard.calibrate(temperatures)
        aborted = self._receive()
        lease, mode = self._scheduler.lease(self._batcher, started)
        lease_age = self._scheduler.lease_age(started)
        plan = self._batcher.plan(lease.cap, lease.depth)
        rows = verifier.sampling_rows([chunk.sequence for chunk in plan.anchored], self._num_steps)

        draft_started = self.clock()
        draft = self._draft(plan, rows)
        draft_seconds = self.clock() - draft_started
        self._admit(plan, lease)
        predicted = self._scheduler.predict(plan)
        outcomes, forward = self._verify(plan, draft, rows)
        self._learn(plan, draft, outcomes)
        events, rounds = self._commit(plan, outcomes, forward)

        report = self._scheduler.report(
            self._num_steps, plan, self._batcher, self.num_waiting, draft is not None, self.clock()
        )
        result = StepResult(
            step=self._num_steps,
            events=(*aborted, *events),
            report=report,
            num_tokens=plan.num_tokens,
            seconds=self.clock() - started,
            draft_seconds=draft_seconds,
            rounds=tuple(rounds),
            mode=mode,
            lease_age_seconds=lease_age,
            cap=plan.max_drafts,
            # A replica that waited for a larger one of its group says nothing about what its own rows cost.
            predicted=StepPrediction(*predicted) if predicted and forward and forward.is_largest else None,
            num_running=self.num_running,
            num_free_kv_blocks=self._pool.num_free,
            num_preempted=plan.num_preempted,
            num_prompt_tokens=plan.num_prompt_tokens,
            num_cached_prompt_tokens=plan.num_cached_prompt_tokens,
            calibration=self._calibrator.report(),
        )
        self._scheduler.refresh(result)
        self._num_steps += 1
        return result

    def _receive(self) -> list[TokenEvent]:
        """Take in what was added and aborted since the last step."""
        with self._lock:
            added, aborted, self._added, self._aborted = self._added, self._aborted, [], []
        for sequence in added:
            self._batcher.add(sequence)
        # Who ended meanwhile may have a successor of its name.
        return [self._finish(s, "abort") for s in aborted if self._sequences.get(s.request_id) is s]

    def _draft(self, plan: Plan, rows: SamplingRows) -> Draft | None:
        """DRAFT: propose tokens for every chunk that may have some. No more slots than could be admitted."""
        chunks = [chunk for chunk in plan.chunks if chunk.max_drafts]
        if not chunks:
            if plan.decoding:
                self._scheduler.drafted([], 0)
            return None
        sequences = [chunk.sequence for chunk in chunks]
        anchored = plan.anchored
        if len(chunks) < len(anchored):
            rows = rows.select(torch.tensor([i for i, chunk in enumerate(anchored) if chunk.max_drafts]))
        num_slots = max(chunk.max_drafts for chunk in chunks)
        draft = self._shard.draft(
            anchors=[s.tokens[-1] for s in sequences],
            num_context=[s.num_computed for s in sequences],
            block_ids=[s.block_ids for s in sequences],
            sampler=draft_sampler(rows, num_slots, self._shard.target_ids),
            num_slots=num_slots,
        )
        tokens, confidences = draft.tokens.tolist(), draft.confidences.tolist()
        for chunk, proposed, confidence in zip(chunks, tokens, confidences, strict=True):
            chunk.proposed = proposed[: chunk.max_drafts]
            chunk.sequence.confidences = confidence
        self._scheduler.drafted(sequences, num_slots)
        return draft

    def _admit(self, plan: Plan, lease: BudgetLease) -> None:
        """ADMIT: the lengths of the prefixes to verify. Current survivals rank; cap and price are older."""
        for chunk, length in zip(plan.drafted, self._scheduler.admit(plan, lease), strict=True):
            chunk.num_admitted = length

    def _verify(
        self, plan: Plan, draft: Draft | None, rows: SamplingRows
    ) -> tuple[dict[str, Outcome], StepTensors | None]:
        """VERIFY: one forward of all rows, then acceptance: an outcome for every chunk that reached its anchor."""
        forward = self._shard.forward(
            [Span(chunk.rows, chunk.start, chunk.sequence.block_ids, chunk.num_logits) for chunk in plan.chunks]
        )
        if forward is None:  # all that was left has been aborted, or only other replicas of the group have work
            return {}, None
        anchored = plan.anchored
        outcomes = verifier.verify(
            forward.logits_MV,
            [chunk.sequence for chunk in anchored],
            [chunk.drafts for chunk in anchored],
            draft and _rows_for(anchored, draft),
            self._shard.target_ids,
            [self._batcher.num_left(chunk.sequence) for chunk in anchored],
            rows,
        )
        return {c.sequence.request_id: outcome for c, outcome in zip(anchored, outcomes, strict=True)}, forward

    def _learn(self, plan: Plan, draft: Draft | None, outcomes: dict[str, Outcome]) -> None:
        """COMMIT: what became of the admitted drafts, against what their confidences said."""
        if draft is None or not self._calibrator.temperatures:
            return
        chunks = plan.drafted
        known, passed = zip(*(_known_and_passed(c, outcomes[c.sequence.request_id]) for c in chunks), strict=True)
        self._scheduler.learn(chunks, known, passed)
        self._calibrator.observe(
            Blocks(
                confidences=draft.confidences.numpy(),
                num_known=known,
                num_passed=passed,
                coupled=[chunk.sequence.request.sampling.seed is not None for chunk in chunks],
            )
        )

    def _commit(
        self, plan: Plan, outcomes: dict[str, Outcome], forward: StepTensors | None
    ) -> tuple[list[TokenEvent], list[VerifyRound]]:
        """COMMIT: final rows become draft context, sequences grow, the finished ones leave."""
        num_final, next_tokens = [], []
        for chunk in plan.chunks:
            outcome = outcomes.get(chunk.sequence.request_id)
            num_final.append(chunk.num_rows + (len(outcome.token_ids) - 1 if outcome else 0))
            next_tokens.append(outcome.token_ids[-1] if outcome else chunk.next_token)
        if forward is not None:
            self._shard.commit_features(forward, num_final, next_tokens)
        events, rounds = [], []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            outcome = outcomes.get(sequence.request_id)
            if outcome and sequence.num_output and chunk.num_rows == 1:  # the token that a prompt ends in is no round
                rounds.append(self._count(chunk, outcome))
            if outcome and not sequence.began_seconds:
                sequence.began_seconds = self.clock()
                sequence.began_output = sequence.num_output + len(outcome.token_ids)
            self._batcher.commit(chunk, outcome.token_ids if outcome else [])
            if outcome and outcome.finish_reason:
                events.append(self._finish(sequence, outcome.finish_reason, outcome))
            elif outcome:
                events.append(TokenEvent(sequence.request_id, tuple(outcome.token_ids), outcome.logprobs))
        return events, rounds

    def _count(self, chunk: Chunk, outcome: Outcome) -> VerifyRound:
        sequence = chunk.sequence
        num_accepted = len(outcome.token_ids) - 1
        verify_round = VerifyRound(len(chunk.proposed), chunk.num_admitted, num_accepted, sequence.request.tier)
        chunk.num_accepted = num_accepted
        sequence.num_rounds += 1
        sequence.num_drafted += verify_round.num_proposed
        sequence.num_verified += verify_round.num_verified
        sequence.num_accepted += verify_round.num_accepted
        return verify_round

    def _finish(self, sequence: Sequence, reason: FinishReason, outcome: Outcome | None = None) -> TokenEvent:
        self._batcher.remove(sequence)
        with self._lock:
            del self._sequences[sequence.request_id]
        self._finish_times.append(self.clock())
        return TokenEvent(
            sequence.request_id,
            tuple(outcome.token_ids) if outcome else (),
            outcome.logprobs if outcome else None,
            finish_reason=reason,
            stats=sequence.stats(),
        )

    def _retry_after_seconds(self) -> float:
        """When the next place should be free: the mean time between the latest finishes."""
        if not self._finish_times:
            return 1.0
        mean = (self.clock() - self._finish_times[0]) / len(self._finish_times)
        return min(max(1.0, mean), MAX_RETRY_AFTER_SECONDS)

    def _check(self, request: Request) -> None:
        """Raises InvalidRequestError for what no step could run; ranges are checked where people write them."""
        self._batcher.check(request)
        if not 0 <= request.tier < max(len(self.tiers), 1):
            raise InvalidRequestError("tier", f"{request.tier} is none of the {len(self.tiers)} SLA tiers")
        size = self._shard.vocab_size
        sampling = request.sampling
        for name, token_ids in (
            ("prompt", request.prompt_token_ids),
            ("emitted", request.emitted_token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
                raise InvalidRequestError(name, f"token ids must lie in 0..{size - 1}")


def _max_drafts(config: EngineConfig, block_size: int) -> int:
    """The engine's own limit; `block_size` is 0 without a drafter."""
    asked = config.num_speculative_tokens
    if asked is None:
        return block_size
    if asked > block_size:
        raise ValueError(f"num_speculative_tokens is {asked}, but the drafter's block holds {block_size} tokens")
    return asked


def _known_and_passed(chunk: Chunk, outcome: Outcome) -> tuple[int, int]:
    """How many of the chunk's leading drafts have a known outcome that says something, and how many of them passed."""
    sequence, drafts = chunk.sequence, chunk.drafts
    if verifier.edits_logits(sequence.request.sampling, sequence.num_output):
        return 0, 0
    num_passed = len(outcome.token_ids) - 1
    # The last token replaced a draft, unless it is that draft: then it ended the request, and what follows is unknown.
    if num_passed < len(drafts) and outcome.token_ids[-1] == drafts[num_passed]:
        return num_passed + 1, num_passed + 1
    return len(drafts), num_passed


def _rows_for(anchored: list[Chunk], draft: Draft) -> Draft:
    """The draft with one row per anchored chunk; rows of chunks without drafts are never looked at."""
    if all(chunk.proposed for chunk in anchored):
        return draft
    rows, index = [], 0
    for chunk in anchored:
        rows.append(index if chunk.proposed else 0)
        index += bool(chunk.proposed)
    order = torch.tensor(rows)
    return Draft(draft.tokens[order], draft.draft_ids[order], draft.probabilities[order], draft.confidences[order])
