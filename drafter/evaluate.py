"""`python -m drafter evaluate`: what drafters are worth, measured by really decoding with them.

Accepted length by data set with its bootstrap interval over prompts, conditional acceptance by position, calibration
error before and after STS, and AUROC. Several drafters decode the same prompts, so that one can see what adapting one
has gained on new traffic and cost on the old.
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
from drafter.dspark import DSpark
from drafter.interface import Drafter
from drafter.rollout import (
    Conversation,
    Rollout,
    Rounds,
    add_rollout_arguments,
    choose_conversations,
    load_for_rollout,
)
from drafter.target import Target
from drafter.tree_rollout import TreeRollout

_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Acceptance:
    """Micro-averaged over the rounds of one data set."""

    dataset: str
    accepted_length: float
    """Tokens per round, recovered or bonus token included; the prefill's token isn't counted."""
    low: float
    high: float
    """Bounds of its 95% interval: bootstrap over prompts."""
    conditional: list[float]
    """P(slot k passes | the slots before it passed)."""
    rounds: int


def acceptance_by_dataset(conversations: Sequence[Conversation], rounds: Rounds) -> list[Acceptance]:
    names = list(dict.fromkeys(conversation.dataset for conversation in conversations))
    index = torch.tensor([names.index(conversation.dataset) for conversation in conversations])
    totals = per_conversation(rounds, len(conversations))
    return [
        _acceptance(name, rounds, index[rounds.conversation] == number, totals[index == number])
        for number, name in enumerate(names)
    ]


def _acceptance(name: str, rounds: Rounds, rows: Tensor, totals: Tensor) -> Acceptance:
    accepted, slots = rounds.num_accepted[rows], rounds.num_slots[rows]
    conditional = []
    for k in range(rounds.confidence_logits.shape[1]):
        reached = (accepted >= k) & (slots > k)
        conditional.append(float((accepted[reached] > k).double().mean()))
    resampled = bootstrap(totals)
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    length = float(rounds.num_tokens[rows].double().mean())
    return Acceptance(name, length, low, high, conditional, int(rows.sum()))


def per_conversation(rounds: Rounds, num_conversations: int) -> Tensor:
    """(tokens, rounds) [C, 2] fp64 of each conversation."""
    pairs = torch.stack((rounds.num_tokens.double(), torch.ones(len(rounds.num_tokens), dtype=torch.float64)), dim=1)
    totals = torch.zeros(num_conversations, 2, dtype=torch.float64)
    return totals.index_add_(0, rounds.conversation, pairs)


def bootstrap(totals: Tensor, seed: int = 0) -> Tensor:
    """Accepted lengths [resamples] fp64 of conversations drawn with replacement; totals [C, 2] as per_conversation.

    The same seed draws the same conversations, so that ratios of two drafters on the same prompts are paired.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(totals), (_RESAMPLES, len(totals)), generator=generator)
    sums = totals[drawn].sum(dim=1)
    return sums[:, 0] / sums[:, 1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafter", required=True, type=Path, nargs="+", help="checkpoint folders; `ngram` is prompt look-up"
    )
    add_rollout_arguments(parser)
    parser.add_argument(
        "--tree-nodes", type=int, help="verify the best tree of so many candidates instead of one draft (DDTree)"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    target = Target.load(arguments.target)
    conversations = choose_conversations(target, arguments)
    figures = []
    for folder in arguments.drafter:
        drafter = load_for_rollout(target, folder)
        rounds = rollout_for(target, drafter, arguments).run(conversations, arguments.batch_size)
        figures.append(_figures(str(folder), conversations, rounds, _temperatures(drafter, arguments)))
    if arguments.json:
        facts = provenance(
            target=arguments.target,
            drafter=" ".join(map(str, arguments.drafter)),
            temperature=arguments.temperature,
        )
        content = figures[0] if len(figures) == 1 else {"drafters": figures}
        write_json(arguments.json, {**content, "provenance": facts})


def rollout_for(target: Target, drafter: Drafter, arguments: argparse.Namespace) -> Rollout:
    """The rollout that the arguments ask for. ValueError for a tree of a drafter that isn't a parallel block."""
    if arguments.tree_nodes is None:
        return Rollout(target, drafter, arguments.temperature, arguments.max_new_tokens)
    if not isinstance(drafter, DSpark):
        raise ValueError("--tree-nodes: a tree is built of a parallel block's marginals, which a chain hasn't")
    return TreeRollout(target, drafter, arguments.temperature, arguments.max_new_tokens, arguments.tree_nodes)


def _temperatures(drafter: Drafter, arguments: argparse.Namespace) -> Tensor | None:
    """Of the confidences that a rollout records [G]; None where it records none, as with trees."""
    if arguments.tree_nodes is None and isinstance(drafter, DSpark) and drafter.confidence_head is not None:
        return drafter.sts_temperatures
    return None


def _figures(
    name: str, conversations: Sequence[Conversation], rounds: Rounds, temperatures: Tensor | None
) -> dict[str, object]:
    """Prints a drafter's tables and returns them for a JSON file."""
    rows = acceptance_by_dataset(conversations, rounds)
    calibration: dict[str, list[float]] = {}
    if temperatures is not None:
        calibration = {
            "ece_before_sts": errors_by_position(rounds, torch.ones_like(temperatures)),
            "ece_after_sts": errors_by_position(rounds, temperatures),
            "auroc": auroc_by_position(rounds, temperatures),
        }
    _print_table(name, rows, calibration)
    return {"drafter": name, "rows": [dataclasses.asdict(row) for row in rows], **calibration}


_TITLES = {"ece_before_sts": "ECE before STS", "ece_after_sts": "ECE after STS", "auroc": "AUROC"}


def _print_table(name: str, rows: Sequence[Acceptance], calibration: dict[str, list[float]]) -> None:
    positions = "".join(f"{k:>8}" for k in range(1, len(rows[0].conditional) + 1))
    tqdm.write(f"\n{name}")
    tqdm.write(f"{'data set':<14}{'accepted length':>16}{'95% interval':>16}{'rounds':>9}   conditional acceptance")
    tqdm.write(f"{'':<55}{positions}")
    for row in rows:
        cells = "".join(f"{value:>8.3f}" for value in row.conditional)
        interval = f"{row.low:.3f}-{row.high:.3f}"
        tqdm.write(f"{row.dataset:<14}{row.accepted_length:>16.3f}{interval:>16}{row.rounds:>9}{cells}")
    for key, values in calibration.items():
        cells = "".join(f"{value:>8.3f}" for value in values)
        tqdm.write(f"{_TITLES[key]:<46}{sum(values) / len(values):>9.3f}{cells}")
