"""The packed product against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from drafter.packing import FrozenLinear, can_pack, freeze_linears, padded_rows, stair


@pytest.mark.parametrize("rows", [1, 2, 7, 17, 64, 300])
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


def test_padded_products_keep_their_shape() -> None:
    weight = torch.randn(192, 96, dtype=torch.bfloat16)
    if not can_pack(weight):
        pytest.skip("this CPU has no packed bf16 product")
    x = torch.randn(3, 7, 96, dtype=torch.bfloat16)
    rows = FrozenLinear(weight)(x)
    assert rows.shape == (3, 7, 192) and rows.is_contiguous()
    torch.testing.assert_close(rows.flatten(0, 1), FrozenLinear(weight)(x.flatten(0, 1)), rtol=0, atol=0)


def test_there_are_few_numbers_of_rows_and_little_padding() -> None:
    padded = [padded_rows(n) for n in range(4097)]
    assert padded[:17] == list(range(17))
    assert len(set(padded)) < 80
    assert all(n <= p and padded[p] == p and p - n < max(16, n / 8) for n, p in enumerate(padded))
    assert padded == sorted(padded)


@pytest.mark.parametrize(("rows", "edges"), [(1, {1}), (16, {16}), (17, {17, 32}), (40, {33, 48}), (300, {289, 320})])
def test_a_stair_has_two_edges(rows: int, edges: set[int]) -> None:
    assert stair(rows) == edges


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
