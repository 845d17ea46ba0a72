"""Where this rank stands among the ranks that share one model, and the few collectives that they use.

The world is `data_parallel_size` replicas of `tensor_parallel_size` ranks: rank = replica * tensor_parallel_size +
tp_rank, so the ranks of a replica are neighbours. Experts spread over the whole world. Rank 0 of a replica leads it.

Knows rank arithmetic and torch.distributed; knows nothing of layers, plans or actors. Where a group has one rank its
collectives return what they were given, and a world of one never touches torch.distributed. Every collective ends
within the time-out that the mesh was joined with: a lost or frozen peer is a GroupError, never a hang.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.config import ParallelConfig
from cluster.messages import GroupError

_HEAD_BYTES = 16384
"""A message so long, its 8 bytes of length included, is one broadcast; what is longer takes a second."""


@dataclass(frozen=True, slots=True)
class Part:
    """The `index`-th of `count` even parts of a tensor along `dim`."""

    dim: int = 0
    index: int = 0
    count: int = 1

    def range(self, size: int, name: str) -> tuple[int, int]:
        """(start, end) along `dim`. ValueError when `size` doesn't divide."""
        if size % self.count:
            raise ValueError(f"{name}: dimension {self.dim} of size {size} can't be divided over {self.count} ranks")
        step = size // self.count
        return self.index * step, (self.index + 1) * step


WHOLE = Part()


def bundles_by_node(nodes: Sequence[str], tp_size: int) -> list[list[int]]:
    """`nodes[i]`, where bundle i of a group's placement lies -> the bundles of each replica's ranks.

    Replica r is started in bundle r * tp_size, and there its leader is. The others are dealt so that the ranks of a
    replica share a node where they can, or else few. Every replica comes to the same result.
    """
    dealt = [[first] for first in range(0, len(nodes), tp_size)]
    free = [bundle for bundle in range(len(nodes)) if bundle % tp_size]
    for own in dealt:  # those beside a leader, before anybody takes them from further away
        own += [bundle for bundle in free if nodes[bundle] == nodes[own[0]]][: tp_size - 1]
        free = [bundle for bundle in free if bundle not in own]
    free.sort(key=lambda bundle: nodes[bundle])
    for own in dealt:
        num_missing = tp_size - len(own)
        own += free[:num_missing]
        free = free[num_missing:]
    return dealt


class Mesh:
    """One rank's place. `join` makes one that can talk to the others; the plain constructor only does arithmetic."""

    def __init__(
        self, parallel: ParallelConfig | None = None, rank: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.parallel = parallel or ParallelConfig()
        self.size = self.parallel.world_size
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must lie in 0..{self.size - 1}, got {rank}")
        self.rank = rank
        self.device = torch.device(device)
        self.dp_size, self.tp_size = self.parallel.data_parallel_size, self.parallel.tensor_parallel_size
        self.dp_rank, self.tp_rank = divmod(rank, self.tp_size)
        self.timeout_seconds = math.inf
        """Longest that a collective may take."""
        self.num_collectives: Counter[str] = Counter()
        self.seconds_in_collectives = 0.0
        """By the CPU's clock, waiting for slower ranks included; between GPUs only the time to hand the work over."""
        # torch.distributed.ProcessGroup of all ranks, of this rank's replica, and of its tp_rank in all replicas.
        self._world: Any = None
        self._tp: Any = None
        self._dp: Any = None

    @classmethod
    def join(
        cls,
        parallel: ParallelConfig,
        rank: int,
        *,
        init_method: str,
        timeout_seconds: float,
        start_timeout_seconds: float | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Meet the other ranks at `init_method` (tcp://host:port, the same for all): NCCL on GPUs, gloo on CPUs.

        `start_timeout_seconds`: how long to wait for all of them to come, and later in `meet`; None: the time-out of
        the collectives. One mesh per process. Raises GroupError when not all of them come.
        """
        mesh = cls(parallel, rank, device)
        mesh.timeout_seconds = timeout_seconds
        if mesh.size == 1:
            return mesh
        # Messages and counts travel as CPU tensors even between GPUs: each device has its own backend.
        backend = "cpu:gloo,cuda:nccl" if mesh.device.type == "cuda" else "gloo"
        with mesh._collective("the rendezvous"):
            dist.init_process_group(
                backend,
                init_method=init_method,
                rank=rank,
                world_size=mesh.size,
                timeout=timedelta(seconds=start_timeout_seconds or timeout_seconds),
                device_id=mesh.device if mesh.device.type == "cuda" else None,
            )
            limit = timedelta(seconds=timeout_seconds)
            mesh._world = dist.new_group(timeout=limit)
            ranks = torch.arange(mesh.size).view(mesh.dp_size, mesh.tp_size)
            for replica in ranks.tolist():  # every rank makes every group, in the same order
                group = dist.new_group(replica, timeout=limit)
                mesh._tp = group if rank in replica else mesh._tp
            for peers in ranks.T.tolist():
                group = dist.new_group(peers, timeout=limit)
                mesh._dp = group if rank in peers else mesh._dp
        return mesh

    def leave(self) -> None:
        """Close the connections; the others notice at their next collective. Nothing to do in a world of one."""
        if self._tp is not None:
            self._world = self._tp = self._dp = None
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this rank decides for its replica."""
        return self.tp_rank == 0

    def meet(self) -> None:
        """Wait until all ranks are here, as long as they may take to start."""
        if self.size > 1:
            with self._collective("meet"):
                dist.all_reduce(torch.zeros(1))  # in the default group, whose time-out is the start's

    # --- arithmetic ---

    def divide(self, count: int, what: str) -> int:
        """`count` things shared evenly by a replica's ranks: how many each has. ValueError when they don't divide."""
        if count % self.tp_size:
            raise ValueError(f"{count} {what} can't be divided over {self.tp_size} tensor-parallel ranks")
        return count // self.tp_size

    def part(self, dim: int) -> Part:
        """This rank's share of a tensor that its replica divides along `dim`."""
        return Part(dim, self.tp_rank, self.tp_size)

    def kv_part(self, num_kv_heads: int) -> Part:
        """This rank's share of key/value projections. Where ranks outnumber the heads, neighbours hold the same one."""
        if num_kv_heads % self.tp_size and self.tp_size % num_kv_heads:
            raise ValueError(
                f"{num_kv_heads} key/value heads can't be divided over {self.tp_size} tensor-parallel ranks, "
                "nor each replicated on equally many of them"
            )
        count = min(num_kv_heads, self.tp_size)
        return Part(0, self.tp_rank * count // self.tp_size, count)

    def experts(self, num_experts: int) -> range:
        """The experts that this rank of the world holds. ValueError when they don't divide."""
        if num_experts % self.size:
            raise ValueError(
                f"{num_experts} experts can't be divided over {self.size} ranks "
                f"(data_parallel_size {self.dp_size} x tensor_parallel_size {self.tp_size})"
            )
        count = num_experts // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    # --- tensors, among the ranks of one replica ---

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' `partial`, in place."""
        if self.tp_size > 1:
            with self._collective("all_reduce"):
                dist.all_reduce(partial, group=self._tp)
        return partial

    def gather(self, part: Tensor) -> Tensor:
        """The ranks' parts [..., n] joined along the last dimension on the leader; the others get their own back."""
        if self.tp_size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tp_size)] if self.leads else None
        with self._collective("gather"):
            dist.gather(part.contiguous(), parts, group_dst=0, group=self._tp)
        return part if parts is None else torch.cat(parts, -1)

    # --- tensors, among the replicas ---

    def all_gather(self, rows_ND: Tensor) -> Tensor:
        """Equally many rows [N, D] of each replica -> [dp * N, D], replica by replica."""
        if self.dp_size == 1:
            return rows_ND
        gathered = rows_ND.new_empty(self.dp_size * rows_ND.shape[0], *rows_ND.shape[1:])
        with self._collective("all_gather"):
            dist.all_gather_single(gathered, rows_ND.contiguous(), group=self._dp)
        return gathered

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """[dp * N, D] -> this replica's [N, D], summed over the replicas."""
        if self.dp_size == 1:
            return partial
        own = partial.new_empty(partial.shape[0] // self.dp_size, *partial.shape[1:])
        with self._collective("reduce_scatter"):
            dist.reduce_scatter_single(own, partial.contiguous(), group=self._dp)
        return own

    # --- tensors, among all ranks ---

    def all_to_all(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """The next num_sent[i] rows go to rank i; num_received[i] come from it, and are returned in order of ranks."""
        if self.size == 1:
            return rows
        received = rows.new_empty(sum(num_received), *rows.shape[1:])
        with self._collective("all_to_all"):
            dist.all_to_all_single(received, rows.contiguous(), list(num_received), list(num_sent), group=self._world)
        return received

    # --- decisions: always CPU tensors ---

    def agree(self, value: int) -> tuple[int, ...]:
        """Every replica's `value`, known to all; only leaders call it, one with no work as well."""
        if self.dp_size == 1:
            return (value,)
        values = torch.empty(self.dp_size, dtype=torch.int64)
        with self._collective("agree"):
            dist.all_gather_single(values, torch.tensor([value]), group=self._dp)
        return tuple(values.tolist())

    def decide(self, value: int) -> int:
        """The value of the world's rank 0, on every rank."""
        if self.size == 1:
            return value
        decided = torch.tensor(value)
        with self._collective("decide"):
            dist.broadcast(decided, 0, group=self._world)
        return int(decided)

    def send(self, message: object) -> None:
        """The leader's message to the ranks of its replica, which `receive` it."""
        if self.tp_size == 1:
            return
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        data = len(data).to_bytes(8, "little") + data
        head = bytearray(data[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"))
        with self._collective("send"):
            dist.broadcast(torch.frombuffer(head, dtype=torch.uint8), group_src=0, group=self._tp)
            if len(data) > _HEAD_BYTES:
                rest = bytearray(data[_HEAD_BYTES:])
                dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), group_src=0, group=self._tp)

    def receive(self) -> Any:
        """The leader's next message; only ranks that don't lead call it."""
        head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
        with self._collective("receive"):
            dist.broadcast(head, group_src=0, group=self._tp)
            data = head.numpy().tobytes()
            missing = int.from_bytes(data[:8], "little") + 8 - _HEAD_BYTES
            if missing > 0:
                rest = torch.empty(missing, dtype=torch.uint8)
                dist.broadcast(rest, group_src=0, group=self._tp)
                data += rest.numpy().tobytes()
        return pickle.loads(data[8:])

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:  # torch's DistBackendError, and gloo's plain ones
            raise GroupError(
                f"rank {self.rank} of {self.size} (replica {self.dp_rank}, tensor-parallel rank {self.tp_rank}) lost "
                f"its group in {name}: {error}"
            ) from error
        self.num_collectives[name] += 1
        self.seconds_in_collectives += time.perf_counter() - started
