"""The flat tensors against the definition of each, written as loops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.flat_batch import flatten
from cluster.messages import Span

BLOCK = 4


@st.composite
def spans_of_a_step(draw: st.DrawFn) -> list[Span]:
    spans, used = [], 0
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 40) | st.integers(0, 3000))
        tokens = draw(st.lists(st.integers(0, 999), min_size=1, max_size=12))
        num_blocks = -(-(start + len(tokens)) // BLOCK) + draw(st.integers(0, 2))
        blocks = list(range(used, used + num_blocks))
        used += num_blocks
        spans.append(Span(tokens, start, draw(st.permutations(blocks)), draw(st.integers(0, len(tokens)))))
    return spans


@given(spans_of_a_step())
@settings(max_examples=60, deadline=None)
def test_rows_are_what_they_are_said_to_be(spans: list[Span]) -> None:
    batch = flatten(spans, BLOCK)
    rows = [(i, k) for i, span in enumerate(spans) for k in range(len(span.token_ids))]
    assert batch.num_rows == len(rows)
    assert batch.tokens_N.tolist() == [spans[i].token_ids[k] for i, k in rows]
    positions = [spans[i].start + k for i, k in rows]
    assert batch.positions_N.tolist() == positions
    assert batch.slots_N.tolist() == [
        spans[i].block_ids[p // BLOCK] * BLOCK + p % BLOCK for (i, _), p in zip(rows, positions, strict=True)
    ]
    wanted = [n for n, (i, k) in enumerate(rows) if k >= len(spans[i].token_ids) - spans[i].num_logits]
    assert batch.logits_rows_M.tolist() == wanted
    assert batch.row_starts_R1.tolist() == [sum(len(s.token_ids) for s in spans[:i]) for i in range(len(spans) + 1)]


@given(spans_of_a_step())
@settings(max_examples=60, deadline=None)
def test_groups_cover_every_row_once_with_its_own_blocks(spans: list[Span]) -> None:
    batch = flatten(spans, BLOCK)
    owners = [span for span in spans for _ in span.token_ids]
    sources: list[int] = []  # the row that each row of the groups' outputs was computed for
    for group in batch.groups:
        rows = list(range(batch.num_rows)) if group.rows_RQ is None else group.rows_RQ.tolist()
        seen = [group.num_keys - 1] * len(rows) if group.positions_RQ is None else group.positions_RQ.flatten().tolist()
        tables = group.block_ids.view(group.num_sequences, -1).tolist()
        num_queries = len(rows) // group.num_sequences
        assert len(rows) == group.num_sequences * num_queries
        for number, (row, last) in enumerate(zip(rows, seen, strict=True)):
            own = owners[row].block_ids[: last // BLOCK + 1]
            is_real = last == batch.positions_N[row] and tables[number // num_queries][: len(own)] == list(own)
            sources.append(row if is_real else -1)
        if group.first_block is not None:
            assert tables == [list(range(group.first_block, group.first_block + len(tables[0])))]
    outputs = range(batch.num_rows) if batch.outputs_N is None else batch.outputs_N.tolist()
    assert [sources[place] for place in outputs] == list(range(batch.num_rows))


@pytest.mark.parametrize("lengths", [[4], [1, 3]], ids=["in order", "ragged"])
def test_padding_comes_after_all_rows_and_is_written_nowhere(lengths: list[int]) -> None:
    batch = flatten([Span([7] * n, 20 * i, range(20 * i, 20 * i + 10), 1) for i, n in enumerate(lengths)], BLOCK)
    padded = batch.padded(9)
    assert (padded.num_rows, len(padded.slots_N), padded.groups) == (4, 4, batch.groups)
    assert padded.tokens_N.tolist() == [7] * 4 + [0] * 5
    assert padded.positions_N.tolist() == [*batch.positions_N.tolist(), *[0] * 5]
    assert padded.outputs_N is not None
    outputs = range(4) if batch.outputs_N is None else batch.outputs_N.tolist()
    assert padded.outputs_N.tolist() == [*outputs, *[0] * 5]
    assert batch.padded(4) is batch


def test_equals_share_a_call_and_strangers_do_not() -> None:
    def span(start: int, rows: int, first: int) -> Span:
        return Span([1] * rows, start, range(first, first + -(-(start + rows) // BLOCK)), 0)

    alike = flatten([span(200 + i, 1 + i % 3, 200 * i) for i in range(8)], BLOCK)
    assert [group.num_sequences for group in alike.groups] == [8]
    mixed = flatten([span(200, 1, 0), span(0, 300, 100), span(210, 2, 400), span(4000, 1, 600)], BLOCK)
    assert sorted(group.num_sequences for group in mixed.groups) == [1, 1, 2]
