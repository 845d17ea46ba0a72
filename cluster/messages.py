"""The messages between the parts, and the errors: the only language that crosses a process boundary.

Frozen dataclasses of plain values: picklable, comparable, and without a dict in sight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
SchedulerMode = Literal["plain", "fixed", "bypass", "local", "lease"]
"""Who decided what a step verifies: nobody (nothing to draft), the fixed length, the load (all was admitted without a
search), the engine's own `allocate`, or the fleet's scheduler."""
VerificationMode = Literal["rejection", "coupled"]


class DSparkError(Exception):
    """Root of every error that this project raises on purpose."""


class InvalidRequestError(DSparkError, ValueError):
    """The client's fault: the message names the field."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field_name = field_name
        self.message = message

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field_name, self.message)


class QueueFullError(DSparkError):
    """The engine sheds load: try again in `retry_after_seconds`."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__(f"too many requests are waiting; retry in {retry_after_seconds:.0f} s")
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return type(self), (self.retry_after_seconds,)


class TierUnmetError(DSparkError):
    """No replica can give what the request's tier promises, and its tier would rather be refused."""

    def __init__(self, tier: str, retry_after_seconds: float) -> None:
        super().__init__(f"no replica can keep the speed of tier {tier!r} now; retry in {retry_after_seconds:.0f} s")
        self.tier = tier
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[type, tuple[str, float]]:
        return type(self), (self.tier, self.retry_after_seconds)


class EngineDeadError(DSparkError):
    """The engine's process died or its step raised; the replica will be replaced."""


class GroupError(EngineDeadError):
    """A rank of the group died, hangs or left: no other rank can go on. The message says who noticed, and in what."""


class CostCurveError(DSparkError, ValueError):
    """A cost curve is missing, flat or not for this engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn. Validated where people write them (deployments/openai.py)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    """With a seed, verification is `coupled`: the text depends on nothing but the request."""
    min_tokens: int = 0
    """Stop tokens have probability 0 before this many output tokens."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request (the model's end tokens, unless ignore_eos). They are emitted as the last token."""
    num_logprobs: int | None = None
    """None: no logprobs. n >= 0: the token's own logprob and the n most likely ones."""
    max_draft_tokens: int | None = None
    """Most draft tokens verified per step for this request; 0 is plain decoding, None the engine's own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tier: int = 0
    """Its place in the list of SLA tiers."""
    emitted_token_ids: tuple[int, ...] = ()
    """What an engine that was lost emitted before: output like what follows, but not emitted again."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own softmax, before temperature, penalties and truncation."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What speculation did for one finished request. accepted length = (num_accepted + num_rounds) / num_rounds."""

    num_rounds: int
    """Verify rounds; the prefill's own token is not one (paper's tau)."""
    num_drafted: int
    num_verified: int
    num_accepted: int
    """Accepted drafts that were delivered; drafts cut by max_tokens or a stop token are not counted."""
    num_cached_prompt_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The tokens that one step added to one request."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token when the request asked for them."""
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    """Set together with finish_reason."""
    error: str | None = None
    """Set only when the engine gave the request up (finish_reason "abort"), and says why."""


@dataclass(frozen=True, slots=True)
class SlaTier:
    """A speed that is promised to a request. The empty list of tiers promises nothing to anybody."""

    name: str
    min_tokens_per_second: float = 0.0
    weight: float = 1.0
    """Each token up to the promised speed counts as so many (at least 1): how much throughput the promise may cost."""
    ttft_ms: float | None = None
    """Longest wait for the first token that still keeps the promise; None promises nothing about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The summary of one engine step, the only input of the budget: 2 KB for 256 requests of 7 slots."""

    step: int
    survival: bytes = b""
    """uint8 [R, G], row by row: P(prefix through slot k passes) in 255ths, from the confidences of the report's step;
    0 where a slot may not be verified. See budget.encode_survival."""
    tiers: bytes = b""
    """uint8 [R]: each running request's place in the list of SLA tiers."""
    paces: bytes = b""
    """uint8 [R]: the speed that each request needs now, in 64ths of what its tier promises; the further it is ahead,
    the less. Empty: all 64. See sla.encode_paces."""
    num_prefill_tokens: int
    context_tokens: int
    num_waiting: int
    drafted: bool
    """False when the step skipped the draft pass; its survivals are then the last known ones."""
    max_draft_tokens: int = 2**31
    """Most drafts that fit the next step's rows."""
    newcomer: bytes = b""
    """uint8 [G], as a row of `survival`: what a request that would join is expected to accept."""
    decode_share: float = 1.0
    """Of the time that late steps should have taken by the cost curve, if somebody decoded in them: what was not for
    prompts."""
    request_ids: tuple[str, ...] = ()
    """[R] whose rows these are. Only the engine itself asks; what is sent away leaves them out."""


@dataclass(frozen=True, slots=True)
class BudgetLease:
    """Permission to verify: what `allocate` decided for one engine."""

    cap: int
    """Most draft tokens in a step."""
    depth: int = 2**31
    """Most drafts of one request, where that makes the draft pass shorter."""
    price: float = 0.0
    """Least value worth verifying: a slot's survival, times its tier's weight as far as the promised speed needs it."""
    padded_tokens: int = 0
    """Rows that each rank of a lockstep group computes per step, used or not; 0 for an engine that steps alone."""
    floors: tuple[float, ...] = ()
    """By SLA tier: tokens that a request must get from each step to keep its promised speed."""
    temperatures: tuple[float, ...] = ()
    """By slot: what the confidence head's logits are to be divided by. Empty: the engine keeps what it has."""
    epoch: int = 0
    duration_seconds: float = 1.0
    """A lease carries a duration, never a wall-clock time: clocks of nodes differ."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence that a step computes."""

    token_ids: Sequence[int]
    start: int
    """Absolute position of the first token; every token before it has its keys and values in the blocks."""
    block_ids: Sequence[int]
    """Blocks of the sequence from position 0 on, with room for the last token."""
    num_logits: int
    """Trailing rows whose logits are wanted: 0 for a prefill chunk that isn't the last."""


@dataclass(frozen=True, slots=True)
class Lockstep:
    """What the replicas of a group agreed on for one forward pass."""

    num_rows: tuple[int, ...]
    """Rows of each replica's flat batch; 0 where a replica only takes part so that the others can step."""
    exchange: bool = False
    """How rows reach their experts: all-to-all, or else all-gather and reduce-scatter."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that a rank must know to obey one step; the replica's leader sends it once per step.

    Sampled drafts are among the spans' tokens, and what is accepted concerns later steps' spans only (rollback is a
    length), so there is nothing else to send.
    """

    spans: tuple[Span, ...]
    lockstep: Lockstep


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """One request's part of one verify step: num_proposed >= num_verified >= num_accepted."""

    num_proposed: int
    """Drafted tokens; 0 when the step skipped drafting or the request allows none."""
    num_verified: int
    """The admitted prefix."""
    num_accepted: int
    """Accepted and delivered, as in RequestStats. Accepted length = 1 + num_accepted."""
    tier: int = 0
    """The request's place in the list of SLA tiers."""


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """What the cost curve expects of a step, in seconds."""

    step_seconds: float
    anchors_seconds: float
    """Of one token for each request that decodes, and nothing else: plain decoding."""
    prompts_seconds: float
    """What prompt rows add to that."""


@dataclass(frozen=True, slots=True)
class PositionCalibration:
    """How true the confidences of one slot are lately, among requests that are verified in one mode."""

    mode: VerificationMode
    position: int
    error: float
    """Expected calibration error of the survival, 20 bins."""
    num_slots: int
    """How many it was seen on."""
    temperature: float
    """What the slot's confidence logits are divided by now."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one engine step did."""

    step: int
    events: tuple[TokenEvent, ...]
    report: LoadReport
    num_tokens: int
    """Rows of the flat batch: anchors + drafts + prefill."""
    seconds: float
    draft_seconds: float
    rounds: tuple[VerifyRound, ...] = ()
    """One per request that verified; the token that a prompt ends in is no round."""
    mode: SchedulerMode = "plain"
    lease_age_seconds: float | None = None
    """How long ago the engine asked for the newest lease that it holds, used or not; None without one."""
    cap: int = 0
    """Draft tokens that this step was allowed to verify."""
    predicted: StepPrediction | None = None
    """None without a cost curve."""
    num_running: int = 0
    num_free_kv_blocks: int = 0
    num_preempted: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the requests that entered in this step, and how many of them the prefix cache held."""
    num_cached_prompt_tokens: int = 0
    calibration: tuple[PositionCalibration, ...] = ()
    """Every few hundred steps, and then of every position that was seen often enough."""

    @property
    def num_slots(self) -> int:
        """Drafted for each request: as many as for the one with most."""
        return max((verify_round.num_proposed for verify_round in self.rounds), default=0)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """How an engine is. `alive` is False for good once a step raised; `reason` then says why."""

    alive: bool
    ready: bool
    """The model is loaded and the cost curve is measured."""
    seconds_since_last_step: float
    """Since the last finished step while there is work, 0 when there is none: a stuck engine shows here."""
    num_running: int = 0
    num_waiting: int = 0
    num_free_kv_blocks: int = 0
    speeds: tuple[float, ...] = ()
    """By SLA tier (one number without tiers): tokens per second that one more request would get. Empty: unknown."""
    rooms: tuple[int, ...] = ()
    """Likewise: how many more requests would get a place, and the speed that the tier promises."""
    reason: str = ""
