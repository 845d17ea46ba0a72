"""`python -m drafter evaluate`: what a drafter is worth, measured by really decoding with it.

Accepted length by data set, conditional acceptance by position, calibration error before and after STS, and AUROC.
Knows prompts and tables; the decoding is drafter/rollout.py's.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from drafter.calibration import auroc_by_position, errors_by_position
from drafter.data import provenance, write_json
from drafter.rollout import Conversation, Rounds, add_rollout_arguments, load_for_rollout, roll_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rollout_arguments(parser)
    parser.add_argument("--json", type=Path, help="write the figures to this file")


@dataclasses.dataclass(frozen=True, slots=True)
class Acceptance:
    """Micro-averaged over the rounds of one data set."""

    dataset: str
    accepted_length: float
    """Tokens per round, recovered or bonus token included; the prefill's token isn't counted."""
    conditional: list[float]
    """P(slot k passes | the slots before it passed)."""
    rounds: int


def acceptance_by_dataset(conversations: Sequence[Conversation], rounds: Rounds) -> list[Acceptance]:
    names = list(dict.fromkeys(conversation.dataset for conversation in conversations))
    index = torch.tensor([names.index(conversation.dataset) for conversation in conversations])
    dataset = index[rounds.conversation]
    return [_acceptance(name, rounds, dataset == number) for number, name in enumerate(names)]


def _acceptance(name: str, rounds: Rounds, rows: Tensor) -> Acceptance:
    accepted, slots = rounds.num_accepted[rows], rounds.num_slots[rows]
    conditional = []
    for k in range(rounds.confidence_logits.shape[1]):
        reached = (accepted >= k) & (slots > k)
        conditional.append(float((accepted[reached] > k).double().mean()))
    return Acceptance(name, float(rounds.num_tokens[rows].double().mean()), conditional, int(rows.sum()))


def run(arguments: argparse.Namespace) -> None:
    target, drafter = load_for_rollout(arguments)
    conversations, rounds = roll_out(target, drafter, arguments)
    rows = acceptance_by_dataset(conversations, rounds)
    before = errors_by_position(rounds, torch.ones_like(drafter.sts_temperatures))
    after = errors_by_position(rounds, drafter.sts_temperatures)
    areas = auroc_by_position(rounds, drafter.sts_temperatures)
    _print_table(rows, before, after, areas)
    if arguments.json:
        content = {
            "rows": [dataclasses.asdict(row) for row in rows],
            "ece_before_sts": before,
            "ece_after_sts": after,
            "auroc": areas,
            "provenance": provenance(
                target=arguments.target, drafter=str(arguments.drafter), temperature=arguments.temperature
            ),
        }
        write_json(arguments.json, content)


def _print_table(rows: Sequence[Acceptance], before: list[float], after: list[float], areas: list[float]) -> None:
    positions = "".join(f"{k:>8}" for k in range(1, len(before) + 1))
    tqdm.write(f"{'data set':<14}{'accepted length':>16}{'rounds':>9}   conditional acceptance by position{'':>2}")
    tqdm.write(f"{'':<39}{positions}")
    for row in rows:
        cells = "".join(f"{value:>8.3f}" for value in row.conditional)
        tqdm.write(f"{row.dataset:<14}{row.accepted_length:>16.3f}{row.rounds:>9}{cells}")
    for name, values in (("ECE before STS", before), ("ECE after STS", after), ("AUROC", areas)):
        cells = "".join(f"{value:>8.3f}" for value in values)
        tqdm.write(f"{name:<30}{sum(values) / len(values):>9.3f}{cells}")
