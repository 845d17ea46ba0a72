"""`python -m drafter inspect`: what a checkpoint holds, whether it is complete, and, on a target, whether its taps fit.

Taps that are one layer off load without complaint and only cost acceptance. So with a target the drafter is tried on
text of the target's own, with its taps as they are and moved by one layer: if moved ones fit better, it is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from drafter.baselines.chain import ChainDrafter
from drafter.checkpoint import checkpoint_problems, load_drafter, read_config
from drafter.config import TrainConfig
from drafter.data import Response
from drafter.dspark import DSpark
from drafter.supervision import FeatureMemory, batch_loss, choose_anchors, step_totals
from drafter.target import Target, render_chat

_QUESTIONS = ("How do plants make food?", "Write a function that reverses a list.", "What is 17 times 23?")
_MARGIN = 0.01
"""Taps are refused when others pass this much more often: more than text this short leaves to chance."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=Path, help="checkpoint folder")
    parser.add_argument("--target", help="its target: checks the taps on text that the target writes")


def run(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.drafter
    config = read_config(folder)
    for name, value in dataclasses.asdict(config).items():
        tqdm.write(f"{name:<26}{value}")
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors):
        tensor = tensors[name]
        tqdm.write(f"{name:<46}{str(list(tensor.shape)):>18} {str(tensor.dtype).removeprefix('torch.')}")
    tqdm.write(f"{'size':<26}{sum(tensor.nbytes for tensor in tensors.values()) / 1e6:.1f} MB")
    tqdm.write(calibration_table(folder))
    provenance = folder / "provenance.json"
    if provenance.is_file():
        tqdm.write(json.dumps(json.loads(provenance.read_text()), indent=2))
    problems = checkpoint_problems(config, tensors)
    if problems:
        raise ValueError(f"{folder}: not a complete drafter checkpoint: " + "; ".join(problems))
    if arguments.target is not None:
        target = Target.load(arguments.target)
        model = load_drafter(folder, target.embed_weight_VD, target.lm_head_weight_VD, dtype=target.dtype)
        if target.config.num_hidden_layers != config.num_target_layers:
            raise ValueError(
                f"{folder}: made for a target of {config.num_target_layers} layers, but this one has "
                f"{target.config.num_hidden_layers}"
            )
        check_taps(target, model, _written_by(target))


def calibration_table(folder: Path) -> str:
    """By position: temperature and calibration errors, as `calibrate` left them."""
    path = folder / "calibration.json"
    if not path.is_file():
        return f"{'calibration':<26}none: run python -m drafter calibrate"
    content = json.loads(path.read_text())
    columns = {name: values for name, values in content.items() if isinstance(values, list)}
    size = len(next(iter(columns.values())))
    lines = [f"{'calibration, position':<66}" + "".join(f"{k:>8}" for k in range(1, size + 1))]
    lines += [f"{name:<66}" + "".join(f"{value:>8.3f}" for value in values) for name, values in columns.items()]
    made = content.get("provenance", {})
    facts = [f"{key} {made[key]}" for key in ("verification", "temperature", "prompts", "rounds") if key in made]
    return "\n".join([*lines, f"{'calibrated for':<26}{', '.join(facts) or 'not recorded'}"])


def check_taps(target: Target, model: DSpark | ChainDrafter, responses: Sequence[Response]) -> None:
    """Prints how often drafts would pass with the taps as they are and moved. ValueError if moved ones fit better."""
    overlaps = tap_overlaps(target, model, responses)
    for shift, overlap in overlaps.items():
        tqdm.write(f"{f'acceptance, taps {shift:+d}' if shift else 'acceptance':<26}{overlap:.3f}")
    best = max(overlaps, key=lambda shift: overlaps[shift])
    if overlaps[best] > overlaps[0] + _MARGIN:
        moved = [layer + best for layer in model.target_layer_ids]
        raise ValueError(
            f"target_layer_ids {list(model.target_layer_ids)} look shifted: with {moved} drafts pass "
            f"{overlaps[best]:.1%} of the time instead of {overlaps[0]:.1%}"
        )


@torch.no_grad()
def tap_overlaps(target: Target, model: DSpark | ChainDrafter, responses: Sequence[Response]) -> dict[int, float]:
    """Teacher-forced acceptance probability, mean over slots, with each tap at its layer and one before and after."""
    blocks = choose_anchors(responses, 64, model.block_size, torch.Generator().manual_seed(0))
    config = TrainConfig()
    totals = step_totals(model, responses, blocks, config.position_decay)
    token_ids = [response.token_ids for response in responses]
    last = target.config.num_hidden_layers - 1
    result = {}
    for shift in (0, -1, 1):
        layers = [layer + shift for layer in model.target_layer_ids]
        if min(layers) >= 0 and max(layers) <= last:
            features = FeatureMemory(target, layers, 0).get(range(len(responses)), token_ids)
            _, summary = batch_loss(model, responses, features, blocks, config, True, totals)
            result[shift] = summary.overlap
    return result


def _written_by(target: Target) -> list[Response]:
    """The target's answers to a few questions."""
    prompts = [render_chat(target.tokenizer, [{"role": "user", "content": question}]) for question in _QUESTIONS]
    waiting = iter([(prompt, prompt) for prompt in prompts])
    answers = target.generate(
        lambda: next(waiting, None),
        temperature=1.0,
        max_new_tokens=128,
        batch_size=len(prompts),
        max_length=1024,
        generator=torch.Generator().manual_seed(0),
    )
    return [
        Response((*prompt, *ids), ((len(prompt), len(prompt) + len(ids)),)) for prompt, ids in answers if len(ids) > 1
    ]
