"""Linear layers without gradient whose bf16 weight is re-ordered once into oneDNN's own layout.

A packed weight streams at the memory's speed from one row on, where a plain bf16 product reaches about half, and from
64 rows on it computes faster too. Where the operation doesn't exist (other dtypes, GPUs, CPUs without bf16), the plain
product is the same thing. Knows weights; knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# oneDNN picks the layout for this many rows. Measured: one packing serves 1..512 rows equally, except that a hint in
# the hundreds loses up to half of the bandwidth below 16 rows.
_PACKING_ROWS = 16
_TILE_ROWS, _GRAINS = 16, 8
"""oneDNN compiles a product anew for each number of rows: for 2 ms, and for 50 ms at some sizes above 150 rows, where
the product itself takes 1 to 2. Prompts have any number of rows. So rows are padded to multiples of 16, from 256 rows
on to as many multiples in each octave. Measured, a padded row costs as good as nothing: the hardware multiplies 16."""


def can_pack(weight: Tensor) -> bool:
    """Whether the packed product exists for this weight."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class FrozenLinear:
    """y = x W^T + b for a frozen weight [O, I]; the plain weight is not kept once it is packed."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, *, pack: bool | None = None) -> None:
        """`pack` None: wherever `can_pack`. The weight is copied, so a view of a mapped file may be passed."""
        weight = weight_OI.detach()
        self._packed = can_pack(weight) if pack is None else pack
        self._bias_O = None if bias_O is None else bias_O.detach().clone()
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_ROWS)
        else:
            self._weight = weight.clone(memory_format=torch.contiguous_format)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if self._packed:
            num_rows = x.numel() // x.shape[-1]
            num_padded = padded_rows(num_rows)
            if num_padded == num_rows:
                return self._product(x)
            rows = F.pad(x.reshape(num_rows, -1), (0, 0, 0, num_padded - num_rows))
            return self._product(rows)[:num_rows].view(*x.shape[:-1], -1)
        return F.linear(x, self._weight, self._bias_O)

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias_O, "none", [], "")
        return y


def padded_rows(num_rows: int) -> int:
    """The rows that a packed product of so many is computed with: at most an eighth more from 128 rows on."""
    if num_rows <= _TILE_ROWS:
        return num_rows
    grain = max(_TILE_ROWS, (1 << (num_rows.bit_length() - 1)) // _GRAINS)
    return -(-num_rows // grain) * grain


def stair(num_rows: int) -> set[int]:
    """The least and the most rows that are computed as so many are."""
    most = padded_rows(num_rows)
    least = num_rows
    while padded_rows(least - 1) == most:
        least -= 1
    return {least, most}


def freeze_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` below `module`, which can't be trained or saved any more."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            delattr(module, name)  # a plain attribute takes the place of a submodule: it is cheaper to call
            setattr(module, name, FrozenLinear(child.weight, child.bias))
        else:
            freeze_linears(child)
