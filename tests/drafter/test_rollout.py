"""Offline speculative decoding and what is read from its record."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from drafter.calibration import (
    auroc,
    auroc_by_position,
    errors_by_position,
    expected_calibration_error,
    fit_head,
    fit_sts,
    survival,
)
from drafter.evaluate import acceptance_by_dataset
from drafter.initial import initial_drafter
from drafter.rollout import Conversation, Rollout, Rounds
from drafter.target import Target
from tests.drafter.conftest import VOCABULARY, drafter_config, random_drafter


def conversations(number: int) -> list[Conversation]:
    torch.manual_seed(3)
    return [
        Conversation("even" if i % 2 == 0 else "odd", tuple(torch.randint(3, VOCABULARY, (3 + i % 5,)).tolist()))
        for i in range(number)
    ]


@pytest.mark.parametrize(("draft_vocab_size", "freeze"), [(97, False), (40, False), (40, True)])
def test_greedy_rollout_writes_what_the_target_writes_alone(
    tiny_target: Target, draft_vocab_size: int, freeze: bool
) -> None:
    model = random_drafter(drafter_config(draft_vocab_size=draft_vocab_size))
    if freeze:
        model.freeze()
    prompts = conversations(7)
    rollout = Rollout(tiny_target, model, temperature=0.0, max_new_tokens=20)
    written: list[list[int]] = []
    original = rollout._ended

    def spy(tokens: list[int], limit: int, prompt_length: int) -> bool:
        ended = original(tokens, limit, prompt_length)
        if ended:
            written.append(tokens[:limit])
        return ended

    rollout._ended = spy  # type: ignore[method-assign]
    rollout.run(prompts, batch_size=4)
    for tokens in written:
        prompt = next(c.prompt_ids for c in prompts if list(c.prompt_ids) == tokens[: len(c.prompt_ids)])
        expected = tiny_target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0]
        assert tokens == expected.tolist()
    assert len(written) == 7


def test_accepted_length_counts_every_committed_token(tiny_target: Target) -> None:
    """A drafter started from the target itself passes now and then; the sums of the record must agree."""
    model = initial_drafter(tiny_target, drafter_config(), torch.arange(VOCABULARY))
    prompts = conversations(8)
    rounds = Rollout(tiny_target, model.eval(), temperature=1.0, max_new_tokens=24).run(prompts, batch_size=8)
    assert torch.all(rounds.num_tokens <= rounds.num_accepted + 1)
    assert torch.all((rounds.num_tokens == rounds.num_accepted + 1) | (rounds.num_slots < 5) | (rounds.num_tokens <= 5))
    rows = acceptance_by_dataset(prompts, rounds)
    assert {row.dataset for row in rows} == {"even", "odd"}
    tokens = sum(row.accepted_length * row.rounds for row in rows)
    assert tokens == pytest.approx(int(rounds.num_tokens.sum()))


def synthetic_rounds(scale: float, size: int = 40_000) -> Rounds:
    """Rounds whose logits are `scale` times the true ones at every position."""
    torch.manual_seed(0)
    true_logits = torch.randn(size, 5) * 1.5
    happened = torch.rand(size, 5) < true_logits.sigmoid()
    accepted = happened.long().cumprod(dim=1).sum(dim=1)
    full = torch.full((size,), 5)
    inputs = torch.empty(size, 5, 0)
    return Rounds(torch.zeros(size, dtype=torch.int64), true_logits * scale, accepted, accepted + 1, full, inputs)


def test_sts_finds_the_temperature_and_removes_the_error() -> None:
    rounds = synthetic_rounds(scale=2.5)
    temperatures = fit_sts(rounds)
    # Later positions have less evidence behind their cumulative product.
    torch.testing.assert_close(temperatures[:3], torch.full((3,), 2.5), rtol=0.15, atol=0)
    before, after = errors_by_position(rounds, torch.ones(5)), errors_by_position(rounds, temperatures)
    assert max(after) < 0.01 < max(before)
    calibrated = fit_sts(synthetic_rounds(scale=1.0))
    torch.testing.assert_close(calibrated[:3], torch.ones(3), rtol=0.1, atol=0)


def rounds_of_a_linear_truth(weight: Tensor, bias: float, size: int = 4000) -> Rounds:
    """Rounds of 100 conversations whose slots pass with probability sigmoid(inputs . weight + bias)."""
    torch.manual_seed(0)
    inputs = torch.randn(size, 5, len(weight), dtype=torch.float64)
    happened = torch.rand(size, 5) < (inputs @ weight + bias).sigmoid()
    accepted = happened.long().cumprod(dim=1).sum(dim=1)
    full = torch.full((size,), 5)
    logits = torch.zeros(size, 5)
    return Rounds(torch.arange(size) % 100, logits, accepted, accepted + 1, full, inputs)


def test_the_head_is_refitted_to_what_happens() -> None:
    truth = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    rounds = rounds_of_a_linear_truth(truth, bias=-0.5)
    fit = fit_head(rounds, torch.zeros(5, dtype=torch.float64), 1.5)
    torch.testing.assert_close(fit.weight, truth, rtol=0, atol=0.12)
    assert fit.bias == pytest.approx(-0.5, abs=0.12)
    refitted = dataclasses.replace(rounds, confidence_logits=fit.logits)
    assert errors_by_position(refitted, torch.ones(5))[0] < 0.03
    overconfident = dataclasses.replace(rounds, confidence_logits=fit.logits + 1.0)
    assert min(errors_by_position(overconfident, fit_sts(overconfident))[:2]) > 0.03, (
        "no temperature takes a shift back"
    )


def test_where_there_is_nothing_to_learn_the_trained_head_stays() -> None:
    """Many useless inputs and few rounds: the likelihood of conversations left out asks for a strong pull."""
    truth = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.1
    rounds = rounds_of_a_linear_truth(truth, bias=0.0, size=400)
    fit = fit_head(rounds, truth, 0.0)
    assert (fit.weight - truth).norm() < 0.25 * truth.norm()
    assert fit.penalty >= 1e-2


def test_logits_are_those_of_heads_that_did_not_see_the_conversation() -> None:
    """Outcomes that no input explains: a head judged on what it was fitted on would seem to explain them."""
    rounds = rounds_of_a_linear_truth(torch.zeros(200, dtype=torch.float64), bias=0.0, size=400)
    fit = fit_head(rounds, torch.zeros(200, dtype=torch.float64), 0.0)
    assert auroc_by_position(dataclasses.replace(rounds, confidence_logits=fit.logits), torch.ones(5))[0] < 0.6


def test_sts_keeps_the_order_of_each_position() -> None:
    rounds = synthetic_rounds(scale=2.5)
    order = survival(rounds.confidence_logits, torch.ones(5))[:, 0].argsort()
    scaled = survival(rounds.confidence_logits, fit_sts(rounds))[order, 0]
    assert torch.all(scaled[1:] >= scaled[:-1])


def test_ece_and_auroc_by_hand() -> None:
    predicted = torch.tensor([0.1, 0.1, 0.9, 0.9])
    happened = torch.tensor([False, True, True, True])
    assert expected_calibration_error(predicted, happened) == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    assert auroc(predicted, happened) == pytest.approx((2 * 1 + 1 * 0.5) / 3)
    assert auroc(torch.rand(9), torch.ones(9, dtype=torch.bool)) != auroc(
        torch.rand(9), torch.ones(9, dtype=torch.bool)
    )
