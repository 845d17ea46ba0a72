"""What one training step learns from: target features, anchors, teacher-forced blocks and their loss.

Knows conversations, the target's features and the drafter; knows nothing of optimisers, budgets or files.

Shape letters: B sequences, T tokens, A anchors, G block positions, M blocks, K tapped layers, D hidden size,
V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafter.baselines.chain import ChainDrafter
from drafter.config import TrainConfig
from drafter.data import Response
from drafter.dspark import DSpark
from drafter.losses import Coefficients, confidence_loss, distribution_loss
from drafter.target import Target


@dataclass(frozen=True, slots=True)
class Features:
    """What the target gives for one sequence."""

    taps: Tensor
    """[T, K*D]: outputs of the tapped layers."""
    hidden: Tensor
    """[T, D] after the final norm."""
    log_normalizer: Tensor
    """[T] fp32: logsumexp of the logits over the full vocabulary, so that p_t of a few tokens needs only their rows."""


class FeatureMemory:
    """Features by sequence, computed on the fly and remembered while they fit into `limit_bytes`."""

    def __init__(self, target: Target, layer_ids: Sequence[int], limit_bytes: int) -> None:
        self._target = target
        self._layer_ids = layer_ids
        self._free_bytes = limit_bytes
        self._known: dict[int, Features] = {}

    def get(self, indices: Sequence[int], token_ids: Sequence[Sequence[int]]) -> list[Features]:
        """The features of sequences `indices` with these tokens; one padded target forward for those not in memory."""
        fresh = [row for row, index in enumerate(indices) if index not in self._known]
        computed = self._compute([token_ids[row] for row in fresh]) if fresh else []
        by_row = dict(zip(fresh, computed, strict=True))
        for row, features in by_row.items():
            size = 2 * (features.taps.numel() + features.hidden.numel())
            if size <= self._free_bytes:
                self._free_bytes -= size
                self._known[indices[row]] = features
        return [by_row.get(row) or self._known[index] for row, index in enumerate(indices)]

    def _compute(self, token_ids: Sequence[Sequence[int]]) -> list[Features]:
        longest = max(map(len, token_ids))
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in token_ids])
        taps, hidden = self._target.features(padded, self._layer_ids)
        # clone: leaves inference mode and lets go of the padding.
        kept = [(taps[i, : len(ids)].clone(), hidden[i, : len(ids)].clone()) for i, ids in enumerate(token_ids)]
        return [Features(taps, hidden, self._log_normalizer(hidden)) for taps, hidden in kept]

    def _log_normalizer(self, hidden: Tensor) -> Tensor:
        # In chunks: all T x vocabulary logits in fp32 would be the largest tensor of the training by far.
        return torch.cat([self._target.logits(rows).float().logsumexp(-1).clone() for rows in torch.split(hidden, 128)])


@dataclass(frozen=True, slots=True)
class Blocks:
    """The supervised blocks of one batch: M anchors, each with G slots."""

    sequence_M: Tensor
    position_M: Tensor
    num_slots_M: Tensor
    """Slots whose label is a token of the anchor's own response: the contiguous valid prefix."""

    def of(self, sequences: Sequence[int]) -> Blocks:
        """The blocks of these sequences, in ascending order, which are counted anew from 0."""
        assert list(sequences) == sorted(sequences)
        number = torch.full((int(self.sequence_M.max()) + 1,), -1)
        number[list(sequences)] = torch.arange(len(sequences))
        sequence_M = number[self.sequence_M]
        kept = sequence_M >= 0
        return Blocks(sequence_M[kept], self.position_M[kept], self.num_slots_M[kept])


def choose_anchors(
    responses: Sequence[Response], num_anchors: int, block_size: int, generator: torch.Generator
) -> Blocks:
    """Up to `num_anchors` positions t per sequence where t and t + 1 are tokens of one response."""
    sequences, positions, slots = [], [], []
    for row, response in enumerate(responses):
        spans = [(t, end) for start, end in response.response_spans for t in range(start, end - 1)]
        for pick in torch.randperm(len(spans), generator=generator)[:num_anchors].tolist():
            anchor, end = spans[pick]
            sequences.append(row)
            positions.append(anchor)
            slots.append(min(block_size, end - 1 - anchor))
    return Blocks(torch.tensor(sequences), torch.tensor(positions), torch.tensor(slots))


@dataclass(frozen=True, slots=True)
class Totals:
    """What the sums over a step's slots are divided by, so that its parts add up to the mean of the whole."""

    slots: float
    """Sum of w_k."""
    labels: float
    """Sum of w_k where the label is in the draft vocabulary."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Sums over supervised slots, weighted as in the loss and divided by the step's totals: means, of a whole step."""

    soft_cross_entropy: float
    overlap: float
    """1 - TV(p_d, p_t): the probability that a sampled draft passes."""
    confidence_loss: float


def step_totals(
    model: DSpark | ChainDrafter, responses: Sequence[Response], blocks: Blocks, position_decay: float
) -> Totals:
    """Of all blocks of a step."""
    weight_MG, label_MG = _weights_and_labels(model, _padded_tokens(responses), blocks, position_decay)
    return Totals(float(weight_MG.sum()), max(float((weight_MG * (label_MG >= 0)).sum()), 1e-6))


def batch_loss(
    model: DSpark | ChainDrafter,
    responses: Sequence[Response],
    features: Sequence[Features],
    blocks: Blocks,
    config: TrainConfig,
    distill: bool,
    totals: Totals,
) -> tuple[Tensor, StepSummary]:
    """Teacher-forced loss of a batch, differentiable, and what it says: its share of the step that `totals` are of."""
    tokens = _padded_tokens(responses)
    taps = nn.utils.rnn.pad_sequence([f.taps for f in features], batch_first=True)
    hidden_M = _block_hidden(model, tokens, taps, blocks)
    target, row_MG = _target_rows(model, features, blocks)
    weight_MG, label_MG = _weights_and_labels(model, tokens, blocks, config.position_decay)
    total = totals.slots
    if distill:
        coefficients = Coefficients(0.0, 1 / total, 0.0)
    else:
        coefficients = Coefficients(config.cross_entropy_weight / totals.labels, 0.0, config.l1_weight / total)

    loss, soft, overlap, confidence = torch.zeros(()), 0.0, 0.0, 0.0
    state = hidden_M.new_zeros(len(hidden_M), model.config.markov_rank)
    for slot in range(model.block_size):
        hidden, weights = hidden_M[:, slot], weight_MG[:, slot]
        previous = model.previous_embedding(_tokens_at(tokens, blocks, slot))
        logits = model.base_logits(hidden)
        if previous is not None:
            logits, state = model.slot_logits(logits, hidden, previous, state)
        slot_loss, slot_soft, distance = distribution_loss(
            logits, target[row_MG[:, slot]], label_MG[:, slot], weights, coefficients
        )
        loss = loss + slot_loss
        if model.confidence_head is not None:
            read = (hidden, previous)
            if config.detach_confidence:
                read = (hidden.detach(), None if previous is None else previous.detach())
            slot_confidence = confidence_loss(model.confidence_head(*read), distance, weights) / total
            loss = loss + config.confidence_weight * slot_confidence
            confidence += float(slot_confidence.detach())
        soft += float((weights * slot_soft).sum()) / total
        overlap += float((weights * (1 - distance / 2)).sum()) / total
    return loss, StepSummary(soft, overlap, confidence)


def _padded_tokens(responses: Sequence[Response]) -> Tensor:
    """[B, T] int64."""
    return nn.utils.rnn.pad_sequence([torch.tensor(r.token_ids) for r in responses], batch_first=True)


def _tokens_at(tokens: Tensor, blocks: Blocks, offset: int) -> Tensor:
    """[M]: the token `offset` after each anchor; past the end (where no slot is supervised) the last one."""
    return tokens[blocks.sequence_M, (blocks.position_M + offset).clamp_max(tokens.shape[1] - 1)]


def _target_rows(model: DSpark | ChainDrafter, features: Sequence[Features], blocks: Blocks) -> tuple[Tensor, Tensor]:
    """p_t [N, V] bf16 over the draft vocabulary for the rows in use, and which row [M, G] each slot needs.

    The target's row at anchor + k predicts slot k.
    """
    lengths = torch.tensor([len(f.hidden) for f in features])
    offsets = lengths.cumsum(0) - lengths
    hidden = torch.cat([f.hidden for f in features])
    normalizer = torch.cat([f.log_normalizer for f in features])
    rows = (offsets[blocks.sequence_M] + blocks.position_M)[:, None] + torch.arange(model.block_size)
    used, inverse = torch.unique(rows.clamp_max(len(hidden) - 1), return_inverse=True)
    logits = model.base_logits(hidden[used])
    return (logits.float() - normalizer[used, None]).exp().to(torch.bfloat16), inverse


def _weights_and_labels(
    model: DSpark | ChainDrafter, tokens: Tensor, blocks: Blocks, position_decay: float
) -> tuple[Tensor, Tensor]:
    """w_k [M, G] fp32, 0 past the valid prefix, and labels [M, G] as draft ids, -1 outside the draft vocabulary."""
    slots = torch.arange(model.block_size)
    weights = (slots < blocks.num_slots_M[:, None]) * torch.exp(-slots / position_decay)
    draft_ids = torch.full((model.config.vocab_size,), -1)
    draft_ids[model.target_ids] = torch.arange(len(model.target_ids))
    labels = torch.stack([draft_ids[_tokens_at(tokens, blocks, slot + 1)] for slot in range(len(slots))], dim=1)
    return weights, labels


def _block_hidden(model: DSpark | ChainDrafter, tokens: Tensor, taps: Tensor, blocks: Blocks) -> Tensor:
    """h [M, G, D] of the blocks: each sees only the context of its own sequence strictly before its anchor."""
    num_sequences, length = tokens.shape
    counts = torch.bincount(blocks.sequence_M, minlength=num_sequences)
    column = torch.arange(len(blocks.sequence_M)) - (counts.cumsum(0) - counts)[blocks.sequence_M]
    anchors = torch.zeros(num_sequences, int(counts.max()), dtype=torch.int64)
    anchors[blocks.sequence_M, column] = blocks.position_M
    if isinstance(model, ChainDrafter):
        return model.teacher_forced(tokens, taps, anchors)[blocks.sequence_M, column]
    keys, values = model.project_context(taps, torch.arange(length).expand(num_sequences, length))
    visible = torch.arange(length) < anchors[..., None]
    hidden = model.hidden(tokens.gather(1, anchors), anchors, keys, values, visible)
    return hidden[blocks.sequence_M, column]
