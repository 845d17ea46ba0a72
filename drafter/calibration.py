"""Calibrated confidence: the head refitted on new prompts, Sequential Temperature Scaling (STS, paper section 3.4).

Pure functions on recorded rounds; `python -m drafter calibrate` records them with the real target on held-out prompts.
A drafter accepts less on new prompts than on those it has learned by heart, and its confidence head was trained on the
latter. No temperature takes that back, so the head's one linear layer is fitted again before the temperatures are.

Shape letters: N rounds, G block positions, M slots that were put to the test, F inputs of the confidence head.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from drafter.checkpoint import confidence_weights, replace_confidence
from drafter.data import provenance, write_json
from drafter.rollout import Rollout, Rounds, add_rollout_arguments, choose_conversations, load_for_rollout
from drafter.target import Target

_NUM_BINS = 20
_NUM_FOLDS = 5
_PENALTIES = [10.0 ** (-k / 2) for k in range(10)]  # 1 .. 3e-5
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


def reliability(predicted: Tensor, happened: Tensor) -> list[tuple[float, float, int]]:
    """(mean prediction, frequency, number) of each of the 20 bins that holds something. Both [N]."""
    bins = (predicted * _NUM_BINS).long().clamp(0, _NUM_BINS - 1)
    chosen = [bins == number for number in range(_NUM_BINS)]
    return [
        (float(predicted[rows].double().mean()), float(happened[rows].double().mean()), int(rows.sum()))
        for rows in chosen
        if rows.any()
    ]


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


@dataclass(frozen=True, slots=True)
class HeadFit:
    """A refitted confidence head."""

    weight: Tensor
    """[F] fp64"""
    bias: float
    penalty: float
    """How dear a step away from the trained weights was; chosen by cross-validation."""
    logits: Tensor
    """[N, G] fp64: those of each round by a head that was fitted without its conversation."""


def fit_head(rounds: Rounds, weight: Tensor, bias: float) -> HeadFit:
    """Logistic regression on the slots that were put to the test, drawn towards the trained `weight` [F] and `bias`.

    The penalty on the squared distance, in units of each input's deviation, is the one of highest likelihood on
    conversations that were left out.
    """
    if len(set(rounds.conversation.tolist())) < _NUM_FOLDS:
        raise ValueError(f"--prompts: {_NUM_FOLDS} conversations are the least that calibration can be checked on")
    logistic = _Logistic(rounds, weight, bias)
    folds = rounds.conversation % _NUM_FOLDS
    best: HeadFit | None = None
    least = float("inf")
    for penalty in _PENALTIES:
        logits = torch.zeros_like(rounds.confidence_logits, dtype=torch.float64)
        for fold in range(_NUM_FOLDS):
            left_out = folds == fold
            fitted = logistic.fit(~left_out, penalty)
            logits[left_out] = rounds.confidence_inputs[left_out].double() @ fitted[:-1] + fitted[-1]
        loss = logistic.loss(logits)
        if loss < least:
            whole = logistic.fit(torch.ones_like(folds, dtype=torch.bool), penalty)
            best, least = HeadFit(whole[:-1], float(whole[-1]), penalty, logits), loss
    assert best is not None
    return best


class _Logistic:
    """P(a slot passes | it was tested) from the head's inputs, near a head that is given."""

    def __init__(self, rounds: Rounds, weight: Tensor, bias: float) -> None:
        slots = torch.arange(rounds.confidence_logits.shape[1])
        self._tested = counted(rounds) & (rounds.num_accepted[:, None] >= slots)
        self._happened = passed(rounds)[self._tested].double()
        inputs = rounds.confidence_inputs[self._tested].double()
        self._inputs = torch.cat((inputs, torch.ones(len(inputs), 1, dtype=torch.float64)), 1)
        self._start = torch.cat((weight, torch.tensor([bias], dtype=torch.float64)))
        self._round = self._tested.nonzero()[:, 0]
        # The bias moves almost freely: a step of it costs a hundredth.
        self._deviation = torch.cat((inputs.std(0), torch.tensor([0.1], dtype=torch.float64))).clamp(min=1e-6)

    def loss(self, logits: Tensor) -> float:
        """Mean cross-entropy of logits [N, G] on the tested slots."""
        return float(binary_cross_entropy_with_logits(logits[self._tested], self._happened))

    def fit(self, rounds: Tensor, penalty: float) -> Tensor:
        """[F + 1] fp64, the bias last, on the rounds [N] bool."""
        chosen = rounds[self._round]
        inputs, happened = self._inputs[chosen] / self._deviation, self._happened[chosen]
        base = self._inputs[chosen] @ self._start
        change = torch.zeros_like(self._start, requires_grad=True)
        optimizer = torch.optim.LBFGS([change], max_iter=100, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(base + inputs @ change, happened) + penalty * change.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return self._start + change.detach() / self._deviation


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
    parser.add_argument("--drafter", required=True, type=Path, help="checkpoint folder")
    add_rollout_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    confidence_weights(arguments.drafter)  # refuses what can't be calibrated before the target is loaded
    target = Target.load(arguments.target)
    calibrate(target, arguments)


def calibrate(target: Target, arguments: argparse.Namespace) -> None:
    """Fit the confidence of `arguments.drafter` on prompts decoded with it; the checkpoint's own files are replaced."""
    folder: Path = arguments.drafter
    trained = confidence_weights(folder)
    drafter = load_for_rollout(target, folder)
    conversations = choose_conversations(target, arguments)
    rollout = Rollout(target, drafter, arguments.temperature, arguments.max_new_tokens, keep_inputs=True)
    rounds = rollout.run(conversations, arguments.batch_size)
    head = fit_head(rounds, *trained)
    refitted = dataclasses.replace(rounds, confidence_logits=head.logits)
    temperatures = fit_sts(refitted)
    replace_confidence(folder, head.weight, head.bias)
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
            "head_penalty": head.penalty,
            "ece_before": errors_by_position(rounds, ones),
            "ece_of_the_refitted_head_on_conversations_left_out": errors_by_position(refitted, ones),
            "ece_with_temperatures_on_the_rounds_they_were_fitted_on": errors_by_position(refitted, temperatures),
            "auroc_before": auroc_by_position(rounds, ones),
            "auroc_of_the_refitted_head_on_conversations_left_out": auroc_by_position(refitted, ones),
            "provenance": facts,
        },
    )
