"""From the records of several drafters to numbers: accepted lengths, gains with paired intervals, threshold sweeps.

Pure functions; the same resampling draws the same prompts for every drafter. Knows records; knows nothing of files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.calibration import counted
from drafter.evaluate import acceptance_by_dataset, bootstrap, per_conversation
from drafter.laboratory import Record
from drafter.rollout import Conversation, Rounds

_INTERVAL = torch.tensor([0.025, 0.975], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Score:
    """One drafter on one data set."""

    drafter: str
    dataset: str
    accepted_length: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Gain:
    """How much longer one drafter's accepted length is than another's, in percent, with its 95% interval."""

    drafter: str
    over: str
    dataset: str
    percent: float
    low: float
    high: float


def scores(drafter: str, record: Record) -> list[Score]:
    return [
        Score(drafter, row.dataset, row.accepted_length, row.low, row.high, row.rounds)
        for row in acceptance_by_dataset(record.conversations, record.rounds)
    ]


def macro_score(drafter: str, record: Record) -> Score:
    """The mean over data sets."""
    resampled = _macro(record, bootstrap)
    length = float(_macro(record, _accepted_length))
    low, high = resampled.quantile(_INTERVAL).tolist()
    return Score(drafter, "macro", length, low, high, len(record.rounds.num_tokens))


def gain(drafter: str, record: Record, over: str, other: Record, dataset: str | None = None) -> Gain:
    """On one data set, or (None) on the mean over all of them."""
    pair = [record, other] if dataset is None else [_only(each, dataset) for each in (record, other)]
    plain, resampled = (
        100 * (_macro(pair[0], statistic) / _macro(pair[1], statistic) - 1)
        for statistic in (_accepted_length, bootstrap)
    )
    low, high = resampled.quantile(_INTERVAL).tolist()
    return Gain(drafter, over, dataset or "macro", float(plain), low, high)


def datasets(record: Record) -> list[str]:
    return list(dict.fromkeys(conversation.dataset for conversation in record.conversations))


def _accepted_length(totals: Tensor, _seed: int) -> Tensor:
    return totals[:, 0].sum() / totals[:, 1].sum()


def _macro(record: Record, statistic: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Mean over data sets of a statistic of their conversations' (tokens, rounds) [C, 2].

    A data set's number is its seed: sets are resampled independently of each other, and alike for every drafter.
    """
    totals = per_conversation(record.rounds, len(record.conversations))
    names = [conversation.dataset for conversation in record.conversations]
    parts = [totals[[name == dataset for name in names]] for dataset in datasets(record)]
    return torch.stack([statistic(part, number) for number, part in enumerate(parts)]).mean(dim=0)


def _only(record: Record, dataset: str) -> Record:
    """The conversations of one data set and their rounds."""
    kept = [index for index, c in enumerate(record.conversations) if c.dataset == dataset]
    number = torch.full((len(record.conversations),), -1)
    number[kept] = torch.arange(len(kept))
    rows = number[record.rounds.conversation] >= 0
    columns = {field.name: getattr(record.rounds, field.name)[rows] for field in dataclasses.fields(record.rounds)}
    columns["conversation"] = number[columns["conversation"]]
    conversations: list[Conversation] = [record.conversations[index] for index in kept]
    return Record(conversations, Rounds(**columns))


@dataclass(frozen=True, slots=True)
class Admitted:
    """What verifying only slots of some confidence would have given."""

    dataset: str
    threshold: float
    acceptance_rate: float
    """Accepted drafts / verified drafts."""
    tokens_per_step: float
    verified_per_step: float


def threshold_sweep(record: Record, temperatures: Tensor, thresholds: Sequence[float]) -> list[Admitted]:
    """A round verifies its drafts up to the first whose confidence is below the threshold. On recorded full rounds."""
    result = []
    for dataset in datasets(record):
        rounds = _only(record, dataset).rounds
        confidence = torch.sigmoid(rounds.confidence_logits.double() / temperatures.double())
        for threshold in thresholds:
            admitted = (confidence >= threshold).long().cumprod(dim=1)
            verified = (admitted * counted(rounds)).sum(dim=1)
            accepted = torch.minimum(rounds.num_accepted, verified)
            tokens = torch.minimum(rounds.num_tokens, verified + 1).double().mean()
            rate = float(accepted.sum() / verified.sum()) if verified.sum() else float("nan")
            result.append(Admitted(dataset, threshold, rate, float(tokens), float(verified.double().mean())))
    return result
