"""The training losses of DSpark (paper section 3.3), as sums and weights so that they add up over slots and ranks.

Everything is fp32. With a reduced draft vocabulary p_d is 0 outside it, so the target's mass outside is part of the
L1 distance, and a label outside gives no cross-entropy. Shape letters: M rows (blocks), V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(slots=True)
class LossSums:
    """Weighted sums of each term and of the weights; a mean is their ratio."""

    cross_entropy: Tensor
    cross_entropy_weight: Tensor
    soft_cross_entropy: Tensor
    l1: Tensor
    confidence: Tensor
    weight: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def total(self, cross_entropy: float, soft_cross_entropy: float, l1: float, confidence: float) -> Tensor:
        """The loss for the given coefficients: each term is sum(w * term) / sum(w)."""
        hard = self.cross_entropy / self.cross_entropy_weight.clamp_min(1e-6)
        weight = self.weight.clamp_min(1e-6)
        rest = soft_cross_entropy * self.soft_cross_entropy + l1 * self.l1 + confidence * self.confidence
        return cross_entropy * hard + rest / weight


def slot_losses(
    logits: Tensor, target: Tensor, labels: Tensor, confidence_logits: Tensor | None, weights: Tensor
) -> LossSums:
    """Losses of one slot over M blocks.

    logits [M, V]; target [M, V] fp32: p_t restricted to the draft vocabulary (its missing mass lies outside);
    labels [M] int64 draft ids, -1 outside the vocabulary; confidence_logits [M] or None; weights [M] fp32, 0 = no slot.
    """
    log_draft = logits.float().log_softmax(dim=-1)
    outside = (1 - target.sum(dim=-1)).clamp_min(0)
    # Full L1 = 2 * total variation (temperature 1, full vocabulary).
    distance = (log_draft.exp() - target).abs().sum(dim=-1) + outside
    labelled = weights * (labels >= 0)
    hard = -log_draft.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    soft = -(target * log_draft).sum(dim=-1)
    if confidence_logits is None:
        confidence = torch.zeros_like(distance)
    else:
        # c* = 1 - TV is the acceptance probability of the slot; a target, so no gradient flows into it.
        accepted = (1 - 0.5 * distance).detach().clamp(0, 1)
        confidence = F.binary_cross_entropy_with_logits(confidence_logits, accepted, reduction="none")
    return LossSums(
        cross_entropy=(labelled * hard).sum(),
        cross_entropy_weight=labelled.sum(),
        soft_cross_entropy=(weights * soft).sum(),
        l1=(weights * distance).sum(),
        confidence=(weights * confidence).sum(),
        weight=weights.sum(),
    )
