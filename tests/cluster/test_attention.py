"""Ragged attention against its plain twin, in every shape of group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cluster.attention import group_first_order, masks, ragged_attention, ragged_attention_plain
from cluster.flat_batch import FlatBatch, flatten
from cluster.kv_cache import PagedKV
from cluster.messages import Span

BLOCK, HEADS, KV_HEADS, SIZE = 4, 6, 2, 16
NUM_BLOCKS = 600

SHAPES: dict[str, list[tuple[int, int]]] = {  # (start, rows) of each sequence
    "one row alone": [(37, 1)],
    "first row of all": [(0, 1)],
    "verify alone": [(37, 5)],
    "prefill alone": [(0, 50)],
    "decode together": [(37, 1), (38, 1), (36, 1)],
    "equal decode": [(37, 1), (37, 1)],
    "equal verify": [(20, 3), (20, 3)],
    "verify together": [(20, 3), (25, 1), (22, 6)],
    "far apart": [(800, 1), (3, 1), (790, 4), (5, 2)],
    "everything": [(800, 1), (0, 60), (30, 5), (33, 1), (100, 40), (31, 2)],
}


def make(shape: list[tuple[int, int]], neighbours: bool, dtype: torch.dtype) -> tuple[FlatBatch, PagedKV, Tensor]:
    """A batch whose whole past is written in the pages, and its block tables."""
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(NUM_BLOCKS) if neighbours else torch.randperm(NUM_BLOCKS, generator=generator)
    kv = PagedKV(1, NUM_BLOCKS, BLOCK, KV_HEADS, SIZE, dtype)
    slots = torch.arange(NUM_BLOCKS * BLOCK)
    rows = torch.randn(2, len(slots), KV_HEADS, SIZE, generator=generator).to(dtype)
    kv.write(0, slots, rows[0], rows[1])
    spans, free = [], iter(order.tolist())
    for start, num_rows in shape:
        blocks = [next(free) for _ in range(-(-(start + num_rows) // BLOCK))]
        spans.append(Span([7] * num_rows, start, blocks, 0))
    width = max(len(span.block_ids) for span in spans)
    tables = torch.tensor([[*span.block_ids, *[0] * (width - len(span.block_ids))] for span in spans])
    return flatten(spans, BLOCK), kv, tables


@pytest.mark.parametrize("neighbours", [False, True], ids=["scattered", "neighbours"])
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_equals_the_plain_twin(name: str, neighbours: bool, dtype: torch.dtype, tolerance: float) -> None:
    batch, kv, tables = make(SHAPES[name], neighbours, dtype)
    query = torch.randn(batch.num_rows, HEADS * SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = ragged_attention(query, kv, 0, batch, masks(batch, HEADS // KV_HEADS, dtype))
    expected = ragged_attention_plain(query, kv, 0, batch, tables)
    assert actual.shape == query.shape
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    padded = torch.cat((query, torch.full((5, HEADS * SIZE), 9.0, dtype=dtype)))
    actual = ragged_attention(padded, kv, 0, batch.padded(len(padded)), masks(batch, HEADS // KV_HEADS, dtype))
    assert actual.shape == padded.shape and actual.isfinite().all()
    torch.testing.assert_close(actual[: len(query)], expected, atol=tolerance, rtol=tolerance)


def test_no_row_sees_a_later_key() -> None:
    """Whatever lies beyond a row's position, in its own blocks or in others', changes nothing."""
    batch, kv, tables = make(SHAPES["everything"], False, torch.float32)
    query = torch.randn(batch.num_rows, HEADS * SIZE)
    group_masks = masks(batch, HEADS // KV_HEADS, torch.float32)
    before = ragged_attention(query, kv, 0, batch, group_masks)
    seen = torch.zeros(NUM_BLOCKS * BLOCK, dtype=torch.bool)
    for table, last in zip(tables, batch.positions_N[batch.row_starts_R1[1:] - 1].tolist(), strict=True):
        positions = torch.arange(last + 1)
        seen[table[positions // BLOCK] * BLOCK + positions % BLOCK] = True
    unseen = (~seen).nonzero().flatten()
    noise = torch.full((len(unseen), KV_HEADS, SIZE), 1e4)
    kv.write(0, unseen, noise, noise)
    torch.testing.assert_close(ragged_attention(query, kv, 0, batch, group_masks), before, atol=0, rtol=0)
    everything = torch.arange(NUM_BLOCKS * BLOCK)
    kv.write(0, everything, *torch.randn(2, len(everything), KV_HEADS, SIZE))
    assert not torch.allclose(ragged_attention(query, kv, 0, batch, group_masks), before)


def test_group_first_order_swaps_the_two_head_indexes() -> None:
    heads = torch.arange(6).repeat_interleave(2)[group_first_order(6, 2, 2)].view(6, 2)[:, 0]
    assert heads.tolist() == [0, 3, 1, 4, 2, 5]
