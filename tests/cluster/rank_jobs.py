"""What the processes of ranks.py are told to do. Results are plain values or CPU tensors, by rank."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.config import EngineConfig
from cluster.mesh import WHOLE, Mesh, Part
from cluster.messages import GroupError, Lockstep, Span
from cluster.models.loader import load_decoder
from cluster.moe import MoE, MoEConfig, measure_crossover
from cluster.shard import Shard

BLOCK = 4
Steps = list[list[list[Span]]]
"""Spans by step and replica."""


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {
        "model_source": str(folder),
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_block_size": BLOCK,
        "num_kv_blocks": 128,
        "speculation": "fixed",
    }
    return EngineConfig(**{**defaults, **settings})


def collectives(mesh: Mesh) -> list[Any]:
    """Every collective once, on numbers that say whose they are."""
    rank, ones = float(mesh.rank), torch.ones(2, 1)
    results: list[Any] = [mesh.all_reduce(ones * rank), mesh.gather(ones * rank), mesh.all_gather(ones * rank)]
    results.append(mesh.reduce_scatter(torch.arange(2.0 * mesh.dp_size)[:, None] + rank))
    # Rank i sends j + 1 rows to rank j.
    counts = [rank + 1 for rank in range(mesh.size)]
    rows = torch.full((sum(counts), 1), rank)
    results.append(mesh.all_to_all(rows, counts, [mesh.rank + 1] * mesh.size))
    results.append(mesh.agree(10 + mesh.dp_rank) if mesh.leads else None)
    results.append(mesh.decide(7 + mesh.rank))
    results.append(mesh.gather(torch.empty(0, 2)).shape)
    for message in ("short", list(range(30000))):
        if mesh.leads:
            mesh.send(message)
        results.append(message if mesh.leads else mesh.receive())
    return results


def forwards(mesh: Mesh, folder: Path, steps: Steps, exchange: bool) -> list[Tensor | None] | None:
    """The leaders' logits of each step (None where a replica had no rows)."""
    shard = Shard(load_decoder(folder, torch.float32, "cpu", mesh), None, make_config(folder), mesh)
    shard.exchange_from_rows = 1 if exchange else None
    if not mesh.leads:
        shard.follow()
        return None
    results = [shard.forward(step[mesh.dp_rank]) for step in steps]
    shard.stop()
    return [None if result is None else result.logits_MV for result in results]


def collectives_of_a_step(mesh: Mesh, folder: Path, exchange: bool) -> Counter[str]:
    """How often each collective was entered by a step in which only replica 0 has rows."""
    shard = Shard(load_decoder(folder, torch.float32, "cpu", mesh), None, make_config(folder), mesh)
    shard.exchange_from_rows = 1 if exchange else None
    mesh.num_collectives.clear()
    if mesh.leads:
        shard.forward([Span([3, 4, 5], 0, [0], 2)] if mesh.dp_rank == 0 else [])
        entered = Counter(mesh.num_collectives)
        shard.stop()
        return entered
    shard.follow()
    return mesh.num_collectives - Counter(receive=1)  # that of the end


def silent_rank(mesh: Mesh, seconds: float) -> str:
    """The last rank sleeps instead of taking part; what the others get."""
    if mesh.rank == mesh.size - 1:
        time.sleep(seconds)
        return ""
    try:
        mesh.all_reduce(torch.ones(1))
    except GroupError as error:
        return str(error)
    return "no error"


def stopped_replica(mesh: Mesh, folder: Path) -> str:
    """Replica 0 stops, replica 1 wants to go on."""
    shard = Shard(load_decoder(folder, torch.float32, "cpu", mesh), None, make_config(folder), mesh)
    if not mesh.leads:
        shard.follow()
        return "followed to the end"
    shard.forward([])
    if mesh.dp_rank == 0:
        shard.stop()
        return "stopped"
    try:
        shard.forward([Span([1, 2], 0, [0], 1)])
    except GroupError as error:
        return str(error)
    return "no error"


def experts(mesh: Mesh, tensors: dict[str, Tensor], config: MoEConfig, rows: list[Tensor], exchange: bool) -> Any:
    """One layer on each replica's rows: (its output, how often this rank chose each expert, the crossover)."""

    def read(name: str, part: Part = WHOLE, dtype: torch.dtype | None = None) -> Tensor:
        start, end = part.range(tensors[name].shape[part.dim], name)
        return tensors[name].narrow(part.dim, start, end - start)

    layer = MoE(read, "mlp", config, mesh)
    lockstep = Lockstep(tuple(map(len, rows)), exchange)
    output = layer(rows[mesh.dp_rank].clone(), lockstep)
    load = layer.load_E.clone()
    return output, load, measure_crossover(layer, rows[0].shape[1], torch.float32, mesh)


def with_noisy_router(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The same layer, its router off by the rank's own 1e-3."""
    router = tensors["mlp.gate.weight"]
    noise = torch.randn(router.shape, generator=torch.Generator().manual_seed(rank)) * 1e-3
    return {**tensors, "mlp.gate.weight": router + noise}


def disagreeing_routers(mesh: Mesh, tensors: dict[str, Tensor], config: MoEConfig, x: Tensor, exchange: bool) -> Tensor:
    """Ranks whose routers differ may send a row to different experts."""
    return experts(mesh, with_noisy_router(tensors, mesh.rank), config, [x] * mesh.dp_size, exchange)[0]
