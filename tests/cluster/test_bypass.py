"""Who is left out of the draft pass: the hard ones, from old outcomes, for a while; and nobody's answer changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from test_scheduling import curve, frozen
from tiny_engine import TinyDrafter, greedy_truth, make_engine, request, run
from torch import Tensor

from cluster.bypass import (
    FIRST_BACKOFF_STEPS,
    LONGEST_BACKOFF_STEPS,
    PROBE_ROUNDS,
    RETURN_AGE_STEPS,
    TRIAL_ROUNDS,
    Return,
    Returns,
    Round,
)
from cluster.sps import CostCurve, DraftSample, VerifySample


def live(returns: Returns, rates: list[float], requests: list[Return], num_steps: int, seed: int = 0) -> np.ndarray:
    """[steps, requests] whether each was drafted for, when its rounds pass so many drafts on average.

    A place takes 1 ms more of draft; plain steps take 10 ms a request.
    """
    generator = np.random.default_rng(seed)
    drafted = []
    for _ in range(num_steps):
        returns.judge(requests, lambda n: 0.004 + 0.001 * n if n else 0.0)
        chosen = [not one.left_out for one in requests]
        passed = [int(generator.poisson(rate)) * yes for rate, yes in zip(rates, chosen, strict=True)]
        rounds = tuple((one, n) for one, n, yes in zip(requests, passed, chosen, strict=True) if yes)
        returns.observe(Round(rounds, len(requests) + sum(passed), 0.01))
        drafted.append(chosen)
    return np.array(drafted)


def test_a_hard_request_is_left_out_and_probed_ever_more_rarely_while_an_easy_one_never_notices() -> None:
    requests = [Return(), Return()]
    drafted = live(Returns(), [0.02, 3.0], requests, 3000)
    assert drafted[:, 1].all()
    assert drafted[: TRIAL_ROUNDS + RETURN_AGE_STEPS, 0].all()
    assert drafted[:, 0].mean() < 0.05
    turns = np.flatnonzero(np.diff(drafted[:, 0].astype(int)))
    out, back = turns[::2], turns[1::2]
    lengths = back - out[: len(back)]
    assert lengths[0] == FIRST_BACKOFF_STEPS
    assert all(
        later in (2 * before, LONGEST_BACKOFF_STEPS) for before, later in zip(lengths, lengths[1:], strict=False)
    )
    probes = out[1:] - back[: len(out) - 1]
    assert (probes == PROBE_ROUNDS + RETURN_AGE_STEPS).all()


def test_a_request_that_became_easy_is_drafted_for_again() -> None:
    returns, requests = Returns(), [Return(), Return()]
    live(returns, [0.0, 3.0], requests, 400)
    drafted = live(returns, [4.0, 3.0], requests, 1200, seed=1)
    assert drafted[-100:].all()
    assert requests[0].backoff_steps == FIRST_BACKOFF_STEPS


def test_outcomes_count_no_sooner_than_the_budgets_other_inputs() -> None:
    returns, one = Returns(), Return()
    for step in range(TRIAL_ROUNDS + RETURN_AGE_STEPS):
        returns.judge([one], lambda n: float(n))
        assert one.num_rounds == max(0, step - RETURN_AGE_STEPS)
        returns.observe(Round(((one, 0),), 1, 1.0))
    assert not one.left_out
    returns.judge([one], lambda n: float(n))
    assert one.left_out


class Halfway(TinyDrafter):
    """Right about sequences that it has read, useless for the others, and equally sure of both."""

    def __init__(self, known: list[list[int]], vocab_size: int) -> None:
        following = {(tokens[i], i): tokens[i + 1 :] for tokens in known for i in range(len(tokens) - 1)}

        def logits(anchor: int, position: int, slot: int) -> Tensor:
            result = torch.zeros(vocab_size)
            tokens = following.get((anchor, position), [])
            if slot < len(tokens):
                result[tokens[slot]] = 20.0
            else:
                result[(anchor + 7 * position + slot) % vocab_size] = 20.0
            return result

        super().__init__(logits, torch.arange(vocab_size), confidence=0.8)


def test_in_a_batch_the_hard_request_is_left_out_the_easy_one_is_not_and_both_answers_are_exact(
    tiny: tuple[Path, Any],
) -> None:
    folder, model = tiny
    easy, hard = [3, 1, 4, 1, 5], [2, 7, 1]
    truth = {"easy": greedy_truth(model, easy, 110), "hard": greedy_truth(model, hard, 110)}
    samples = [VerifySample(n, 100, 1.0 + n * 1e-3) for n in (1, 2, 4, 8, 16, 32, 64)]
    cost = CostCurve.fit(samples, [DraftSample(1, 1, 0.2), DraftSample(16, 1, 3.2)], curve(1e-3).provenance)
    engine = frozen(
        make_engine(folder, Halfway([easy + truth["easy"]], 96), cost, speculation="scheduled", max_model_len=256)
    )
    outputs = run(engine, [request(easy, "easy", max_tokens=110), request(hard, "hard", max_tokens=110)])
    assert outputs.tokens == truth
    proposed = {"easy": [], "hard": []}  # type: dict[str, list[int]]
    both = [step for step in outputs.steps if len(step.rounds) == 2]
    for step in both:
        for name, verify_round in zip(step.report.request_ids, step.rounds, strict=False):
            proposed[name].append(verify_round.num_proposed)
    assert all(proposed["easy"][:-2])
    drafted_alone = [step for step in outputs.steps if len(step.rounds) == 1]
    assert drafted_alone, "the easy one ends first"
    late = [step.rounds[0].num_proposed for step in outputs.steps[TRIAL_ROUNDS + 6 :] if len(step.rounds) == 1]
    assert late.count(0) > 0.5 * len(late)
