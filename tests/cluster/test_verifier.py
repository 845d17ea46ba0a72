"""What a request asks of its distribution, position by position; and the distribution of the whole engine."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tiny_engine import TinyDrafter, make_engine, random_drafter, request, run, tiny_llama
from torch import Tensor

from cluster import verifier
from cluster.batcher import Sequence
from cluster.messages import SamplingParams

VOCAB = 20


def sequence_with(output: list[int], prompt: list[int], **sampling: Any) -> Sequence:
    sequence = Sequence(request(prompt, **{"max_tokens": 50, **sampling}), seed=1)
    sequence.tokens += output
    return sequence


def reference(logits: Tensor, prompt: list[int], output: list[int], sampling: SamplingParams) -> Tensor:
    """One row, from the definitions, token by token."""
    row = logits.clone()
    for token, bias in sampling.logit_bias:
        row[token] += bias
    if len(output) < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            row[token] = float("-inf")
    for token in range(len(row)):
        if token in prompt or token in output:
            row[token] = (
                row[token] / sampling.repetition_penalty
                if row[token] > 0
                else (row[token] * sampling.repetition_penalty)
            )
        row[token] -= sampling.frequency_penalty * output.count(token)
        row[token] -= sampling.presence_penalty * (token in output)
    return row


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.25},
        {"repetition_penalty": 1.3},
        {"logit_bias": ((3, 4.0), (5, -100.0))},
        {"min_tokens": 4, "stop_token_ids": (2, 9)},
        {
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 0.8,
            "logit_bias": ((3, 4.0),),
            "min_tokens": 5,
            "stop_token_ids": (3,),
        },
    ],
    ids=lambda s: "+".join(s),
)
def test_each_position_sees_its_output_and_the_drafts_before_it(sampling: dict[str, Any]) -> None:
    prompt, output, drafts = [1, 2, 2, 15], [3, 3, 4], [4, 7, 3, 7]
    sequence = sequence_with(output, prompt, **sampling)
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    edited = logits.clone()
    assert verifier.edits_logits(sequence.request.sampling, sequence.num_output)
    verifier.edit_logits(edited, sequence, drafts)
    for j, row in enumerate(logits):
        expected = reference(row, prompt, output + drafts[:j], sequence.request.sampling)
        torch.testing.assert_close(edited[j], expected)


def test_who_asks_for_nothing_costs_nothing() -> None:
    assert not verifier.edits_logits(SamplingParams(max_tokens=5, stop_token_ids=(1,)), 0)
    assert verifier.edits_logits(SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(1,)), 1)
    assert not verifier.edits_logits(SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(1,)), 2)


def test_logits_are_left_for_the_logprobs() -> None:
    sequences = [sequence_with([3], [1], repetition_penalty=2.0, num_logprobs=2), sequence_with([3], [1])]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    before = logits.clone()
    first = verifier.sampling_rows(sequences, step=0)
    outcome, other = verifier.verify(logits, sequences, [[], []], None, None, [5, 1], first)
    assert torch.equal(logits, before)
    assert outcome.finish_reason is None
    assert other.finish_reason == "length"
    assert other.logprobs is None
    assert outcome.logprobs is not None
    assert outcome.logprobs[0].logprob == pytest.approx(
        float(before[0].float().log_softmax(-1)[outcome.token_ids[0]]), abs=1e-6
    )


def test_logprobs_of_no_alternatives() -> None:
    [entry] = verifier.token_logprobs(torch.zeros(1, 4), [2], 0)
    assert entry.logprob == pytest.approx(-1.3862944)
    assert entry.top == ()


# --- the distribution of the engine's texts ---

TINY, LENGTH, SAMPLES = 5, 4, 6_000


@pytest.fixture(scope="module")
def five_words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[int, ...], float]]:
    """A model of five words, and the exact probability of each of its 625 texts of four words."""
    folder, model = tiny_llama(tmp_path_factory.mktemp("five"), vocab_size=TINY)
    texts = list(itertools.product(range(TINY), repeat=LENGTH))
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2, *text] for text in texts])).logits[:, 1:-1]
    logprobs = (logits / 0.8).log_softmax(-1).gather(2, torch.tensor(texts)[..., None]).sum(dim=(1, 2))
    return folder, dict(zip(texts, logprobs.exp().tolist(), strict=True))


def chi_square_p(folder: Path, exact: dict[tuple[int, ...], float], drafter: TinyDrafter, **sampling: Any) -> float:
    engine = make_engine(folder, drafter, max_num_seqs=64, max_num_batched_tokens=512, max_num_waiting=SAMPLES)
    requests = [
        request(
            [1, 2],
            temperature=0.8,
            max_tokens=LENGTH,
            **{name: value(i) if callable(value) else value for name, value in sampling.items()},
        )
        for i in range(SAMPLES)
    ]
    outputs = run(engine, requests)
    assert sum(step.report.drafted for step in outputs.steps) > 100
    counts = Counter(tuple(tokens) for tokens in outputs.tokens.values())
    observed, expected, rest = [], [], [0.0, 0.0]
    for text, probability in exact.items():
        if probability * SAMPLES >= 5:
            observed.append(float(counts[text]))
            expected.append(probability * SAMPLES)
        else:
            rest[0] += counts[text]
            rest[1] += probability * SAMPLES
    total = sum(expected) + rest[1]
    return float(chisquare([*observed, rest[0]], [e * SAMPLES / total for e in (*expected, rest[1])]).pvalue)


class LyingDrafter(TinyDrafter):
    """Reports another distribution than the one it drew from."""

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        draft = super().propose(*args, **kwargs)
        draft.probabilities.copy_(torch.full_like(draft.probabilities, 1 / draft.probabilities.shape[-1]))
        return draft


@pytest.mark.usefixtures("known_seeds")
@pytest.mark.parametrize("seeded", [False, True], ids=["rejection", "coupled"])
def test_texts_follow_the_models_distribution(five_words, seeded: bool) -> None:
    folder, exact = five_words
    seeds = {"seed": lambda i: i} if seeded else {}
    assert chi_square_p(folder, exact, random_drafter(TINY, block_size=3), **seeds) > 1e-4


@pytest.mark.usefixtures("known_seeds")
def test_the_chi_square_sees_a_lying_drafter(five_words) -> None:
    folder, exact = five_words
    honest = random_drafter(TINY, block_size=3, spread=2.0)
    liar = LyingDrafter(honest._logits, honest.target_ids, honest.block_size)
    assert chi_square_p(folder, exact, liar) < 1e-6
