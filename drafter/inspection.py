"""`python -m drafter inspect`: what a checkpoint holds, and whether it is complete. Knows no target."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from safetensors import safe_open
from tqdm import tqdm

from drafter.checkpoint import read_config, read_sts_temperatures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=Path, help="checkpoint folder")


def run(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.drafter
    config = read_config(folder)
    for name, value in dataclasses.asdict(config).items():
        tqdm.write(f"{name:<26}{value}")
    total = 0
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            total += tensor.nbytes
            tqdm.write(f"{name:<46}{str(list(tensor.shape)):>18} {str(tensor.dtype).removeprefix('torch.')}")
    temperatures = read_sts_temperatures(folder)
    tqdm.write(f"{'size':<26}{total / 1e6:.1f} MB")
    tqdm.write(f"{'STS temperatures':<26}{temperatures or 'none: run python -m drafter calibrate'}")
    provenance = folder / "provenance.json"
    if provenance.is_file():
        tqdm.write(json.dumps(json.loads(provenance.read_text()), indent=2))
