"""The processes of one training, as torchrun starts them; one process alone is the group of one.

Knows torch.distributed; knows nothing of models, data or files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed

_STEP_TIMEOUT = timedelta(minutes=30)
"""A process that is away for so long is lost, and ends the training. It goes on from its last save."""
_PATIENCE = timedelta(days=7)
"""The others wait while the leader has the target answer prompts; torchrun ends all when one dies."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among `size` processes that compute each step together."""

    rank: int
    size: int

    @property
    def is_leader(self) -> bool:
        """Whether this process writes files and speaks to people."""
        return self.rank == 0

    def share(self, count: int, pieces: int) -> list[list[int]]:
        """Which of `count` rows this process computes, in at most `pieces` parts, none empty."""
        rows = list(range(self.rank, count, self.size))
        return [part for start in range(pieces) if (part := rows[start::pieces])]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over all processes, which must all call this with the same shapes."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten().float() for tensor in tensors])
        distributed.all_reduce(flat)
        for tensor, total in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """The block is entered by the leader, and by the others once the leader has left it: what it writes is read."""
        if not self.is_leader:
            distributed.monitored_barrier(timeout=_PATIENCE)
        yield
        if self.is_leader and self.size > 1:
            distributed.monitored_barrier(timeout=_PATIENCE)

    def agree(self, **facts: object) -> None:
        """Raises ValueError naming what differs between the processes: they would train different drafters as one."""
        if self.size == 1:
            return
        everyone: list[dict[str, object]] = [{}] * self.size
        distributed.all_gather_object(everyone, facts)
        for name in facts:
            values = [theirs[name] for theirs in everyone]
            if any(value != values[0] for value in values):
                raise ValueError(f"the processes don't have the same {name} ({values}): do all see the same folders?")


ALONE = Ranks(0, 1)


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The group that torchrun has started this process in, over gloo; without torchrun a group of one."""
    if not distributed.is_torchelastic_launched():
        yield ALONE
        return
    distributed.init_process_group("gloo", timeout=_STEP_TIMEOUT)
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
