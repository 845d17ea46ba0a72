"""The training losses of DSpark (paper section 3.3).

With a reduced draft vocabulary p_d is 0 outside it, so the target's mass outside is part of the L1 distance, and a
label outside gives no cross-entropy. The distribution loss writes its gradient down while it still has the softmax of
a few rows in cache: autograd would walk a dozen times over [M, V] fp32 tensors that don't fit there.

Shape letters: M rows (blocks), V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What each term of a weighted sum over slots is multiplied with (the normalisation included)."""

    cross_entropy: float
    """Of -log p_d(label): the ground-truth token."""
    soft_cross_entropy: float
    """Of -sum p_t log p_d: distillation."""
    l1: float
    """Of ||p_d - p_t||_1 = 2 * total variation, at temperature 1 over the full vocabulary."""


class _DistributionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, labels: Tensor, weights: Tensor, coefficients: Coefficients
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(logits)
        loss = logits.new_zeros((), dtype=torch.float32)
        soft = torch.empty(len(logits))
        distance = torch.empty(len(logits))
        for start in range(0, len(logits), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            chunk = _chunk(logits[rows].float(), target[rows].float(), labels[rows], coefficients)
            loss += (weights[rows] * chunk.loss).sum()
            soft[rows], distance[rows] = chunk.soft, chunk.distance
            gradient[rows] = chunk.gradient * weights[rows, None]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(soft, distance)
        return loss, soft, distance

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None, None, None


@dataclass(frozen=True, slots=True)
class _Chunk:
    loss: Tensor
    soft: Tensor
    distance: Tensor
    gradient: Tensor


def _chunk(logits: Tensor, target: Tensor, labels: Tensor, coefficients: Coefficients) -> _Chunk:
    """Losses of a few rows and their gradient for the logits, before the rows' weights."""
    log_draft = logits.log_softmax(dim=-1)
    draft = log_draft.exp()
    mass = target.sum(dim=-1, keepdim=True)
    difference = draft - target
    sign = difference.sign()
    distance = (difference * sign).sum(dim=-1) + (1 - mass.squeeze(1)).clamp_min(0)
    soft = -(target * log_draft).sum(dim=-1)
    loss = coefficients.soft_cross_entropy * soft + coefficients.l1 * distance
    # d soft / dz = p_d * mass - p_t;  d l1 / dz = p_d * (sign - sum p_d sign)
    gradient = (coefficients.soft_cross_entropy * mass) * draft - coefficients.soft_cross_entropy * target
    if coefficients.l1:
        gradient += coefficients.l1 * draft * (sign - (draft * sign).sum(dim=-1, keepdim=True))
    if coefficients.cross_entropy:
        inside = (labels >= 0).float() * coefficients.cross_entropy
        index = labels.clamp_min(0)[:, None]
        loss = loss - inside * log_draft.gather(1, index).squeeze(1)
        gradient += inside[:, None] * draft
        gradient.scatter_add_(1, index, -inside[:, None])
    return _Chunk(loss, soft, distance, gradient)


def distribution_loss(
    logits: Tensor, target: Tensor, labels: Tensor, weights: Tensor, coefficients: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum over rows of the coefficients' terms; differentiable in the logits only.

    logits [M, V]; target [M, V]: p_t restricted to the draft vocabulary (what it lacks of 1 lies outside); labels [M]
    int64 draft ids, -1 outside the vocabulary; weights [M] fp32, 0 = no slot. Returns (loss, soft cross-entropy [M],
    L1 distance [M]), fp32, the last two without gradient.
    """
    result: tuple[Tensor, Tensor, Tensor] = _DistributionLoss.apply(  # type: ignore[no-untyped-call]
        logits, target, labels, weights, coefficients
    )
    return result


def confidence_loss(confidence_logits: Tensor, distance: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of BCE(c_k, c*_k), c*_k = 1 - TV: the slot's acceptance probability, a target without gradient."""
    accepted = (1 - 0.5 * distance).clamp(0, 1)
    return (weights * F.binary_cross_entropy_with_logits(confidence_logits, accepted, reduction="none")).sum()
