"""Where this rank stands among the ranks that share one model, and the few collectives that they use.

Knows rank arithmetic only; knows nothing of layers, weights files or actors. One rank for now: the collectives are
no-ops, and every place that a sharded model needs one already calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """The tensor-parallel position of one rank."""

    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank must lie in 0..{self.tp_size - 1}, got {self.tp_rank}")

    def divide(self, count: int, what: str) -> int:
        """`count` things shared evenly: how many belong to one rank. ValueError when they don't divide."""
        if count % self.tp_size:
            raise ValueError(f"{count} {what} can't be divided over {self.tp_size} tensor-parallel ranks")
        return count // self.tp_size

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's even slice of `tensor` along `dim`, a view."""
        size = self.divide(tensor.shape[dim], f"rows of dimension {dim}")
        return tensor.narrow(dim, self.tp_rank * size, size)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of every rank's `partial`."""
        assert self.tp_size == 1, "collectives of more than one rank are not built yet"
        return partial
