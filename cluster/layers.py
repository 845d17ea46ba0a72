"""The layers a decoder is made of, each of which loads its own shard of its own tensors.

Knows weights and what a rank computes with them; knows nothing of sequences, pages or model families.

Shape letters: N flat rows, I inputs, O outputs, D hidden size, H heads, C head size, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.mesh import Mesh
from drafter.packing import FrozenLinear

ReadWeight = Callable[[str], Tensor]
"""`read(name)` -> the whole tensor of that name, in the dtype and on the device that the model computes with."""


class ColumnParallelLinear:
    """Several projections of one input fused into one weight; the outputs of each are divided over the ranks."""

    def __init__(
        self, read: ReadWeight, names: Sequence[str], mesh: Mesh, *, bias: bool = False, order_O: Tensor | None = None
    ) -> None:
        """`order_O`: the wanted order of this rank's output rows."""
        self._linear = FrozenLinear(
            self._load(read, names, "weight", mesh, order_O),
            self._load(read, names, "bias", mesh, order_O) if bias else None,
        )

    @staticmethod
    def _load(read: ReadWeight, names: Sequence[str], kind: str, mesh: Mesh, order_O: Tensor | None) -> Tensor:
        fused = torch.cat([mesh.shard(read(f"{name}.{kind}"), 0) for name in names])
        return fused if order_O is None else fused[order_O]

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, I] -> [N, O of this rank]."""
        return self._linear(x_NI)


class RowParallelLinear:
    """A projection whose inputs are divided over the ranks; the ranks' partial outputs are summed."""

    def __init__(
        self, read: ReadWeight, name: str, mesh: Mesh, *, bias: bool = False, order_I: Tensor | None = None
    ) -> None:
        """`order_I`: the order in which this rank's inputs arrive."""
        weight_OI = mesh.shard(read(f"{name}.weight"), 1)
        # Only one rank may add the bias: the outputs are summed.
        bias_O = read(f"{name}.bias") if bias and mesh.tp_rank == 0 else None
        self._linear = FrozenLinear(weight_OI if order_I is None else weight_OI[:, order_I], bias_O)
        self._mesh = mesh

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, I of this rank] -> [N, O]."""
        return self._mesh.all_reduce(self._linear(x_NI))


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, computed in fp32.

    Written as x / hypot(|x|, sqrt(D eps)) * (w sqrt(D)): four kernels where F.rms_norm launches eight on a CPU.
    """

    def __init__(self, read: ReadWeight, name: str, eps: float) -> None:
        weight_D = read(f"{name}.weight").float()
        self._scaled_weight_D = weight_D * math.sqrt(weight_D.shape[0])
        self._floor = torch.tensor(math.sqrt(weight_D.shape[0] * eps), device=weight_D.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in x's dtype."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(self._floor)
        return (x / norm).mul_(self._scaled_weight_D).to(x.dtype)


class Rotary:
    """Rotary position embedding in the half-split layout: cos and sin of every position, made once."""

    def __init__(self, frequencies: Tensor, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """frequencies [C/2] fp32: radians per position."""
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        # roll(x, C/2) swaps the halves; the sign of rotate_half lies in the first half of the sine.
        rows = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self._table_P2C = rows.to(device=device, dtype=dtype)

    def at(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each [N, 1, C]: gathered once per step, used by every layer."""
        cos_sin = self._table_P2C.index_select(0, positions_N)
        return cos_sin[:, :1], cos_sin[:, 1:]


def rotate_(x_NHC: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates [N, H, C] in place and returns it."""
    cos, sin = cos_sin
    swapped = x_NHC.roll(x_NHC.shape[-1] // 2, -1)
    return x_NHC.mul_(cos).addcmul_(swapped, sin)


class SwiGLU:
    """down(silu(gate(x)) * up(x)), gate and up fused into one product."""

    def __init__(self, read: ReadWeight, name: str, mesh: Mesh, *, bias: bool = False) -> None:
        self._gate_up = ColumnParallelLinear(read, (f"{name}.gate_proj", f"{name}.up_proj"), mesh, bias=bias)
        self._down = RowParallelLinear(read, f"{name}.down_proj", mesh, bias=bias)

    def __call__(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        gate, up = self._gate_up(x_ND).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up))
