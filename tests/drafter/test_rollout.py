"""Offline speculative decoding and what is read from its record."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from drafter.baselines.ngram import NgramDrafter
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
from drafter.interface import Draft
from drafter.rollout import Conversation, Rollout, Rounds
from drafter.target import Target
from tests.drafter.conftest import VOCABULARY, drafter_config, random_drafter, tiny_config


def conversations(number: int) -> list[Conversation]:
    torch.manual_seed(3)
    return [
        Conversation("even" if i % 2 == 0 else "odd", tuple(torch.randint(3, VOCABULARY, (3 + i % 5,)).tolist()))
        for i in range(number)
    ]


def committed(rollout: Rollout, prompts: list[Conversation]) -> tuple[dict[Conversation, list[int]], Rounds]:
    """What each prompt was answered, its last round whole: it may go beyond the limit. In batches of 4."""
    answers: dict[Conversation, list[int]] = {}
    original = rollout._ended

    def spy(tokens: list[int], limit: int, prompt_length: int) -> bool:
        prompt = next(c for c in prompts if list(c.prompt_ids) == tokens[:prompt_length])
        answers[prompt] = tokens[prompt_length:]
        return original(tokens, limit, prompt_length)

    rollout._ended = spy  # type: ignore[method-assign]
    return answers, rollout.run(prompts, batch_size=4)


def greedy(target: Target, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What the target itself answers."""
    written = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens)[0]
    answer: list[int] = written[len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize(("draft_vocab_size", "freeze"), [(97, False), (40, False), (40, True)])
def test_greedy_rollout_writes_what_the_target_writes_alone(
    tiny_target: Target, draft_vocab_size: int, freeze: bool
) -> None:
    model = random_drafter(drafter_config(draft_vocab_size=draft_vocab_size))
    if freeze:
        model.freeze()
    prompts = conversations(7)
    answers, _ = committed(Rollout(tiny_target, model, temperature=0.0, max_new_tokens=20), prompts)
    assert len(answers) == 7
    for prompt, answer in answers.items():
        assert answer[:20] == greedy(tiny_target, prompt.prompt_ids, 20)


def test_accepted_length_counts_every_committed_token(tiny_target: Target) -> None:
    """All of a text but its first token, which comes from the prefill and is no round's."""
    model = initial_drafter(tiny_target, drafter_config(), torch.arange(VOCABULARY)).eval()
    prompts = conversations(8)
    answers, rounds = committed(Rollout(tiny_target, model, temperature=1.0, max_new_tokens=24, seed=0), prompts)
    assert rounds.num_accepted.any(), "a drafter started from the target itself passes now and then"
    rows = acceptance_by_dataset(prompts, rounds)
    assert [row.dataset for row in rows] == ["even", "odd"]
    for row in rows:
        num_tokens = sum(len(answers[prompt]) - 1 for prompt in prompts if prompt.dataset == row.dataset)
        assert row.accepted_length * row.rounds == pytest.approx(num_tokens)


@pytest.fixture(scope="module")
def varied_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Weights so large that its greedy text goes on to other tokens; the tiny target repeats one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.2)).eval()
    return Target(model, SimpleNamespace(eos_token_id=2, chat_template=""), tmp_path_factory.mktemp("varied-target"))


class Script(NgramDrafter):
    """Drafts what it is told to, each token with certainty; all else is prompt look-up's."""

    def __init__(self, drafts: list[int]) -> None:
        super().__init__(len(drafts), VOCABULARY)
        self._drafts = torch.tensor([drafts])

    def propose(self, anchors: Tensor, *_: object) -> Draft:
        tokens = self._drafts.repeat(len(anchors), 1)
        certain = torch.nn.functional.one_hot(tokens, VOCABULARY).float()
        return Draft(tokens, tokens, certain, torch.ones(tokens.shape))


@pytest.mark.parametrize(
    ("end", "wrong", "accepted", "tokens", "slots"),
    [
        pytest.param(1, None, 4, 2, 2, id="the end inside the block: what passed behind it is not counted"),
        pytest.param(1, 2, 2, 2, 2, id="the end is the last that passed"),
        pytest.param(3, None, 4, 4, 4, id="the end is the block's last: no bonus token"),
        pytest.param(4, None, 4, 5, 4, id="the end just behind the block, as the bonus token"),
        pytest.param(2, 2, 2, 3, 4, id="the end as the recovered token: the slots behind the draft were a question"),
        pytest.param(3, 1, 1, 2, 4, id="no end yet"),
    ],
)
def test_a_round_counts_up_to_its_end_token(
    varied_target: Target, end: int, wrong: int | None, accepted: int, tokens: int, slots: int
) -> None:
    """Of a block of four right drafts, slot `wrong` apart; the text's token in slot `end` (4: behind them) ends it."""
    prompt = conversations(2)[1]
    first, *text = greedy(varied_target, prompt.prompt_ids, 6)
    assert len({first, *text}) == 6, "each token stands for its place"
    target = copy.copy(varied_target)
    target.end_token_ids = (text[end],)
    drafts = text[:4]
    if wrong is not None:
        drafts[wrong] = first
    answers, rounds = committed(Rollout(target, Script(drafts), temperature=0.0, max_new_tokens=5), [prompt])
    counts = (rounds.num_accepted, rounds.num_tokens, rounds.num_slots)
    assert [int(column[0]) for column in counts] == [accepted, tokens, slots]
    assert answers[prompt][: tokens + 1] == [first, *text[:tokens]]
    assert len(answers[prompt]) == 1 + int(rounds.num_tokens.sum())


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
