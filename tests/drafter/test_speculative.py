"""The parts of the guarantee: keyed randomness, the truncated distribution, inverse CDF, ragged verification."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafter.interface import Draft
from drafter.randomness import exponentials, uniform
from drafter.speculative import Purpose, SamplingRows, _invert, _residual, probabilities, round_seeds, sample, verify

VOCABULARY = 1000


def rows_of(
    num_rows: int,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    coupled: bool | list[bool] = False,
) -> SamplingRows:
    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype).expand(num_rows).clone()

    return SamplingRows(
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        torch.arange(num_rows),
        torch.full((num_rows,), 5),
        column(coupled, torch.bool),
    )


def random_logits(num_rows: int, vocabulary: int = VOCABULARY, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(7))


# --- randomness ---


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_uniform_numbers_of_neighbouring_keys_are_uniform_and_independent(axis: str) -> None:
    counter, fixed = torch.arange(100_000), torch.tensor(11)
    numbers = uniform(*((counter, fixed) if axis == "seed" else (fixed, counter)), Purpose.DRAFT)
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert kstest(numbers.numpy(), "uniform").pvalue > 1e-3
    pairs = (numbers[:-1] * 16).long() * 16 + (numbers[1:] * 16).long()
    assert chisquare(pairs.bincount(minlength=256).numpy()).pvalue > 1e-3


def test_purposes_seeds_and_positions_are_independent() -> None:
    counter = torch.arange(50_000)
    streams = [uniform(counter, torch.tensor(3), purpose) for purpose in Purpose]
    streams += [uniform(counter + 1, torch.tensor(3), Purpose.DRAFT), uniform(counter, torch.tensor(4), Purpose.DRAFT)]
    streams += [uniform(round_seeds(counter, counter < 0, r), torch.tensor(3), Purpose.DRAFT) for r in (0, 1)]
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert float(correlations.abs().max()) < 5 / 50_000**0.5


def test_exponential_noise_is_exponential_over_tokens_and_over_keys() -> None:
    tokens = torch.arange(49_152)
    over_tokens = exponentials(torch.tensor([3, 4]), torch.tensor([9, 9]), tokens)
    assert over_tokens.dtype == torch.float32 and bool((over_tokens > 0).all() and over_tokens.isfinite().all())
    assert kstest(over_tokens[0].numpy(), "expon").pvalue > 1e-3
    assert abs(float(torch.corrcoef(over_tokens)[0, 1])) < 5 / 49_152**0.5
    over_keys = exponentials(torch.arange(40_000), torch.full((40_000,), 2), torch.tensor([17, 18]))
    assert kstest(over_keys[:, 0].numpy(), "expon").pvalue > 1e-3
    assert abs(float(torch.corrcoef(over_keys.T)[0, 1])) < 5 / 40_000**0.5


def test_the_winner_of_a_race_over_a_large_vocabulary_is_uniform() -> None:
    winners = torch.cat(
        [exponentials(torch.arange(100), torch.full((100,), p), torch.arange(49_152)).argmin(1) for p in range(10)]
    )
    assert chisquare((winners // 3072).bincount(minlength=16).numpy()).pvalue > 1e-3
    assert chisquare((winners % 16).bincount(minlength=16).numpy()).pvalue > 1e-3


def test_numbers_are_pinned_and_equal_unbounded_integer_arithmetic() -> None:
    """A seeded request must return the same text after an upgrade and on every device: the hash may not change."""
    assert float(uniform(torch.tensor(1), torch.tensor(2), Purpose.EMIT)) == 0.24390619551573356
    noise = exponentials(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))
    assert float(noise) == pytest.approx(3.03929543, rel=1e-6)
    for seed, position, token in [(0, 0, 0), (-1, 7, 49_151), (2**63 - 1, 100_000, 5), (-(2**63), 1, 151_936)]:
        key = _key(seed, position, Purpose.COUPLED)
        state = _scramble((token * 0x9E3779B1 ^ key) % 2**32, 16, 0x85EBCA6B)
        state = _scramble((state + (key >> 32)) % 2**32, 15, 0xC2B2AE35)
        fraction = ((_scramble(state, 15, 0x27D4EB2F) >> 1) + 0.5) / 2**31
        found = exponentials(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
        assert float(found) == pytest.approx(-math.log1p(-fraction), rel=1e-5)
        expected = (_key(seed, position, Purpose.DRAFT) >> 12) / 2**52
        assert float(uniform(torch.tensor(seed), torch.tensor(position), Purpose.DRAFT)) == expected


def _key(seed: int, position: int, purpose: Purpose) -> int:
    golden = 0x9E3779B97F4A7C15
    return _mix(_mix(seed + golden) + (4 * position + purpose) * golden)


def _mix(value: int) -> int:
    value %= 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def _scramble(state: int, bits: int, factor: int) -> int:
    return (state ^ state >> bits) * factor % 2**32


def test_only_rejection_rows_get_fresh_seeds() -> None:
    seeds, coupled = torch.tensor([5, 5, -9]), torch.tensor([True, False, False])
    first, second = (round_seeds(seeds, coupled, number) for number in (0, 1))
    assert int(first[0]) == int(second[0]) == 5
    assert bool((first[1:] != second[1:]).all())


# --- distributions ---


def hugging_face(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits.clone()).softmax(-1)


CASES = [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.0, 50, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (5.0, 0, 0.97, 0.0)]
CASES += [(1.0, 0, 1.0, 0.1), (1.2, 40, 0.7, 0.0), (1.0, 700, 0.999, 0.02), (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-6, 0.0)]


def test_every_truncation_equals_hugging_faces_also_when_rows_differ() -> None:
    logits = random_logits(len(CASES))
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*CASES, strict=True))
    found = probabilities(logits, rows_of(len(CASES), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    for number, case in enumerate(CASES):
        wanted = hugging_face(logits[number : number + 1], *case)[0]
        assert torch.equal(found[number] > 0, wanted > 0), case
        torch.testing.assert_close(found[number], wanted)


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert (probabilities(logits, rows_of(1, top_k=2)) > 0).tolist() == [[True, True, True, False]]
    assert (probabilities(logits, rows_of(1, top_p=0.7)) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_one_hot_and_the_lowest_id_wins_a_tie(dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    logits[1, [40, 30, 999]] = 50.0
    alone = probabilities(logits, rows_of(3, temperature=0.0))
    mixed = probabilities(logits, rows_of(3, temperature=[0.0, 0.0, 1.0]))
    assert torch.equal(alone[:2], mixed[:2])
    assert alone.sum(1).tolist() == [1, 1, 1] and int(alone[1].argmax()) == 30
    assert float(mixed[2].max()) < 1
    assert sample(mixed, rows_of(3, temperature=[0.0, 0.0, 1.0]), Purpose.EMIT)[1] == 30


def test_bf16_logits_give_the_fp32_distribution_of_their_values() -> None:
    logits = random_logits(4).bfloat16()
    torch.testing.assert_close(probabilities(logits, rows_of(4)), logits.double().softmax(-1).float())


def test_forbidden_tokens_have_probability_zero_at_every_temperature() -> None:
    logits = random_logits(4)
    logits[:, 100:] = -torch.inf
    found = probabilities(logits, rows_of(4, temperature=[0.0, 1e-4, 1.0, 9.0]))
    assert float(found[:, 100:].sum()) == 0 and bool(found.isfinite().all())
    torch.testing.assert_close(found.sum(1), torch.ones(4))


# --- drawing ---


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
def test_draws_follow_the_probabilities_and_never_take_a_forbidden_token(vocabulary: int, coupled: bool) -> None:
    weights = random_logits(1, vocabulary, scale=1.0).softmax(-1)
    weights[0, ::3] = 0
    weights /= weights.sum()
    num_draws = 20_000
    drawn = sample(weights.expand(num_draws, -1), rows_of(num_draws, coupled=coupled), Purpose.DRAFT)
    counts = drawn.bincount(minlength=vocabulary)
    assert int(counts[::3].sum()) == 0
    possible = weights[0] > 0
    expected = weights[0, possible].double() / weights[0].double().sum() * num_draws
    assert chisquare(counts[possible].double(), expected).pvalue > 1e-3


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    """A million draws' worth of tail: in fp32 sums, tokens of 1e-8 behind a mass of 1 would round away."""
    weights = torch.full((1, 49_152), 1e-8)
    weights[0, 0] = 1.0
    goal = torch.linspace(1.00001, 1.0004, 50, dtype=torch.float64) / weights.double().sum()
    found = _invert(weights.expand(50, -1), goal)
    expected = ((goal * weights.double().sum() - 1) / 1e-8).long() + 1
    assert int((found - expected).abs().max()) <= 1


def test_draft_and_target_share_noise_by_target_id() -> None:
    target_ids = torch.arange(0, VOCABULARY, 3)
    rows = rows_of(500, coupled=True)
    full = torch.zeros(500, VOCABULARY)
    reduced = random_logits(500, len(target_ids)).softmax(-1)
    full[:, target_ids] = reduced
    drafted = target_ids[sample(reduced, rows, Purpose.DRAFT, target_ids)]
    assert torch.equal(drafted, sample(full, rows, Purpose.EMIT))


# --- verification ---


def a_draft(num_requests: int, block: int, vocabulary: int) -> Draft:
    given = random_logits(num_requests * block, vocabulary).softmax(-1)
    ids = given.argmax(-1).view(num_requests, block)
    return Draft(ids, ids, given.view(num_requests, block, vocabulary), torch.ones(num_requests, block))


@pytest.mark.parametrize("coupled", [False, True])
def test_without_drafts_verification_is_plain_sampling(coupled: bool) -> None:
    logits = random_logits(6)
    rows = rows_of(6, temperature=[1.0, 0.0, 0.5, 1.0, 2.0, 0.0], top_k=[0, 0, 9, 0, 3, 5], coupled=coupled)
    result = verify(logits, torch.arange(7), None, torch.zeros(6, dtype=torch.int64), rows)
    assert result.num_accepted.tolist() == [0] * 6
    assert torch.equal(result.next_tokens, sample(probabilities(logits, rows), rows, Purpose.EMIT))


def test_greedy_accepts_exactly_the_agreeing_prefix() -> None:
    logits = random_logits(1 + 3 + 4 + 1)
    best = logits.argmax(1)
    lengths = torch.tensor([0, 2, 3, 0])
    starts = torch.tensor([0, 1, 4, 8, 9])
    draft = a_draft(4, 3, VOCABULARY)
    draft.tokens[1, :2] = best[1:3]
    draft.tokens[2] = torch.stack([best[4], best[5] + 1, best[6]])
    result = verify(logits, starts, draft, lengths, rows_of(9, temperature=0.0))
    assert result.num_accepted.tolist() == [0, 2, 1, 0]
    assert result.next_tokens.tolist() == best[[0, 3, 5, 8]].tolist()


def test_a_token_that_the_target_forbids_is_rejected_and_never_recovered() -> None:
    num_requests = 2_000
    draft = a_draft(num_requests, 1, VOCABULARY)
    logits = random_logits(2 * num_requests)
    logits[0::2].scatter_(1, draft.tokens, -torch.inf)
    starts = 2 * torch.arange(num_requests + 1)
    result = verify(logits, starts, draft, torch.ones(num_requests, dtype=torch.int64), rows_of(2 * num_requests))
    assert int(result.num_accepted.sum()) == 0
    assert not bool((result.next_tokens == draft.tokens[:, 0]).any())


def test_identical_distributions_with_a_rounded_probability_still_give_a_token() -> None:
    """p_d a hair above p_t everywhere leaves no residual: the fallback is the target's own distribution."""
    target = torch.tensor([[0.0, 0.25, 0.75]])
    assert torch.equal(_residual(target, target + 1e-7, None), target)
