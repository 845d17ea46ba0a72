"""`python -m drafter experiment NAME`: the paper's tables and figures on your target, with what is missing trained.

NAME.json, NAME.md and NAME.png say what was measured, and with what. Everything resumes: trainings, decoded prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from drafter.data import provenance, write_json
from drafter.experiments import EXPERIMENTS, Experiment
from drafter.figures import draw, markdown
from drafter.laboratory import BASE_SLOTS, Laboratory
from drafter.ranks import joined_ranks
from drafter.rollout import add_rollout_arguments
from drafter.target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="+", choices=[*EXPERIMENTS, "all"], metavar="NAME", help=", ".join([*EXPERIMENTS, "or all"])
    )
    add_rollout_arguments(parser, limit=40, max_new_tokens=128, batch_size=40)
    parser.add_argument(
        "--trained-only", action="store_true", help="measure the drafters that are trained, and leave out the others"
    )
    parser.add_argument("--responses", required=True, type=Path, help="file written by `synthesize`, to train on")
    parser.add_argument("--calibration-prompts", type=Path, help="JSONL that nobody trained on, for F5 and F6")
    parser.add_argument("--calibration-limit", type=int, default=240, help="of those prompts (default: 240)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/laboratory"), help="trained drafters (default: %(default)s)"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("ops/results/drafters"), help="what comes out (default: %(default)s)"
    )
    parser.add_argument("--budget", type=float, default=1.0, help=f"in {BASE_SLOTS:,} slots a drafter (default: 1)")
    parser.add_argument(
        "--sequences-per-step", type=int, default=4, help="small steps: a small budget needs many (default: 4)"
    )
    parser.add_argument("--anchors-per-sequence", type=int, default=32, help="blocks of each sequence (default: 32)")
    parser.add_argument("--draft-vocabulary", type=int, default=8192, help="of all but the ablation (default: 8192)")
    parser.add_argument("--markov-rank", type=int, default=64, help="rank of the sequential heads (default: 64)")
    parser.add_argument("--mask-token-id", type=int, default=0, help="reserved row of the embedding (default: 0)")
    parser.add_argument(
        "--feature-memory-gib", type=float, default=6.0, help="features that a process keeps (default: 6)"
    )


def run(arguments: argparse.Namespace) -> None:
    names = list(EXPERIMENTS) if "all" in arguments.names else arguments.names
    if arguments.calibration_prompts is None and {"F5", "F6"} & set(names):
        raise ValueError("--calibration-prompts: F5 and F6 calibrate, on prompts that nobody trained on")
    torch.set_num_threads(arguments.threads)
    chosen = {name: EXPERIMENTS[name] for name in names}
    with joined_ranks() as ranks:
        laboratory = Laboratory(Target.load(arguments.target), arguments, ranks)
        if not arguments.trained_only:
            laboratory.train(list(dict.fromkeys(arm for experiment in chosen.values() for arm in experiment.arms)))
        if not ranks.is_leader:
            return
    for name, experiment in chosen.items():
        untrained = [arm.name for arm in experiment.needs if arm not in laboratory.trained(experiment.needs)]
        if untrained:
            tqdm.write(f"{name} is left out: {', '.join(untrained)} must be trained first")
            continue
        _measure(name, experiment, laboratory, arguments)


def _measure(name: str, experiment: Experiment, laboratory: Laboratory, arguments: argparse.Namespace) -> None:
    content = experiment.measure(laboratory)
    trained = laboratory.trained(experiment.arms)
    content = {
        "experiment": name,
        **content,
        "left_out": [arm.name for arm in experiment.arms if arm not in trained],
        "provenance": provenance(
            target=arguments.target,
            prompts=[path.name for path in arguments.prompts],
            seed=arguments.seed,
            slots=laboratory.slots,
            sequences_per_step=arguments.sequences_per_step,
            anchors_per_sequence=arguments.anchors_per_sequence,
            response_tokens=laboratory.num_response_tokens,
            temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
            limit=arguments.limit,
            draft_vocabulary=arguments.draft_vocabulary,
            markov_rank=arguments.markov_rank,
        ),
    }
    folder: Path = arguments.results
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", content)
    page = markdown(f"{name}: {experiment.title}", content)
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    draw(name, experiment.title, content, folder / f"{name}.png")
    tqdm.write(page)
