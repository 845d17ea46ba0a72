"""Whole engines on the leaders of a mesh, for the processes of ranks.py; the other ranks follow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_engine import Outputs, knowing_drafter
from torch import Tensor

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.mesh import Mesh
from cluster.messages import Request
from cluster.models.loader import load_decoder
from cluster.shard import Shard


@dataclass
class Served:
    """What one replica did."""

    tokens: dict[str, list[int]]
    finished: dict[str, str | None]
    num_accepted: int
    num_free_kv_blocks: int
    num_idle_steps: int


def perturbation(vocab_size: int) -> Tensor:
    """[V], at most a thousandth."""
    return torch.arange(vocab_size).mul(0.7).sin() * 1e-3


def serve(
    mesh: Mesh,
    config: EngineConfig,
    requests: list[list[Request]],
    first_steps: list[int],
    num_steps: int,
    references: list[list[int]] | None = None,
    perturbed: bool = False,
) -> Served | None:
    """Each replica gets its requests before its step number first_steps[replica]; all make `num_steps` steps.

    With `references`, a drafter that knows them takes the place of the configured one.
    """
    if references is None:
        shard = Shard.load(config, mesh)
    else:
        drafter = knowing_drafter(references, 96) if mesh.leads else None
        shard = Shard(load_decoder(Path(config.model_source), torch.float32, "cpu", mesh), drafter, config, mesh)
    if perturbed and not mesh.leads:
        start, end = mesh.part(0).range(shard.vocab_size, "vocabulary")
        gather, noise = mesh.gather, perturbation(shard.vocab_size)[start:end]
        mesh.gather = lambda part: gather(part + noise)  # type: ignore[method-assign]
    if not mesh.leads:
        shard.follow()
        return None
    engine = Engine(config, shard, None)
    outputs = Outputs()
    for step in range(num_steps):
        if step == first_steps[mesh.dp_rank]:
            for request in requests[mesh.dp_rank]:
                engine.add(request)
        outputs.observe(engine.step())
    shard.stop()
    stats = [event.stats for event in outputs.last.values() if event.stats]
    return Served(
        tokens=outputs.tokens,
        finished={request_id: event.finish_reason for request_id, event in outputs.last.items()},
        num_accepted=sum(s.num_accepted for s in stats),
        num_free_kv_blocks=engine.num_free_kv_blocks,
        num_idle_steps=sum(not step.num_tokens for step in outputs.steps),
    )
