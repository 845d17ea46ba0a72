"""The layers a decoder is made of, each of which loads its own shard of its own tensors.

Knows weights and what a rank computes with them; knows nothing of sequences, pages or model families.

Shape letters: N flat rows, I inputs, O outputs, D hidden size, H heads, C head size, P positions, M rows with logits,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.mesh import WHOLE, Mesh, Part
from drafter.frozen import rms_norm
from drafter.packing import FrozenLinear


class ReadWeight(Protocol):
    def __call__(self, name: str, part: Part = WHOLE, dtype: torch.dtype | None = None) -> Tensor:
        """The part of the tensor of that name, on the model's device, and in its dtype where none is asked for."""
        ...


class ColumnParallelLinear:
    """Several projections of one input fused into one weight; the outputs of each are divided over the ranks."""

    def __init__(
        self,
        read: ReadWeight,
        projections: Sequence[tuple[str, Part]],
        *,
        bias: bool = False,
        order_O: Tensor | None = None,
    ) -> None:
        """`projections`: names, and this rank's share of each. `order_O`: the wanted order of its output rows."""

        def load(kind: str) -> Tensor:
            fused = torch.cat([read(f"{name}.{kind}", part) for name, part in projections])
            return fused if order_O is None else fused[order_O]

        self._linear = FrozenLinear(load("weight"), load("bias") if bias else None)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, I] -> [N, O of this rank]."""
        return self._linear(x_NI)


class RowParallelLinear:
    """A projection whose inputs are divided over the ranks; the ranks' partial outputs are to be summed."""

    def __init__(
        self, read: ReadWeight, name: str, mesh: Mesh, *, bias: bool = False, order_I: Tensor | None = None
    ) -> None:
        """`order_I`: the order in which this rank's inputs arrive."""
        weight_OI = read(f"{name}.weight", mesh.part(1))
        bias_O = read(f"{name}.bias") if bias else None
        # Only one rank may add the bias: the outputs are summed.
        self.partial = FrozenLinear(
            weight_OI if order_I is None else weight_OI[:, order_I], bias_O if mesh.leads else None
        )
        """[N, I of this rank] -> this rank's term of the sum [N, O]."""
        self._mesh = mesh

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, I of this rank] -> [N, O]."""
        return self._mesh.all_reduce(self.partial(x_NI))


class VocabParallelEmbedding:
    """The rows of the token embedding, divided over the ranks."""

    def __init__(self, read: ReadWeight, name: str, mesh: Mesh) -> None:
        self.weight_VD = read(f"{name}.weight", mesh.part(0)).clone()
        """[V of this rank, D]: plain, since rows are looked up in it."""
        self._first = mesh.tp_rank * self.weight_VD.shape[0]
        self._mesh = mesh

    def __call__(self, tokens_N: Tensor) -> Tensor:
        """[N] int64 -> [N, D]."""
        if self._mesh.tp_size == 1:
            return F.embedding(tokens_N, self.weight_VD)
        local_N = tokens_N - self._first
        elsewhere_N = (local_N < 0) | (local_N >= self.weight_VD.shape[0])
        rows_ND = F.embedding(local_N.masked_fill(elsewhere_N, 0), self.weight_VD)
        return self._mesh.all_reduce(rows_ND.masked_fill_(elsewhere_N[:, None], 0))


class ParallelHead:
    """Hidden states to logits, the vocabulary divided over the ranks.

    Logits go to the leader only, since it alone decides. It needs all of them: penalties, truncation and the residual
    of a rejected draft are defined on whole distributions, so no summary of a rank's part could take their place.
    """

    def __init__(self, weight_VD: Tensor, mesh: Mesh) -> None:
        """`weight_VD`: this rank's rows."""
        self._linear = FrozenLinear(weight_VD)
        self._mesh = mesh

    def __call__(self, hidden_MD: Tensor) -> Tensor:
        """[M, D] -> [M, V] on the leader, [M, V of this rank] on the others."""
        return self._mesh.gather(self._linear(hidden_MD))


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, computed in fp32."""

    def __init__(self, read: ReadWeight, name: str, eps: float) -> None:
        weight_D = read(f"{name}.weight").float()
        self._scaled_weight_D = weight_D * math.sqrt(weight_D.shape[0])
        self._floor = torch.tensor(math.sqrt(weight_D.shape[0] * eps), device=weight_D.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in x's dtype."""
        return rms_norm(x, self._scaled_weight_D, self._floor)


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


class SwiGLU:
    """down(silu(gate(x)) * up(x)), gate and up fused into one product."""

    def __init__(self, read: ReadWeight, name: str, mesh: Mesh, *, bias: bool = False) -> None:
        projections = [(f"{name}.{part}_proj", mesh.part(0)) for part in ("gate", "up")]
        self._gate_up = ColumnParallelLinear(read, projections, bias=bias)
        self._down = RowParallelLinear(read, f"{name}.down_proj", mesh, bias=bias)
        self._mesh = mesh

    def __call__(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        return self._mesh.all_reduce(self.partial(x_ND))

    def partial(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> this rank's term of the sum [N, D]."""
        gate, up = self._gate_up(x_ND).chunk(2, -1)
        return self._down.partial(F.silu(gate).mul_(up))
