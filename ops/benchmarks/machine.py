"""What the machine and the model allow: step times by tokens, and how near they are to reading the weights once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from cluster.flat_batch import flatten
from cluster.messages import Span
from cluster.models.decoder import Decoder

STEP_TOKENS = (1, 2, 4, 8, 16, 32)
CONTEXT_TOKENS = 200
BLOCK_SIZE = 16
BANDWIDTH_BYTES = 1 << 29
"""Half a gigabyte: far more than any cache of such a machine."""


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Of `repeats` runs, after one that warms up."""
    action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def step_seconds(decoder: Decoder, num_tokens: int, repeats: int) -> float:
    """Median time of the target: forward and logits for `num_tokens` rows of one sequence, 200 tokens before them."""
    num_blocks = -(-(CONTEXT_TOKENS + num_tokens) // BLOCK_SIZE)
    kv = decoder.make_kv(num_blocks, BLOCK_SIZE)
    span = Span(list(range(1, num_tokens + 1)), CONTEXT_TOKENS, list(range(num_blocks)), num_tokens)

    def step() -> None:
        batch = flatten([span], BLOCK_SIZE, decoder.device)
        hidden, _ = decoder.forward(batch, kv)
        decoder.logits(hidden[batch.logits_rows_M])

    return median_seconds(step, repeats)


def step_seconds_by_tokens(decoder: Decoder, repeats: int) -> dict[str, float]:
    """The curve that says how much of a longer step is free: tokens -> median seconds of `repeats` steps."""
    return {str(num_tokens): step_seconds(decoder, num_tokens, repeats) for num_tokens in STEP_TOKENS}


def read_bytes_per_second() -> float:
    """Measured read bandwidth of all of torch's threads together."""
    block = torch.ones(BANDWIDTH_BYTES // 4)
    return BANDWIDTH_BYTES / median_seconds(block.sum, repeats=9)


def weight_bytes(folder: Path, tied: bool, bytes_per_weight: int) -> int:
    """What one step must read: every weight, but of an embedding that isn't also the head only a row."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                looked_up = name.endswith("embed_tokens.weight") and not tied
                if not looked_up and not (tied and name.endswith("lm_head.weight")):
                    total += math.prod(tensors.get_slice(name).get_shape())
    return total * bytes_per_weight
