"""Spans of many sequences -> the flat tensors of one ragged forward pass, computed once and used by every layer.

Knows token ids, positions and block tables; knows nothing of heads, weights or why a row is computed (decode rows,
rows to verify and prefill chunks are the same thing here).

Shape letters: N flat rows, R sequences, M rows with logits, Q query rows and B blocks of one attention group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cluster.messages import Span

Integers = NDArray[np.int64]

# One attention call costs CALL + R * T * (KEY + QUERY * Q) microseconds: R sequences padded to Q rows and T keys.
# Measured for bf16 on two AMX cores, 3 key/value heads of 64; only the ratios matter, and only roughly.
_CALL, _KEY, _QUERY = 42.0, 0.116, 0.006


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences whose attention is one padded call."""

    num_sequences: int
    num_keys: int
    """T: the longest context, the last row's own key included."""
    block_ids: Tensor
    """[R * B] int64, padded with block 0."""
    first_block: int | None
    """Set when the group is one sequence in neighbouring blocks: they are read in place."""
    rows_RQ: Tensor | None
    """[R * Q] int64: flat row of each query, padded with 0. None: just all rows in order."""
    positions_RQ: Tensor | None
    """[R, Q] int64: last key position that each query sees, padded with 0. None: every query sees every key."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step's rows. All tensors int64."""

    tokens_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    """Where each row's keys and values go."""
    row_starts_R1: Tensor
    """First flat row of each span, and N."""
    logits_rows_M: Tensor
    """Flat rows whose logits are wanted, span by span."""
    groups: tuple[AttentionGroup, ...]
    outputs_N: Tensor | None
    """Where each row's output lies in those of all groups, one after another. None: just there, in order."""

    @property
    def num_rows(self) -> int:
        """Without padding."""
        return self.slots_N.shape[0]

    def padded(self, num_rows: int) -> FlatBatch:
        """With so many tokens, positions and outputs: what is computed of rows from N on is meant for nobody."""
        num_more = num_rows - self.num_rows
        if not num_more:
            return self
        outputs_N = self.outputs_N
        if outputs_N is None:
            outputs_N = torch.arange(self.num_rows, device=self.slots_N.device)
        rows = self.tokens_N, self.positions_N, outputs_N
        tokens_N, positions_N, outputs_N = (F.pad(row, (0, num_more)) for row in rows)
        return replace(self, tokens_N=tokens_N, positions_N=positions_N, outputs_N=outputs_N)


def flatten(spans: Sequence[Span], block_size: int, device: torch.device | str = "cpu") -> FlatBatch:
    """Lays the rows of `spans` one after another, in the order given."""
    assert spans, "a step needs a row"
    lengths = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
    starts = np.array([span.start for span in spans], dtype=np.int64)
    row_starts = _starts(lengths)
    sequences = np.repeat(np.arange(len(spans)), lengths)
    positions = np.arange(row_starts[-1]) - (row_starts[:-1] - starts)[sequences]
    tables = _tables(spans)
    slots = tables[sequences, positions // block_size] * block_size + positions % block_size

    num_logits = np.array([span.num_logits for span in spans], dtype=np.int64)
    assert (num_logits <= lengths).all(), "logits are wanted of more rows than there are"
    logits_starts = _starts(num_logits)
    ends = (row_starts[1:] - logits_starts[1:])[np.repeat(np.arange(len(spans)), num_logits)]
    logits_rows = np.arange(logits_starts[-1]) + ends

    contexts = starts + lengths
    partition = _partition(lengths.tolist(), contexts.tolist())
    groups = tuple(
        _group(np.array(members), lengths, contexts, row_starts, tables, block_size, device) for members in partition
    )
    in_order = len(groups) == 1 and groups[0].rows_RQ is None
    outputs = np.arange(row_starts[-1]) + (_first_outputs(partition, lengths) - row_starts[:-1])[sequences]
    tokens = np.array([token for span in spans for token in span.token_ids], dtype=np.int64)
    return FlatBatch(
        tokens_N=torch.from_numpy(tokens).to(device),
        positions_N=torch.from_numpy(positions).to(device),
        slots_N=torch.from_numpy(slots).to(device),
        row_starts_R1=torch.from_numpy(row_starts).to(device),
        logits_rows_M=torch.from_numpy(logits_rows).to(device),
        groups=groups,
        outputs_N=None if in_order else torch.from_numpy(outputs).to(device),
    )


def _starts(lengths: Integers) -> Integers:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))


def _first_outputs(partition: list[list[int]], lengths: Integers) -> Integers:
    """[R]: each group has as many output rows for each of its sequences as its longest one has rows."""
    first, num_before = np.empty(len(lengths), dtype=np.int64), 0
    for members in partition:
        longest = int(lengths[members].max())
        first[members] = num_before + longest * np.arange(len(members))
        num_before += longest * len(members)
    return first


def _tables(spans: Sequence[Span]) -> Integers:
    """[R, B] block tables, padded with 0."""
    tables = np.zeros((len(spans), max(len(span.block_ids) for span in spans)), dtype=np.int64)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.block_ids)] = span.block_ids
    return tables


def _cost(num_sequences: int, num_queries: int, num_keys: int) -> float:
    return _CALL + num_sequences * num_keys * (_KEY + _QUERY * num_queries)


def _partition(lengths: list[int], contexts: list[int]) -> list[list[int]]:
    """Which sequences share an attention call: each joins the call that it makes least dearer, or opens its own."""
    groups: list[tuple[list[int], int, int]] = []  # members, queries, keys
    for index in sorted(range(len(lengths)), key=contexts.__getitem__, reverse=True):
        length, context = lengths[index], contexts[index]
        best, best_cost = -1, _cost(1, length, context)
        for number, (members, queries, keys) in enumerate(groups):
            joint = _cost(len(members) + 1, max(queries, length), max(keys, context))
            extra = joint - _cost(len(members), queries, keys)
            if extra < best_cost:
                best, best_cost = number, extra
        if best < 0:
            groups.append(([index], length, context))
        else:
            members, queries, keys = groups[best]
            groups[best] = ([*members, index], max(queries, length), max(keys, context))
    return [sorted(members) for members, _, _ in groups]


def _group(
    members: Integers,
    lengths: Integers,
    contexts: Integers,
    row_starts: Integers,
    tables: Integers,
    block_size: int,
    device: torch.device | str,
) -> AttentionGroup:
    queries, keys = int(lengths[members].max()), int(contexts[members].max())
    num_blocks = -(-keys // block_size)
    # Blocks past a sequence's own context are masked, whatever they are.
    blocks = tables[members, :num_blocks]
    neighbours = len(members) == 1 and bool((np.diff(blocks[0]) == 1).all())

    offsets = np.arange(queries)
    real = offsets < lengths[members, None]
    rows = np.where(real, row_starts[members, None] + offsets, 0)
    seen = np.where(real, (contexts - lengths)[members, None] + offsets, 0)
    in_order = rows.size == row_starts[-1] and bool(real.all())  # members ascend, so the rows then do as well
    return AttentionGroup(
        num_sequences=len(members),
        num_keys=keys,
        block_ids=torch.from_numpy(blocks.reshape(-1)).to(device),
        first_block=int(blocks[0, 0]) if neighbours else None,
        rows_RQ=None if in_order else torch.from_numpy(rows.reshape(-1)).to(device),
        positions_RQ=None if bool((seen == keys - 1).all()) else torch.from_numpy(seen).to(device),
    )
