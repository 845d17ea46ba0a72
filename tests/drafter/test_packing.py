"""The packed product against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from drafter.packing import FrozenLinear, can_pack, freeze_linears


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_product_equals_plain(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(192, 96, dtype=torch.bfloat16)
    if not can_pack(weight):
        pytest.skip("this CPU has no packed bf16 product")
    bias = torch.randn(192, dtype=torch.bfloat16) if biased else None
    x = torch.randn(rows, 96, dtype=torch.bfloat16)
    packed, plain = FrozenLinear(weight, bias), FrozenLinear(weight, bias, pack=False)
    torch.testing.assert_close(packed(x), plain(x), atol=0.13, rtol=0.01)  # one bf16 rounding of values up to 32
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert (packed(x).double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_fp32_is_never_packed() -> None:
    assert not can_pack(torch.randn(4, 4))


class TwoLinears(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 96, bias=bias)
        self.rest = torch.nn.ModuleDict({"down": torch.nn.Linear(96, 32, bias=bias)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest.down(F.silu(self.up(x)))
        return out


@pytest.mark.parametrize("bias", [True, False])
def test_frozen_modules_compute_the_same(bias: bool) -> None:
    torch.manual_seed(0)
    model = TwoLinears(bias).to(torch.bfloat16)
    rows = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    expected = model(rows)
    freeze_linears(model)
    assert not list(model.parameters())
    torch.testing.assert_close(model(rows), expected, atol=0.02, rtol=0.02)
