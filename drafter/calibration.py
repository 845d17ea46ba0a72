"""Calibrated confidence: the head's bias, Sequential Temperature Scaling (STS, paper section 3.4), and their error.

Pure functions on recorded rounds; `python -m drafter calibrate` records them with the real target on held-out prompts.
A drafter accepts less on new prompts than on those it has learned by heart, and its confidence head was trained on the
latter: that is a shift, which no temperature can take back, so the head's bias is moved first.

Shape letters: N rounds, G block positions.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from drafter.checkpoint import shift_confidence
from drafter.data import provenance, write_json
from drafter.rollout import Rounds, add_rollout_arguments, load_for_rollout, roll_out

_NUM_BINS = 20
_GRID = torch.logspace(-1, 1, 161).double()  # temperatures 0.1 .. 10, 2.9% apart


def passed(rounds: Rounds) -> Tensor:
    """[N, G] bool: the prefix through slot k was accepted."""
    return rounds.num_accepted[:, None] > torch.arange(rounds.confidence_logits.shape[1])


def counted(rounds: Rounds) -> Tensor:
    """[N, G] bool: the slot's outcome counts (slots behind an accepted end token don't)."""
    return rounds.num_slots[:, None] > torch.arange(rounds.confidence_logits.shape[1])


def survival(confidence_logits: Tensor, temperatures: Tensor) -> Tensor:
    """Cumulative product of sigmoid(logit_i / T_i) over i <= k: [N, G] fp64."""
    return torch.sigmoid(confidence_logits.double() / temperatures.double()).cumprod(dim=1)


def expected_calibration_error(predicted: Tensor, happened: Tensor) -> float:
    """ECE over 20 equal bins: |mean prediction - frequency| of each, weighted by its share. Both [N]."""
    bins = (predicted * _NUM_BINS).long().clamp(0, _NUM_BINS - 1)
    gap = torch.zeros(_NUM_BINS, dtype=torch.float64).index_add_(0, bins, predicted.double() - happened.double())
    return float(gap.abs().sum() / len(predicted))


def auroc(predicted: Tensor, happened: Tensor) -> float:
    """P(a random success was given more confidence than a random failure), ties counted half. NaN for one class."""
    positives, negatives = int(happened.sum()), int((~happened).sum())
    if positives == 0 or negatives == 0:
        return float("nan")
    values, inverse, counts = torch.unique(predicted, return_inverse=True, return_counts=True)
    last_rank = counts.cumsum(0).double()
    mean_rank = last_rank - (counts.double() - 1) / 2
    rank_sum = float(mean_rank[inverse][happened].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def fit_bias_shift(rounds: Rounds) -> float:
    """What to add to every logit so that confidences are right on average, over the slots that were put to the test.

    The maximum-likelihood shift of a logistic model: the root of sum(sigmoid(logit + shift) - passed), by bisection.
    """
    tested = counted(rounds) & (rounds.num_accepted[:, None] >= torch.arange(rounds.confidence_logits.shape[1]))
    logits, happened = rounds.confidence_logits.double()[tested], passed(rounds)[tested].double()
    low, high = -10.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        if torch.sigmoid(logits + middle).sum() < happened.sum():
            low = middle
        else:
            high = middle
    return middle


def fit_sts(rounds: Rounds) -> Tensor:
    """T_0 .. T_{G-1} [G] fp32, left to right: each minimises the ECE of the cumulative product, earlier ones fixed.

    Among temperatures of equal error the one nearest to 1 wins, so that a position without evidence stays untouched.
    """
    logits, happened, valid = rounds.confidence_logits.double(), passed(rounds), counted(rounds)
    temperatures = torch.ones(logits.shape[1], dtype=torch.float64)
    before = torch.ones(len(logits), dtype=torch.float64)
    nearest_first = _GRID[_GRID.log().abs().argsort(stable=True)].tolist()
    for slot in range(logits.shape[1]):
        rows = valid[:, slot]
        if rows.any():
            errors = [
                expected_calibration_error(
                    before[rows] * torch.sigmoid(logits[rows, slot] / temperature), happened[rows, slot]
                )
                for temperature in nearest_first
            ]
            temperatures[slot] = nearest_first[errors.index(min(errors))]
        before = before * torch.sigmoid(logits[:, slot] / temperatures[slot])
    return temperatures.float()


def errors_by_position(rounds: Rounds, temperatures: Tensor) -> list[float]:
    """ECE of the survival at each position."""
    predicted, happened, valid = survival(rounds.confidence_logits, temperatures), passed(rounds), counted(rounds)
    return [
        expected_calibration_error(predicted[valid[:, k], k], happened[valid[:, k], k])
        for k in range(predicted.shape[1])
    ]


def auroc_by_position(rounds: Rounds, temperatures: Tensor) -> list[float]:
    """AUROC of the survival at each position."""
    predicted, happened, valid = survival(rounds.confidence_logits, temperatures), passed(rounds), counted(rounds)
    return [auroc(predicted[valid[:, k], k], happened[valid[:, k], k]) for k in range(predicted.shape[1])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rollout_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    target, drafter = load_for_rollout(arguments)
    _, rounds = roll_out(target, drafter, arguments)
    shift = fit_bias_shift(rounds)
    shifted = dataclasses.replace(rounds, confidence_logits=rounds.confidence_logits + shift)
    temperatures = fit_sts(shifted)
    folder: Path = arguments.drafter
    shift_confidence(folder, shift)
    facts = provenance(
        target=arguments.target,
        prompts=[path.name for path in arguments.prompts],
        temperature=arguments.temperature,
        verification="rejection",
        rounds=len(rounds.num_accepted),
    )
    ones = torch.ones_like(temperatures)
    write_json(
        folder / "calibration.json",
        {
            "sts_temperatures": [round(float(t), 4) for t in temperatures],
            "bias_shift_in_the_weights": round(shift, 4),
            "ece_before": errors_by_position(rounds, ones),
            "ece_after_the_shift": errors_by_position(shifted, ones),
            "ece_after_on_the_same_rounds": errors_by_position(shifted, temperatures),
            "provenance": facts,
        },
    )
