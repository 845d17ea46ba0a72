"""Every metric of the system: its name, type, labels and buckets, and nothing about where the numbers come from.

Four groups: what an engine knows (EngineMetrics, from StepResults), what only the HTTP side knows (ServiceMetrics,
times as a client feels them), what the fleet's scheduler does (SchedulerMetrics), and what is left to tell of engines
that are gone (HubMetrics). Each process fills a registry of its own; exposition.py joins their texts into one scrape.

Accepted length = 1 + the sum over positions of accepted / rounds: both are derived from the same VerifyRounds, so they
can't disagree. Position 0 is the first draft token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.messages import FinishReason, SchedulerMode, StepResult, VerificationMode, VerifyRound

DEFAULT_TIER = "default"
"""The tier of every request where none are configured."""

Promise = Literal["ttft", "speed", "answer"]
"""What a tier promises: a first token in time, tokens at a speed, and, where either is, an answer at all."""
Admission = Literal["met", "waited", "unmet", "unknown"]
"""How a request with a promised speed got to its replica: one that can keep it, at once or after a wait; one that
can't, because none could; or any, because no engine has said what it can do."""
ShedReason = Literal["queue_full", "tier_unmet", "engine_unavailable"]
"""Why no engine took a request: the error codes that its client gets."""

STEP_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ACCEPTED_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)
RATIO_BUCKETS = (0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
EXPERT_LOAD_CHOICES = 16384
"""So often must experts of a layer be chosen before its balance is judged anew: few choices are uneven by chance."""
LEASE_AGE_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
ALLOCATE_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
UNKNOWN = float("nan")
"""A gauge that nothing was measured for yet: 0 would be a claim."""
LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class EngineMetrics:
    """What one engine did, step by step."""

    def __init__(
        self,
        num_kv_blocks: int,
        block_size: int,
        tiers: Sequence[str] = (DEFAULT_TIER,),
        expert_load: Callable[[], Mapping[int, Sequence[int]]] = dict,
    ) -> None:
        """`block_size`: draft positions that exist from the start, each at 0 (an absent series is not a zero).

        `tiers`: the names of the SLA tiers by their place. Drafts are counted by both: block_size * len(tiers) series
        for each of three counters. `expert_load` says, by layer with experts, how often each has been chosen so far.
        """
        self._num_kv_blocks = num_kv_blocks
        self._get_expert_load = expert_load
        self.registry = registry = CollectorRegistry()
        self._build_speculation(registry)
        self._build_steps(registry)
        self._build_load(registry)
        self._build_experts(registry)
        for mode in get_args(SchedulerMode):
            self._steps.labels(mode)
        # Looking a series up costs more than adding to it, and a step of many rounds adds to hundreds.
        self._drafts = [
            [
                [counter.labels(str(position), tier) for position in range(block_size)]
                for counter in (self._proposed, self._verified, self._accepted)
            ]
            for tier in tiers
        ]
        """By tier: by what is counted: by position."""
        for position in range(block_size):
            self._temperature.labels(str(position)).set(UNKNOWN)
            for verification in get_args(VerificationMode):
                self._calibration_error.labels(verification, str(position)).set(UNKNOWN)

    def _build_speculation(self, registry: CollectorRegistry) -> None:
        self._accepted_length = Histogram(
            "dspark_accepted_length",
            "Tokens that a verify round committed: 1 + accepted drafts",
            buckets=ACCEPTED_BUCKETS,
            registry=registry,
        )
        self._proposed = _counter(registry, "dspark_draft_tokens_proposed", "Draft tokens proposed", "position", "tier")
        self._verified = _counter(registry, "dspark_draft_tokens_verified", "Draft tokens verified", "position", "tier")
        self._accepted = _counter(registry, "dspark_draft_tokens_accepted", "Draft tokens accepted", "position", "tier")
        self._granted = _counter(
            registry, "dspark_budget_granted_tokens", "Draft tokens that the lease or the load let the steps verify"
        )
        self._used = _counter(registry, "dspark_budget_used_tokens", "Draft tokens that the steps did verify")
        self._trimmed = _counter(
            registry, "dspark_draft_tokens_trimmed", "Draft tokens proposed but not admitted to verification"
        )
        self._left_out = _counter(
            registry, "dspark_rounds_undrafted", "Rounds of requests left out of a draft pass that others were in"
        )
        self._skipped = _counter(
            registry, "dspark_drafter_skipped_steps", "Steps with running requests that skipped the draft pass"
        )

        self._calibration_error = Gauge(
            "dspark_calibration_error_ratio",
            "Expected calibration error of the survival lately",
            ["mode", "position"],
            registry=registry,
        )
        self._temperature = Gauge(
            "dspark_confidence_temperature",
            "What the slot's confidence logits are divided by",
            ["position"],
            registry=registry,
        )

    def _build_steps(self, registry: CollectorRegistry) -> None:
        self._steps = _counter(registry, "dspark_steps", "Engine steps by who decided what they verify", "mode")
        self._lease_age = Histogram(
            "dspark_lease_age_seconds",
            "In steps of an engine that holds a lease of the fleet, used or not: how long ago it asked for it",
            buckets=LEASE_AGE_BUCKETS,
            registry=registry,
        )
        self._step_seconds = Histogram(
            "dspark_step_seconds", "Duration of an engine step", buckets=STEP_BUCKETS, registry=registry
        )
        self._draft_seconds = Histogram(
            "dspark_draft_seconds", "Duration of the draft pass", buckets=STEP_BUCKETS, registry=registry
        )
        self._step_tokens = Histogram(
            "dspark_step_tokens",
            "Rows of a step's flat batch: anchors, drafts and prefill",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._predicted = _counter(
            registry, "dspark_step_predicted_seconds", "Step time that the cost curve expected, summed"
        )
        self._measured = _counter(
            registry, "dspark_step_measured_seconds", "Time that the steps with a prediction took, summed"
        )
        self._plain = _counter(
            registry,
            "dspark_step_plain_seconds",
            "Time that plain decoding would take for the same tokens, by the cost curve, summed",
        )
        self._ratio = Histogram(
            "dspark_step_measured_over_predicted",
            "Step time over the cost curve's expectation",
            buckets=RATIO_BUCKETS,
            registry=registry,
        )

    def _build_load(self, registry: CollectorRegistry) -> None:
        self._running = Gauge("dspark_requests_running", "Sequences that run", registry=registry)
        self._waiting = Gauge("dspark_requests_waiting", "Sequences that wait for a place", registry=registry)
        self._preemptions = _counter(
            registry, "dspark_preemptions", "Sequences that gave up their KV blocks to be recomputed later"
        )
        self._kv_usage = Gauge("dspark_kv_cache_usage_ratio", "KV blocks in use, 0 to 1", registry=registry)
        self._prompt_tokens = _counter(registry, "dspark_prompt_tokens", "Prompt tokens of sequences that entered")
        self._cached_tokens = _counter(
            registry, "dspark_prefix_cache_hit_tokens", "Prompt tokens that the prefix cache already held"
        )
        self._generated_tokens = _counter(registry, "dspark_generated_tokens", "Tokens that the engine emitted")

    def _build_experts(self, registry: CollectorRegistry) -> None:
        self._expert_load = Gauge(
            "dspark_expert_load_ratio",
            "How often a layer's busiest expert is chosen over the mean of its experts, judged every "
            f"{EXPERT_LOAD_CHOICES} choices or more: 1 is even",
            ["layer"],
            registry=registry,
        )
        self._judged: dict[int, Sequence[int]] = {}
        """By layer: how often each expert had been chosen when that was judged last."""

    def _observe_expert_load(self) -> None:
        for layer, counts in self._get_expert_load().items():
            before = self._judged.get(layer, [0] * len(counts))
            recent = [count - past for count, past in zip(counts, before, strict=True)]
            if sum(recent) >= EXPERT_LOAD_CHOICES:
                self._expert_load.labels(str(layer)).set(max(recent) * len(recent) / sum(recent))
                self._judged[layer] = counts

    def observe_step(self, result: StepResult) -> None:
        """Count one engine step."""
        self._observe_rounds(result)
        self._steps.labels(result.mode).inc()
        if result.lease_age_seconds is not None:
            self._lease_age.observe(result.lease_age_seconds)
        self._step_seconds.observe(result.seconds)
        self._step_tokens.observe(result.num_tokens)
        if result.report.drafted:
            self._draft_seconds.observe(result.draft_seconds)
        if result.predicted is not None:
            expected = result.predicted
            self._predicted.inc(expected.step_seconds)
            self._measured.inc(result.seconds)
            self._ratio.observe(result.seconds / expected.step_seconds)
            emitted_per_round = sum(1 + r.num_accepted for r in result.rounds) / max(len(result.rounds), 1)
            self._plain.inc(expected.anchors_seconds * emitted_per_round + expected.prompts_seconds)
        for found in result.calibration:
            self._calibration_error.labels(found.mode, str(found.position)).set(found.error)
            self._temperature.labels(str(found.position)).set(found.temperature)
        self._running.set(result.num_running)
        self._waiting.set(result.report.num_waiting)
        self._preemptions.inc(result.num_preempted)
        self._kv_usage.set(1 - result.num_free_kv_blocks / self._num_kv_blocks)
        self._prompt_tokens.inc(result.num_prompt_tokens)
        self._cached_tokens.inc(result.num_cached_prompt_tokens)
        self._generated_tokens.inc(sum(len(event.token_ids) for event in result.events))

    def _observe_rounds(self, result: StepResult) -> None:
        for verify_round in result.rounds:
            self._accepted_length.observe(1 + verify_round.num_accepted)
        for tier in {verify_round.tier for verify_round in result.rounds}:
            self._observe_drafts(tier, [r for r in result.rounds if r.tier == tier])
        num_proposed = sum(verify_round.num_proposed for verify_round in result.rounds)
        num_verified = sum(verify_round.num_verified for verify_round in result.rounds)
        self._trimmed.inc(num_proposed - num_verified)
        self._used.inc(num_verified)
        self._granted.inc(result.cap)
        if result.report.drafted:
            self._left_out.inc(sum(not verify_round.num_proposed for verify_round in result.rounds))
        decided = result.mode not in ("plain", "fixed")
        if result.rounds and decided and not (result.cap or result.report.drafted):
            self._skipped.inc()

    def _observe_drafts(self, tier: int, rounds: Sequence[VerifyRound]) -> None:
        lengths = zip(*((r.num_proposed, r.num_verified, r.num_accepted) for r in rounds), strict=True)
        for series, counts in zip(self._drafts[tier], lengths, strict=True):
            for position in range(max(counts)):
                series[position].inc(sum(count > position for count in counts))

    def text(self) -> str:
        """The exposition text of this registry."""
        self._observe_expert_load()
        return generate_latest(self.registry).decode()


class ServiceMetrics:
    """What the clients of one HTTP process met."""

    def __init__(self, tiers: Sequence[str] = (DEFAULT_TIER,)) -> None:
        """`tiers`: the names of the SLA tiers; each has its series from the start."""
        self.registry = registry = CollectorRegistry()
        self._build_requests(registry)
        self._build_sla(registry)
        for reason in get_args(FinishReason):
            self._requests.labels(reason)
        for tier in tiers:
            for counter, values in (
                (self._shed, get_args(ShedReason)),
                (self._broken, get_args(Promise)),
                (self._admissions, get_args(Admission)),
            ):
                for value in values:
                    counter.labels(tier, value)
            self._judged.labels(tier)
            self._good.labels(tier)

    def _build_requests(self, registry: CollectorRegistry) -> None:
        self._requests = _counter(registry, "dspark_requests", "Finished choices by finish reason", "finish_reason")
        self._shed = _counter(
            registry, "dspark_requests_shed", "Requests refused before an engine had them, and why", "tier", "reason"
        )
        self._migrated = _counter(
            registry, "dspark_requests_migrated", "Choices that another engine continued after theirs was lost"
        )
        self._ttft = Histogram("dspark_ttft_seconds", "Arrival to first token", buckets=TTFT_BUCKETS, registry=registry)
        self._tpot = Histogram(
            "dspark_tpot_seconds",
            "Mean time of a choice's tokens after the first",
            buckets=TPOT_BUCKETS,
            registry=registry,
        )
        self._latency = Histogram(
            "dspark_request_seconds", "Arrival to last token", buckets=LATENCY_BUCKETS, registry=registry
        )

    def _build_sla(self, registry: CollectorRegistry) -> None:
        self._judged = _counter(
            registry, "dspark_sla_requests", "Choices of which is known whether their tier's promises were kept", "tier"
        )
        self._good = _counter(registry, "dspark_sla_requests_good", "Those whose tier's promises were kept", "tier")
        self._broken = _counter(
            registry, "dspark_sla_promises_broken", "Promises that were not kept; a choice may have several",
            "tier", "promise",
        )  # fmt: skip
        self._admissions = _counter(
            registry, "dspark_sla_admissions", "Choices with a promised speed, by how they got to a replica",
            "tier", "outcome",
        )  # fmt: skip

    def observe_request(
        self, finish_reason: FinishReason, ttft_seconds: float | None, request_seconds: float, num_tokens: int
    ) -> None:
        """Count one finished choice of `num_tokens` delivered tokens; `ttft_seconds` is None when none arrived."""
        self._requests.labels(finish_reason).inc()
        self._latency.observe(request_seconds)
        if ttft_seconds is not None:
            self._ttft.observe(ttft_seconds)
            if num_tokens > 1:
                self._tpot.observe((request_seconds - ttft_seconds) / (num_tokens - 1))

    def observe_migration(self) -> None:
        """Count one choice that another engine goes on with."""
        self._migrated.inc()

    def observe_shed(self, tier: str, reason: ShedReason) -> None:
        """Count one request that was refused before an engine had it."""
        self._shed.labels(tier, reason).inc()

    def observe_sla(self, tier: str, broken: Sequence[Promise]) -> None:
        """Count one choice whose tier's promises were kept, but for those that are `broken`."""
        self._judged.labels(tier).inc()
        if not broken:
            self._good.labels(tier).inc()
        for promise in broken:
            self._broken.labels(tier, promise).inc()

    def promises_kept(self, tier: str) -> tuple[int, int]:
        """Of how many choices all promises were kept, and of how many that is known."""
        names = "dspark_sla_requests_good_total", "dspark_sla_requests_total"
        kept, judged = (int(self.registry.get_sample_value(name, {"tier": tier}) or 0) for name in names)
        return kept, judged

    def observe_admission(self, tier: str, outcome: Admission) -> None:
        """Count how one choice got to a replica. May be called from any thread."""
        self._admissions.labels(tier, outcome).inc()

    def text(self) -> str:
        """The exposition text of this registry."""
        return generate_latest(self.registry).decode()


class SchedulerMetrics:
    """What the fleet's scheduler does."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._engines = Gauge("dspark_scheduler_engines", "Engines that the scheduler hears of", registry=registry)
        self._reports = _counter(registry, "dspark_scheduler_reports", "Load reports that the scheduler got")
        self._leases = _counter(registry, "dspark_scheduler_leases", "Leases that the scheduler made")
        self._seconds = Histogram(
            "dspark_scheduler_allocate_seconds",
            "Time of one search over the whole fleet",
            buckets=ALLOCATE_BUCKETS,
            registry=registry,
        )

    def observe_report(self) -> None:
        self._reports.inc()

    def observe_round(self, num_leases: int, seconds: float) -> None:
        """Count one search."""
        self._leases.inc(num_leases)
        self._seconds.observe(seconds)

    def observe_fleet(self, num_engines: int) -> None:
        self._engines.set(num_engines)

    def text(self) -> str:
        """The exposition text of this registry."""
        return generate_latest(self.registry).decode()


class HubMetrics:
    """What outlives the engines that it tells of: their own counters are lost with them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._lost = _counter(
            registry, "dspark_engines_lost", "Engines that died, hung or lost a rank; a lockstep group is one"
        )

    def observe_lost_engine(self) -> None:
        self._lost.inc()

    def text(self) -> str:
        """The exposition text of this registry."""
        return generate_latest(self.registry).decode()


def _counter(registry: CollectorRegistry, name: str, documentation: str, *labels: str) -> Counter:
    return Counter(name, documentation, labels, registry=registry)
