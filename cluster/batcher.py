"""Continuous batching: which rows of which sequences are in the next step.

One rule covers decoding, prefill, resuming after a preemption and verification: a sequence has tokens (prompt + output)
and has computed the first `num_computed` of them; its rows in a step are `tokens[num_computed:]`, in chunks. The chunk
that reaches the last token (the anchor) yields the next one, and drafts may follow the anchor.

Knows lists, blocks and arrival order; knows no tensors, no probabilities and no clock. A plan is made before the draft
pass, so nothing in it can depend on a drafted token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from cluster.bypass import Return
from cluster.config import EngineConfig
from cluster.kv_cache import BlockPool
from cluster.messages import InvalidRequestError, Request, RequestStats


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way through the engine."""

    request: Request
    seed: int
    tokens: list[int] = field(init=False)
    """Prompt and delivered output."""
    num_computed: int = 0
    """Leading tokens whose keys and values (and draft context) are in the cache."""
    block_ids: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    confidences: list[float] = field(default_factory=list)
    """Of the slots of its last block: what ADMIT ranks by."""
    expected_confidences: list[float] = field(default_factory=list)
    """What its next block is expected to have, what the budget reckons with; empty before its first block."""
    expected_survival: bytes = b""
    """The same as a report has it (budget.encode_survival): made once for the many steps that leave it alone."""
    draft_return: Return = field(default_factory=Return)
    """Whether drafts for it repay their place in the draft pass."""
    began_seconds: float = 0.0
    """When its first token came from this engine, on its clock; 0 before."""
    began_output: int = 0
    """Output tokens up to that one."""
    num_rounds: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_cached_prompt_tokens: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_token_ids, *self.request.emitted_token_ids]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Rows still to compute; 1 = only the anchor, so the draft context is complete."""
        return len(self.tokens) - self.num_computed

    def stats(self) -> RequestStats:
        return RequestStats(
            num_rounds=self.num_rounds,
            num_drafted=self.num_drafted,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
            num_cached_prompt_tokens=self.num_cached_prompt_tokens,
            num_preemptions=self.num_preemptions,
        )


@dataclass(slots=True)
class Chunk:
    """One sequence's rows of a step: `num_rows` committed tokens from `num_computed` on, then admitted drafts."""

    sequence: Sequence
    num_rows: int
    start: int = field(init=False)
    """Absolute position of the first row."""
    has_anchor: bool = field(init=False)
    """Whether the rows reach the sequence's last token, so that the step yields the next."""
    max_drafts: int = 0
    proposed: list[int] = field(default_factory=list)
    """Filled by DRAFT: at most `max_drafts` tokens."""
    num_admitted: int = 0
    """Filled by ADMIT."""
    num_accepted: int = 0
    """Filled by COMMIT: drafts that passed and were delivered."""

    def __post_init__(self) -> None:
        self.start = self.sequence.num_computed
        self.has_anchor = self.num_rows == self.sequence.num_pending

    @property
    def drafts(self) -> list[int]:
        return self.proposed[: self.num_admitted]

    @property
    def rows(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.num_rows] + self.drafts

    @property
    def next_token(self) -> int:
        """Of a prompt: what follows the rows."""
        return self.sequence.tokens[self.start + self.num_rows]

    @property
    def num_logits(self) -> int:
        """Rows whose distribution is wanted: the anchor and the drafts after it."""
        return 1 + self.num_admitted if self.has_anchor else 0


@dataclass(slots=True)
class Plan:
    """The chunks of one step, oldest sequence first; blocks for all their rows are reserved."""

    chunks: list[Chunk]
    max_drafts: int = 0
    """Most drafts of all chunks together; the row budget has room for them."""
    num_preempted: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0

    @property
    def anchored(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.has_anchor]

    @property
    def decoding(self) -> list[Chunk]:
        """One committed row each."""
        return [chunk for chunk in self.chunks if chunk.num_rows == 1]

    @property
    def drafted(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.proposed]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_rows + chunk.num_admitted for chunk in self.chunks)

    @property
    def context_tokens(self) -> int:
        """Keys that the rows of all sequences see, each sequence's counted once."""
        return self.num_tokens + sum(chunk.start for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        """Rows of chunks that are more than one anchor."""
        return sum(chunk.num_rows for chunk in self.chunks if chunk.num_rows > 1)


class Batcher:
    """The waiting queue and the running sequences, both in order of arrival."""

    def __init__(self, config: EngineConfig, pool: BlockPool, max_drafts: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._config = config
        self._pool = pool
        self._max_drafts = max_drafts

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError for what could never run. A prompt within max_model_len always fits the pool."""
        length, limit = len(request.prompt_token_ids), self._config.max_model_len
        if length == 0:
            raise InvalidRequestError("prompt", "must hold at least one token")
        if length >= limit:
            raise InvalidRequestError(
                "prompt", f"has {length} tokens, but max_model_len is {limit} and one token must be left to generate"
            )
        if request.sampling.max_tokens < 1:
            raise InvalidRequestError("max_tokens", f"must be at least 1, got {request.sampling.max_tokens}")
        num_left = min(request.sampling.max_tokens, limit - length) - len(request.emitted_token_ids)
        if num_left < 1:
            raise InvalidRequestError("emitted", f"{len(request.emitted_token_ids)} tokens leave none to generate")

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence and give its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._pool.release(sequence.block_ids)
            sequence.block_ids = []
        else:
            self.waiting.remove(sequence)

    def num_left(self, sequence: Sequence) -> int:
        """Tokens that the sequence may still get: max_tokens or max_model_len ends it."""
        left = sequence.request.sampling.max_tokens - sequence.num_output
        return min(left, self._config.max_model_len - len(sequence.tokens))

    def draft_limit(self, sequence: Sequence) -> int:
        """Most drafts worth verifying: the token that follows them is the sequence's last at the latest."""
        asked = sequence.request.sampling.max_draft_tokens
        own = self._max_drafts if asked is None else min(asked, self._max_drafts)
        return max(0, min(own, self.num_left(sequence) - 1))

    @property
    def num_prompt_rows(self) -> int:
        """What the next step computes of prompts, as far as can be said before it: places and blocks permitting, and if
        nothing is drafted."""
        pending = [sequence.num_pending for sequence in self.running]
        num_free = self._pool.num_free
        for sequence in islice(self.waiting, self._config.max_num_seqs - len(self.running)):
            num_new = len(sequence.tokens) - self._pool.num_matched(sequence.tokens)
            num_free -= -(-num_new // self._config.kv_block_size)
            if num_free < 0:
                break
            pending.append(num_new)
        prompts = [length for length in pending if length > 1]
        return min(sum(prompts), self._config.max_num_batched_tokens - (len(pending) - len(prompts)))

    def draft_room(self, num_anchors: int) -> int:
        """Most drafts beside so many anchors. They leave half of the rows to prompts, if any can be computed: so
        neither side starves."""
        num_rows = self._config.max_num_batched_tokens - num_anchors
        some_enter = self.waiting and len(self.running) < self._config.max_num_seqs
        return num_rows // 2 if some_enter or num_anchors < len(self.running) else num_rows

    def plan(self, cap: int, depth: int = 2**31) -> Plan:
        """The next step: anchors first, then at most `cap` drafts, then prompts in what is left of the row budget.

        depth: most drafts of one request.
        """
        plan = Plan([])
        self._plan_anchors(plan)
        self._plan_drafts(plan, min(cap, self.draft_room(len(plan.chunks))), depth)
        budget = self._config.max_num_batched_tokens - len(plan.chunks) - plan.max_drafts
        budget -= self._plan_prefills(plan, budget)
        self._admit_waiting(plan, budget)
        return plan

    def commit(self, chunk: Chunk, delivered: list[int]) -> None:
        """Rows up to the last delivered token but one are final; what was drafted past them is forgotten."""
        sequence = chunk.sequence
        sequence.num_computed += chunk.num_rows + max(0, len(delivered) - 1)
        sequence.tokens += delivered
        full = sequence.num_computed // self._config.kv_block_size
        if full > sequence.num_published_blocks:
            self._pool.publish(sequence.tokens, sequence.block_ids, sequence.num_computed)
            sequence.num_published_blocks = full

    def _plan_anchors(self, plan: Plan) -> None:
        for sequence in list(self.running):
            if sequence.num_pending > 1 or sequence not in self.running:
                continue
            while not self._pool.grow(sequence.block_ids, len(sequence.tokens)):
                newest = self.running[-1]
                self._preempt(newest)
                plan.num_preempted += 1
                if newest is sequence:
                    break
            else:
                plan.chunks.append(Chunk(sequence, 1))

    def _plan_drafts(self, plan: Plan, room: int, depth: int) -> None:
        """Reserve blocks for drafts, never by preempting. Who gets the rows of `room` is for ADMIT to say."""
        for chunk in plan.chunks:
            # The prompt's own token is no verify round, not even where the prompt's last chunk is a single row.
            sequence = chunk.sequence
            wanted = sequence.num_output and not sequence.draft_return.left_out
            limit = min(self.draft_limit(sequence), room, depth) if wanted else 0
            length = len(sequence.tokens)
            # Without blocks for all of them, the free slots of the last block remain.
            if limit and not self._pool.grow(sequence.block_ids, length + limit):
                limit = min(limit, len(sequence.block_ids) * self._config.kv_block_size - length)
            chunk.max_drafts = limit
        plan.max_drafts = min(room, sum(chunk.max_drafts for chunk in plan.chunks))

    def _plan_prefills(self, plan: Plan, budget: int) -> int:
        spent = 0
        for sequence in self.running:
            if sequence.num_pending > 1 and spent < budget:
                num_rows = min(sequence.num_pending, budget - spent)
                plan.chunks.append(Chunk(sequence, num_rows))
                spent += num_rows
        return spent

    def _admit_waiting(self, plan: Plan, budget: int) -> None:
        """First come, first served; a sequence starts only with blocks for all its tokens, so prefill can't run dry."""
        while self.waiting and budget > 0 and not plan.num_preempted and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            block_ids = self._pool.match_prefix(sequence.tokens)
            num_cached = len(block_ids) * self._config.kv_block_size
            if not self._pool.grow(block_ids, len(sequence.tokens)):
                self._pool.release(block_ids)
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.block_ids, sequence.num_computed = block_ids, num_cached
            sequence.num_published_blocks = num_cached // self._config.kv_block_size
            if not sequence.num_preemptions:
                sequence.num_cached_prompt_tokens = min(num_cached, sequence.num_prompt)
                plan.num_prompt_tokens += sequence.num_prompt
                plan.num_cached_prompt_tokens += sequence.num_cached_prompt_tokens
            num_rows = min(sequence.num_pending, budget)
            plan.chunks.append(Chunk(sequence, num_rows))
            budget -= num_rows

    def _preempt(self, sequence: Sequence) -> None:
        """Give the blocks back and start over later: its tokens are kept, so recomputing is an ordinary prefill."""
        self.running.remove(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)
