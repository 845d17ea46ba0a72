"""Every fast layer against its plain twin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cluster.config import ParallelConfig
from cluster.layers import ColumnParallelLinear, RMSNorm, Rotary, RowParallelLinear
from cluster.mesh import WHOLE, Mesh, Part
from drafter.frozen import rotate_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rms_norm_equals_torch(dtype: torch.dtype, scale: float) -> None:
    """Small inputs too: there eps decides."""
    torch.manual_seed(0)
    weight, x = torch.rand(48, dtype=dtype), (torch.randn(5, 48) * scale).to(dtype)
    norm = RMSNorm({"norm.weight": weight}.__getitem__, "norm", 1e-5)
    expected = F.rms_norm(x.float(), (48,), weight.float(), 1e-5).to(dtype)
    torch.testing.assert_close(norm(x), expected, atol=0, rtol=2e-6 if dtype == torch.float32 else 2**-7)


def test_rotation_is_relative_and_in_place() -> None:
    """Scores depend on the distance only, and position 0 leaves a vector as it is."""
    frequencies = 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)
    rotary = Rotary(frequencies, 32, torch.float32, torch.device("cpu"))
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(at_query: int, at_key: int) -> torch.Tensor:
        pair = torch.cat((query, key))
        assert rotate_(pair, rotary.at(torch.tensor([at_query, at_key]))) is pair
        return (pair[0] * pair[1]).sum()

    torch.testing.assert_close(score(9, 4), score(25, 20))
    torch.testing.assert_close(score(0, 0), (query * key).sum())
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_ranks_together_compute_what_one_computes() -> None:
    """The shards of two ranks: columns concatenate, rows sum (the sum is what all_reduce does)."""
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(8, 6), "b.weight": torch.randn(4, 6), "down.weight": torch.randn(5, 8)}
    tensors["down.bias"] = torch.randn(5)

    def read(name: str, part: Part = WHOLE, dtype: torch.dtype | None = None) -> torch.Tensor:
        start, end = part.range(tensors[name].shape[part.dim], name)
        return tensors[name].narrow(part.dim, start, end - start)

    x, wide = torch.randn(3, 6), torch.randn(3, 8)
    ranks = [Mesh(ParallelConfig(tensor_parallel_size=2), rank) for rank in range(2)]
    parts = [ColumnParallelLinear(read, [("a", mesh.part(0)), ("b", mesh.part(0))])(x) for mesh in ranks]
    whole_a = torch.cat([part[:, :4] for part in parts], 1)
    torch.testing.assert_close(whole_a, x @ tensors["a.weight"].T)
    torch.testing.assert_close(torch.cat([part[:, 4:] for part in parts], 1), x @ tensors["b.weight"].T)

    rows = [RowParallelLinear(read, "down", mesh, bias=True) for mesh in ranks]
    partial = sum(row.partial(wide[:, 4 * rank : 4 * rank + 4]) for rank, row in enumerate(rows))
    torch.testing.assert_close(partial, F.linear(wide, tensors["down.weight"], tensors["down.bias"]))
