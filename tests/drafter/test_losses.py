"""The losses against their definitions, differentiated by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.losses import Coefficients, confidence_loss, distribution_loss

ROWS, FULL, KEPT = 150, 40, 25  # more than two chunks of rows; a draft vocabulary smaller than the target's


def plain_loss(logits: Tensor, target_full: Tensor, labels: Tensor, weights: Tensor, c: Coefficients) -> Tensor:
    """Over the FULL vocabulary, with p_d = 0 outside the first KEPT ids."""
    log_draft = logits.log_softmax(-1)
    draft = torch.cat((log_draft.exp(), torch.zeros(ROWS, FULL - KEPT)), dim=-1)
    soft = -(target_full[:, :KEPT] * log_draft).sum(-1)
    distance = (draft - target_full).abs().sum(-1)
    hard = torch.stack([-log_draft[i, label] if label >= 0 else torch.zeros(()) for i, label in enumerate(labels)])
    return (weights * (c.soft_cross_entropy * soft + c.l1 * distance + c.cross_entropy * hard)).sum()


@pytest.mark.parametrize("terms", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.1, 0.3, 0.9)])
def test_value_and_gradient_equal_the_definition(terms: tuple[float, float, float]) -> None:
    torch.manual_seed(0)
    coefficients = Coefficients(*terms)
    target = (2 * torch.randn(ROWS, FULL)).softmax(-1)
    logits = torch.randn(ROWS, KEPT, requires_grad=True)
    labels = torch.randint(-1, KEPT, (ROWS,))
    weights = torch.rand(ROWS) * (torch.rand(ROWS) > 0.2)
    expected = plain_loss(logits, target, labels, weights, coefficients)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    loss, _, distance = distribution_loss(logits, target[:, :KEPT], labels, weights, coefficients)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, 3 * expected_gradient)
    draft = torch.cat((logits.softmax(-1), torch.zeros(ROWS, FULL - KEPT)), dim=-1)
    torch.testing.assert_close(distance, (draft - target).abs().sum(-1))


def test_confidence_target_is_the_acceptance_probability() -> None:
    """At the minimum of the loss the confidence equals 1 - TV."""
    distance = torch.tensor([0.0, 0.5, 1.4, 2.0])
    logits = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    for _ in range(2000):
        optimizer.zero_grad()
        confidence_loss(logits, distance, torch.ones(4)).backward()
        optimizer.step()
    torch.testing.assert_close(logits.sigmoid(), 1 - distance / 2, atol=2e-3, rtol=0)
