"""Ragged paged attention: every row of a flat batch attends to its own sequence's keys, up to its own position.

Knows pages, groups of sequences and grouped query heads; knows nothing of projections or rotary embedding.

Query heads are ordered group-first: head g * H + h reads key/value head h. Then the query heads that share a
key/value head fold into query rows by a view, no key is ever repeated, and the output unfolds by a view too.

Shape letters: N flat rows, R sequences, Q query rows of one sequence, T keys, H key/value heads, G query heads per
key/value head, C head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.flat_batch import AttentionGroup, FlatBatch
from cluster.kv_cache import PagedKV
from cluster.messages import Lockstep


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares."""

    batch: FlatBatch
    kv: PagedKV
    cos_sin: tuple[Tensor, Tensor]
    masks: Sequence[Tensor | None]
    lockstep: Lockstep


def group_first_order(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """[num_heads * head_dim] int64: the rows of a query projection in group-first order of its heads.

    Checkpoints keep the query heads of one key/value head together (head h * G + g).
    """
    rows = torch.arange(num_heads * head_dim).view(num_kv_heads, num_heads // num_kv_heads, head_dim)
    return rows.transpose(0, 1).reshape(-1)


def masks(batch: FlatBatch, num_queries_per_kv: int, dtype: torch.dtype) -> list[Tensor | None]:
    """The additive mask [R, 1, Q * G, T] of each group: 0 where a query may look, -inf elsewhere. Once per step."""
    return [_mask(group, num_queries_per_kv, dtype) for group in batch.groups]


def _mask(group: AttentionGroup, num_queries_per_kv: int, dtype: torch.dtype) -> Tensor | None:
    if group.positions_RQ is None:
        return None
    keys_T = torch.arange(group.num_keys, device=group.positions_RQ.device)
    last_seen = group.positions_RQ.repeat_interleave(num_queries_per_kv, 1)
    hidden = keys_T > last_seen[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def ragged_attention(
    query_NX: Tensor, kv: PagedKV, layer: int, batch: FlatBatch, group_masks: Sequence[Tensor | None]
) -> Tensor:
    """query [N or more, G * H * C] in group-first order -> output of the same shape; rows from N on are padding.

    The rows' own keys and values must be in the pages already.
    """
    outputs = [
        _attend(
            query_NX[: batch.num_rows] if group.rows_RQ is None else query_NX.index_select(0, group.rows_RQ),
            kv,
            layer,
            group,
            mask,
        )
        for group, mask in zip(batch.groups, group_masks, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if batch.outputs_N is None else output.index_select(0, batch.outputs_N)


def _attend(rows_X: Tensor, kv: PagedKV, layer: int, group: AttentionGroup, mask: Tensor | None) -> Tensor:
    """[R * Q, G * H * C] -> the same."""
    if group.first_block is None:
        context = kv.read(layer, group.block_ids, group.num_sequences)
    else:
        context = kv.read_run(layer, group.first_block, group.block_ids.shape[0])
    parts = context[:, : group.num_keys].permute(2, 0, 3, 1, 4).unbind(0)
    keys, values = parts[0], parts[-1]  # each [R, H, T, C]; where pages hold one part it is both
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    query = rows_X.reshape(group.num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2)
    output = F.scaled_dot_product_attention(query, keys, values, mask)
    return output.transpose(1, 2).reshape(rows_X.shape[0], -1)


def ragged_attention_plain(
    query_NX: Tensor, kv: PagedKV, layer: int, batch: FlatBatch, block_tables_RB: Tensor
) -> Tensor:
    """The plain twin of `ragged_attention`: row by row, softmax in fp32."""
    outputs = []
    owners = torch.repeat_interleave(batch.row_starts_R1.diff())
    for row, sequence, position in zip(query_NX, owners, batch.positions_N.tolist(), strict=True):
        context = kv.read(layer, block_tables_RB[sequence], 1)[0, : position + 1].float()
        keys_THC, values_THC = context.unbind(1)
        query_GHC = row.float().view(-1, *keys_THC.shape[1:])
        scores = torch.einsum("ghc,thc->ght", query_GHC, keys_THC) * keys_THC.shape[-1] ** -0.5
        outputs.append(torch.einsum("ght,thc->ghc", scores.softmax(-1), values_THC).flatten())
    return torch.stack(outputs).to(query_NX.dtype)
