"""From the logits of a step to its tokens: what each request asked of its distribution, then acceptance.

Knows penalties, biases, stop tokens and logprobs; the acceptance itself is `drafter.speculative`. Knows no blocks, no
queue and no model. Every rule is applied to each position of a block exactly as plain decoding would apply it there:
row j of a request sees its output and its drafts before j, and nothing else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.batcher import Sequence
from cluster.messages import FinishReason, SamplingParams, TokenLogprobs
from drafter import speculative
from drafter.interface import Draft
from drafter.speculative import SamplingRows

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request got out of a step."""

    token_ids: list[int]
    """Delivered: accepted drafts and the recovered or bonus token, cut behind the first stop token."""
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None


def sampling_rows(sequences: list[Sequence], step: int) -> SamplingRows:
    """One row for each sequence, predicting the token after its last; `step` makes unseeded requests' numbers fresh."""
    asked = [sequence.request.sampling for sequence in sequences]
    coupled = torch.tensor([a.seed is not None for a in asked], dtype=torch.bool)
    return SamplingRows(
        temperature=torch.tensor([a.temperature for a in asked], dtype=torch.float32),
        top_k=torch.tensor([a.top_k for a in asked], dtype=torch.int64),
        top_p=torch.tensor([a.top_p for a in asked], dtype=torch.float32),
        min_p=torch.tensor([a.min_p for a in asked], dtype=torch.float32),
        seeds=speculative.round_seeds(torch.tensor([s.seed for s in sequences], dtype=torch.int64), coupled, step),
        positions=torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int64),
        coupled=coupled,
    )


def edits_logits(sampling: SamplingParams, num_output: int) -> bool:
    """Whether the request wants anything but the model's own logits at output number `num_output` or later."""
    return (
        sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
        or bool(sampling.logit_bias)
        or (num_output < sampling.min_tokens and bool(sampling.stop_token_ids))
    )


def edit_logits(logits_JV: Tensor, sequence: Sequence, drafts: list[int]) -> None:
    """In place, for the rows of one request (fp32): logit bias, min_tokens, penalties, in vLLM's order."""
    sampling = sequence.request.sampling
    for token, bias in sampling.logit_bias:
        logits_JV[:, token] += bias
    num_early = sampling.min_tokens - sequence.num_output
    if num_early > 0 and sampling.stop_token_ids:
        logits_JV[:num_early, list(sampling.stop_token_ids)] = MINUS_INFINITY
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        _penalise(logits_JV, sequence, drafts)


def _penalise(logits_JV: Tensor, sequence: Sequence, drafts: list[int]) -> None:
    """Presence and frequency penalties count output tokens, repetition prompt and output (vLLM's definitions).

    Only the columns of tokens that occur are touched.
    """
    sampling = sequence.request.sampling
    prompt = set(sequence.request.prompt_token_ids) if sampling.repetition_penalty != 1 else set()
    counts = Counter(sequence.tokens[sequence.num_prompt :])
    token_ids = list(prompt.union(counts, drafts))
    column = {token: i for i, token in enumerate(token_ids)}
    counts_U = torch.tensor([counts[t] for t in token_ids], dtype=torch.float32, device=logits_JV.device)
    counts_JU = counts_U.repeat(len(logits_JV), 1)
    for j, token in enumerate(drafts):
        counts_JU[j + 1 :, column[token]] += 1
    index_U = torch.tensor(token_ids, dtype=torch.int64, device=logits_JV.device)
    logits_JU = logits_JV[:, index_U]
    if sampling.repetition_penalty != 1:
        seen_JU = (counts_JU > 0) | torch.tensor([t in prompt for t in token_ids], device=logits_JV.device)
        weakened = torch.where(
            logits_JU > 0, logits_JU / sampling.repetition_penalty, logits_JU * sampling.repetition_penalty
        )
        logits_JU = torch.where(seen_JU, weakened, logits_JU)
    logits_JU = logits_JU - sampling.frequency_penalty * counts_JU - sampling.presence_penalty * (counts_JU > 0)
    logits_JV[:, index_U] = logits_JU


def token_logprobs(logits_MV: Tensor, token_ids: list[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Of the model's own softmax, one entry per row: the delivered token's and the `num_top` most likely ones."""
    logprobs_MV = logits_MV.float().log_softmax(-1)
    own = logprobs_MV.gather(1, torch.tensor(token_ids, device=logits_MV.device)[:, None])[:, 0].tolist()
    values, indices = logprobs_MV.topk(num_top, dim=-1)
    tops = [tuple(zip(i, v, strict=True)) for i, v in zip(indices.tolist(), values.tolist(), strict=True)]
    return tuple(TokenLogprobs(logprob, top) for logprob, top in zip(own, tops, strict=True))


def verify(
    logits_MV: Tensor,
    sequences: list[Sequence],
    drafts: list[list[int]],
    draft: Draft | None,
    target_ids_V: Tensor | None,
    num_left: list[int],
    first: SamplingRows,
) -> list[Outcome]:
    """Accept and emit. Row r of `draft` belongs to sequence r, whose admitted tokens are `drafts[r]`, and which may get
    `num_left[r]` tokens more.

    `draft` may be None when nothing is admitted. logits_MV: [sum(1 + len(drafts)), V], any float dtype, anchor row
    first; left as it is. `first` are the anchors' rows, which the draft's sampler had too.
    """
    if not sequences:
        return []
    lengths = torch.tensor([len(admitted) for admitted in drafts])
    starts = [0, *itertools.accumulate(1 + len(admitted) for admitted in drafts)]
    row_starts = torch.tensor(starts)
    edited_MV = logits_MV
    for r, sequence in enumerate(sequences):
        if edits_logits(sequence.request.sampling, sequence.num_output):
            if edited_MV is logits_MV:  # fp32, because a penalty may be finer than the model's dtype
                edited_MV = logits_MV.to(torch.float32, copy=True)
            edit_logits(edited_MV[starts[r] : starts[r + 1]], sequence, drafts[r])
    owner = torch.repeat_interleave(1 + lengths)
    rows = first.select(owner)
    rows = rows.at(rows.positions + torch.arange(starts[-1]) - row_starts[owner])
    verification = speculative.verify(edited_MV, row_starts, draft, lengths, rows, target_ids_V)
    accepted, emitted = verification.num_accepted.tolist(), verification.next_tokens.tolist()
    return [
        _outcome(s, [*drafts[r][: accepted[r]], emitted[r]], num_left[r], logits_MV[starts[r] : starts[r + 1]])
        for r, s in enumerate(sequences)
    ]


def _outcome(sequence: Sequence, token_ids: list[int], num_left: int, logits_JV: Tensor) -> Outcome:
    sampling = sequence.request.sampling
    token_ids = token_ids[:num_left]
    stops = set(sampling.stop_token_ids)
    end = next((i for i, token in enumerate(token_ids) if token in stops), None)
    reason: FinishReason | None = None
    if end is not None:
        token_ids, reason = token_ids[: end + 1], "stop"
    elif len(token_ids) == num_left:
        reason = "length"
    wanted = sampling.num_logprobs
    logprobs = None if wanted is None else token_logprobs(logits_JV[: len(token_ids)], token_ids, wanted)
    return Outcome(token_ids, reason, logprobs)
