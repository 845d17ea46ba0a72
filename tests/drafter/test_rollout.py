"""Offline speculative decoding and what is read from its record."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafter.calibration import (
    auroc,
    errors_by_position,
    expected_calibration_error,
    fit_bias_shift,
    fit_sts,
    survival,
)
from drafter.evaluate import acceptance_by_dataset
from drafter.rollout import Conversation, Rollout, Rounds
from drafter.target import Target
from drafter.train import initial_drafter
from tests.drafter.conftest import VOCABULARY, drafter_config, random_drafter


def conversations(number: int) -> list[Conversation]:
    torch.manual_seed(3)
    return [
        Conversation("even" if i % 2 == 0 else "odd", tuple(torch.randint(3, VOCABULARY, (3 + i % 5,)).tolist()))
        for i in range(number)
    ]


@pytest.mark.parametrize("draft_vocab_size", [97, 40])
def test_greedy_rollout_writes_what_the_target_writes_alone(tiny_target: Target, draft_vocab_size: int) -> None:
    model = random_drafter(drafter_config(draft_vocab_size=draft_vocab_size))
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
    return Rounds(torch.zeros(size, dtype=torch.int64), true_logits * scale, accepted, accepted + 1, full)


def test_sts_finds_the_temperature_and_removes_the_error() -> None:
    rounds = synthetic_rounds(scale=2.5)
    temperatures = fit_sts(rounds)
    # Later positions have less evidence behind their cumulative product.
    torch.testing.assert_close(temperatures[:3], torch.full((3,), 2.5), rtol=0.15, atol=0)
    before, after = errors_by_position(rounds, torch.ones(5)), errors_by_position(rounds, temperatures)
    assert max(after) < 0.01 < max(before)
    calibrated = fit_sts(synthetic_rounds(scale=1.0))
    torch.testing.assert_close(calibrated[:3], torch.ones(3), rtol=0.1, atol=0)


def test_a_shifted_head_is_moved_back() -> None:
    rounds = synthetic_rounds(scale=1.0)
    biased = dataclasses.replace(rounds, confidence_logits=rounds.confidence_logits + 0.8)
    assert fit_bias_shift(biased) == pytest.approx(-0.8, abs=0.05)
    assert fit_bias_shift(rounds) == pytest.approx(0, abs=0.05)
    assert min(errors_by_position(biased, fit_sts(biased))[:2]) > 0.02, "no temperature takes a shift back"


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
