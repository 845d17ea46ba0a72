"""The guarantee: whatever was drafted, the tokens that are emitted follow the target's own distribution.

Knows logits, drafts and keyed randomness; knows nothing of requests, caches, penalties (already in the logits) or
budgets. Two exact modes: `rejection` (Leviathan et al. 2023, algorithm 1) keeps the distribution, `coupled` (the draft
and the target read the same Gumbel noise) keeps the very tokens of plain decoding.

The randomness is keyed (drafter/randomness.py): unseeded requests need fresh seeds in each round.

Shape letters: N rows (or M of them), R requests, G block positions, V vocabulary (target's, or the draft's own).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafter.interface import Draft, Sampler
from drafter.randomness import Purpose as Purpose
from drafter.randomness import exponentials, uniform
from drafter.randomness import round_seeds as round_seeds

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them could only overflow."""

_FIRST_CANDIDATES = 64
"""How many likely tokens top-p looks at first; 8 times as many whenever its mass is not reached."""

_CDF_BLOCK = 256
"""Tokens per block of the two-level inverse CDF."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Which kinds of rows a batch may hold: a kind that it surely lacks costs nothing. Subsets inherit it."""

    greedy: bool
    tempered: bool
    truncated: bool
    coupled: bool
    rejection: bool

    @property
    def only_greedy(self) -> bool:
        return not (self.coupled or self.rejection)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of N rows is sampled."""

    temperature: Tensor
    """[N] fp32; 0 is greedy."""
    top_k: Tensor
    """[N] int64; 0 keeps all."""
    top_p: Tensor
    """[N] fp32; 1 keeps all."""
    min_p: Tensor
    """[N] fp32; 0 keeps all."""
    seeds: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64: the absolute position of the token that the row's distribution predicts."""
    coupled: Tensor
    """[N] bool; False is `rejection`."""
    mix: Mix = field(default=None)  # type: ignore[assignment]  # derived below, inherited by subsets

    def __post_init__(self) -> None:
        if self.mix is None:
            object.__setattr__(self, "mix", self._measure())

    def _measure(self) -> Mix:
        sampled = self.temperature >= GREEDY_BELOW
        truncated = _asks_truncation(self)
        kinds = (
            ~sampled,
            sampled & (self.temperature != 1),
            truncated,
            sampled & self.coupled,
            sampled & ~self.coupled,
        )
        return Mix(*torch.stack(kinds).any(dim=1).tolist())

    def select(self, index: Tensor) -> SamplingRows:
        """The rows at `index` [M] int64."""
        return SamplingRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.seeds[index],
            self.positions[index],
            self.coupled[index],
            self.mix,
        )

    def at(self, positions: Tensor) -> SamplingRows:
        """The same rows predicting other positions [N] int64 (a block's next slot)."""
        return SamplingRows(
            self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, positions, self.coupled, self.mix
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """What a round commits: the first `num_accepted` drafts of each request, then its `next_tokens` entry."""

    num_accepted: Tensor
    """[R] int64."""
    next_tokens: Tensor
    """[R] int64 target ids: the recovered token, or the bonus token when every draft passed."""


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution each row is sampled from and verified against: logits [N, V] any float -> fp32 [N, V].

    Temperature, then top-k, top-p and min-p on what is left, in Hugging Face's order and with its definitions; tokens
    that tie with the last one kept are kept, so that the cut never depends on a sort. Greedy rows are one-hot, the
    lowest id winning a tie.
    """
    mix = rows.mix
    if mix.only_greedy:
        return _one_hot(logits)
    scaled = logits.float()
    if mix.tempered:
        scaled = scaled / torch.where(rows.temperature < GREEDY_BELOW, 1.0, rows.temperature)[:, None]
    result = torch.softmax(scaled, dim=-1)
    if mix.truncated:
        index = _asks_truncation(rows).nonzero()[:, 0]
        if index.numel():
            result[index] = _truncate(result[index], rows.select(index))
    if mix.greedy:
        index = (rows.temperature < GREEDY_BELOW).nonzero()[:, 0]
        if index.numel():
            result[index] = _one_hot(logits[index])
    return result


def sample(probabilities: Tensor, rows: SamplingRows, purpose: Purpose, token_ids: Tensor | None = None) -> Tensor:
    """Draw one index per row: probabilities [N, V] fp32 -> int64 [N], indices into V.

    Rejection rows invert the CDF at uniform(seed, position, purpose). Coupled rows take argmax(log p + Gumbel noise),
    the noise keyed by (seed, position, target id) whatever the purpose; `token_ids` [V] int64 holds the target ids of a
    reduced draft vocabulary (none: the indices are target ids).
    """
    fractions = uniform(rows.seeds, rows.positions, purpose) if rows.mix.rejection else None
    return _draw(probabilities, rows, fractions, token_ids)


def draft_sampler(first: SamplingRows, num_slots: int, target_ids: Tensor | None = None) -> Sampler:
    """How a drafter draws slot k < num_slots behind each row of `first`: as the target's own position would be drawn.

    `first` [R] predict slot 0; target_ids [V] int64 as in `Drafter.target_ids`.
    """
    positions = first.positions[:, None] + torch.arange(num_slots, device=first.positions.device)
    fractions = uniform(first.seeds[:, None], positions, Purpose.DRAFT) if first.mix.rejection else None

    def draw(slot: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows = first.at(positions[:, slot])
        distribution = probabilities(logits, rows)
        return _draw(distribution, rows, None if fractions is None else fractions[:, slot], target_ids), distribution

    return draw


def _draw(probabilities: Tensor, rows: SamplingRows, fractions: Tensor | None, token_ids: Tensor | None) -> Tensor:
    """`sample`, with the uniform numbers [N] of the rejection rows given (None where there are none)."""
    if rows.mix.only_greedy:
        return probabilities.argmax(dim=-1)
    if fractions is None:
        return _race(probabilities, rows, token_ids)
    result = _invert(probabilities, fractions)
    if rows.mix.coupled:
        index = rows.coupled.nonzero()[:, 0]
        result[index] = _race(probabilities[index], rows.select(index), token_ids)
    return result


def verify(
    logits: Tensor,
    row_starts: Tensor,
    draft: Draft | None,
    lengths: Tensor,
    rows: SamplingRows,
    target_ids: Tensor | None = None,
) -> Verification:
    """Accept the longest passing prefix of each request's admitted drafts and draw the token after it.

    logits [N, V], penalties applied, the 1 + lengths[r] rows of request r from row_starts[r] on (row_starts [R + 1]
    int64); row j predicts draft j, the last row the bonus token. lengths [R] int64, at most G; with all 0, `draft` may
    be None and this is plain decoding. rows: the N rows' sampling, all rows of a request alike but for their position.
    target_ids [V_draft] int64 as in `Drafter.target_ids`; None when the draft's vocabulary is the target's.

    Rejection mode accepts draft x with probability min(1, p_t(x) / p_d(x)) and recovers from max(p_t - p_d, 0); greedy
    and coupled mode accept while the draft equals what plain decoding emits, and emit that.
    """
    first = row_starts[:-1]
    drafts = None if draft is None else draft.tokens
    greedy = rows.temperature[first] < GREEDY_BELOW
    coupled = rows.coupled[first]
    result = Verification(torch.zeros_like(lengths), torch.empty_like(lengths))

    def argmax(row: Tensor) -> Tensor:
        return _argmax(logits[row])

    def coupled_tokens(row: Tensor) -> Tensor:
        chosen = rows.select(row)
        return _race(probabilities(logits[row], chosen), chosen, None)

    if rows.mix.greedy:
        _walk(_match(argmax, first, drafts, lengths), greedy, result)
    if rows.mix.coupled:
        _walk(_match(coupled_tokens, first, drafts, lengths), coupled & ~greedy, result)
    if rows.mix.rejection:
        _walk(_reject(logits, first, draft, lengths, rows, target_ids), ~coupled & ~greedy, result)
    return result


# --- the walk: slot by slot, only the requests whose drafts have all passed so far -------------------------------

_Judge = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(requests [M] int64, slot) -> (which passed [M] bool, the tokens that end the others, in order)."""


def _walk(judge: _Judge, members: Tensor, result: Verification) -> None:
    """Rows behind a request's first failure are never looked at: most of a block's work where drafts are poor."""
    requests = members.nonzero()[:, 0]
    slot = 0
    while requests.numel():
        passed, tokens = judge(requests, slot)
        result.next_tokens[requests[~passed]] = tokens
        requests = requests[passed]
        result.num_accepted[requests] += 1
        slot += 1


def _match(choose: Callable[[Tensor], Tensor], first: Tensor, drafts: Tensor | None, lengths: Tensor) -> _Judge:
    """Greedy and coupled: a draft passes if it is the token that plain decoding chooses in its row."""

    def judge(requests: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        tokens = choose(first[requests] + slot)
        passed = lengths[requests] > slot
        if drafts is not None and slot < drafts.shape[1]:
            passed &= drafts[requests, slot] == tokens
        return passed, tokens[~passed]

    return judge


def _reject(
    logits: Tensor,
    first: Tensor,
    draft: Draft | None,
    lengths: Tensor,
    rows: SamplingRows,
    target_ids: Tensor | None,
) -> _Judge:
    """Rejection: min(1, p_t / p_d), then the residual for a rejected draft or p_t itself for a bonus token."""
    accept = uniform(rows.seeds, rows.positions, Purpose.ACCEPT)
    emit = uniform(rows.seeds, rows.positions, Purpose.EMIT)

    def judge(requests: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        row = first[requests] + slot
        target = probabilities(logits[row], rows.select(row))
        drafted = lengths[requests] > slot
        if draft is None or slot >= draft.tokens.shape[1]:
            return drafted, _invert(target, emit[row])
        p_target = target.gather(1, draft.tokens[requests, slot][:, None])[:, 0].double()
        p_draft = draft.probabilities[requests, slot, draft.draft_ids[requests, slot]].double()
        passed = drafted & (accept[row] * p_draft < p_target)
        failed = (~passed).nonzero()[:, 0]
        weights = target[failed]
        rejected = drafted[failed].nonzero()[:, 0]
        if rejected.numel():
            proposed = draft.probabilities[requests[failed[rejected]], slot]
            weights[rejected] = _residual(weights[rejected], proposed, target_ids)
        return passed, _invert(weights, emit[row[failed]])

    return judge


def _residual(target: Tensor, proposed: Tensor, target_ids: Tensor | None) -> Tensor:
    """max(p_t - p_d, 0), not normalised: [M, V], [M, V_draft] -> [M, V]. All 0 only by rounding: then p_t."""
    if target_ids is None:
        residual = target - proposed
    else:
        residual = target.scatter_add(1, target_ids.expand_as(proposed), -proposed)
    residual.clamp_(min=0)
    empty = residual.amax(dim=1) == 0
    if empty.any():
        residual[empty] = target[empty]
    return residual


def _invert(weights: Tensor, fractions: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds fraction * total: [M, V], [M] in [0, 1) -> int64 [M].

    In fp64, because fp32 sums over a large vocabulary round its rare tokens away; in two levels, because only one
    block's running sum is needed. The clamps keep a goal that rounding moved across a block's edge inside that block,
    so a token of weight 0 is never drawn.
    """
    num_rows, vocabulary = weights.shape
    width = min(_CDF_BLOCK, vocabulary)
    padding = -vocabulary % width
    blocks = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    blocks = blocks.reshape(num_rows, blocks.shape[1] // width, width)
    sums = blocks.sum(dim=2, dtype=torch.float64)
    ends = sums.cumsum(dim=1)
    goal = fractions[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, goal, right=True)
    inside = blocks[torch.arange(num_rows, device=weights.device), block[:, 0]].cumsum(1, dtype=torch.float64)
    rest = (goal - (ends - sums).gather(1, block)).clamp_(min=0)
    rest = torch.minimum(rest, inside[:, -1:] * (1 - 2.0**-52))
    return (block * width + torch.searchsorted(inside, rest, right=True))[:, 0]


def _race(probabilities: Tensor, rows: SamplingRows, token_ids: Tensor | None) -> Tensor:
    """argmax(log p + Gumbel), written as argmax(p / exponential): the same order without two logarithms."""
    if token_ids is None:
        token_ids = torch.arange(probabilities.shape[1], device=probabilities.device)
    return exponentials(rows.seeds, rows.positions, token_ids).reciprocal_().mul_(probabilities).argmax(dim=1)


# --- distributions ----------------------------------------------------------------------------------------------


def _argmax(logits: Tensor) -> Tensor:
    """[N, V] any float -> int64 [N]."""
    return logits.float().argmax(dim=1)  # torch's argmax of bf16 is 4 times slower


def _one_hot(logits: Tensor) -> Tensor:
    result = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return result.scatter_(1, _argmax(logits)[:, None], 1.0)


def _asks_truncation(rows: SamplingRows) -> Tensor:
    return (rows.temperature >= GREEDY_BELOW) & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))


def _truncate(full: Tensor, rows: SamplingRows) -> Tensor:
    """top-k, top-p and min-p as one threshold per row, then renormalised: fp32 [M, V] -> fp32 [M, V]."""
    vocabulary = full.shape[1]
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocabulary).clamp(max=vocabulary)[:, None]
    limited = top_k < vocabulary
    widest = int(torch.where(limited, top_k, 1).max())
    num_candidates = max(widest, _FIRST_CANDIDATES)
    while True:
        num_candidates = min(vocabulary, num_candidates)
        values = full.topk(num_candidates, dim=1).values
        kth = values.gather(1, (top_k - 1).clamp(max=num_candidates - 1))
        floor = torch.where(limited, kth, 0.0)
        kept = full * (full >= floor)
        mass = (values * (values >= floor)).cumsum(dim=1, dtype=torch.float64)
        goal = rows.top_p.double()[:, None] * kept.sum(dim=1, keepdim=True, dtype=torch.float64)
        unsettled = (rows.top_p[:, None] < 1) & (mass[:, -1:] < goal)
        if num_candidates == vocabulary or not unsettled.any():
            break
        num_candidates *= 8
    last = torch.searchsorted(mass, goal).clamp(max=num_candidates - 1)
    nucleus = torch.where(rows.top_p[:, None] < 1, values.gather(1, last), 0.0)
    threshold = torch.maximum(nucleus, rows.min_p[:, None] * values[:, :1])
    kept *= kept >= threshold
    return kept.div_(kept.sum(dim=1, keepdim=True))
