"""The block pool as a state machine, its cache by content, and the pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cluster.kv_cache import BlockPool, PagedKV

BLOCK, BLOCKS = 2, 12


class Sequence:
    """What an engine knows of one sequence: its tokens, its blocks, and how many tokens are computed for good."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens, self.blocks, self.committed = tokens, blocks, len(blocks) * BLOCK


class PoolMachine(RuleBasedStateMachine):
    """Random sequences over a tiny alphabet, so that prefixes collide; `content` says what each block really holds."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.content: list[tuple[int, ...] | None] = [None] * BLOCKS
        """The whole token prefix that the block's keys were computed from; None: of no use to anybody."""
        self.held = [0] * BLOCKS

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, tokens: list[int]) -> Sequence:
        blocks = self.pool.match_prefix(tokens)
        assert len(blocks) * BLOCK < len(tokens)
        for index, block in enumerate(blocks):
            assert self.content[block] == tuple(tokens[: (index + 1) * BLOCK]), "a foreign block was served"
            self.held[block] += 1
        return Sequence(tokens, blocks)

    @rule(sequence=sequences, drafts=st.lists(st.integers(0, 1), max_size=3), num_accepted=st.integers(0, 3))
    def step(self, sequence: Sequence, drafts: list[int], num_accepted: int) -> None:
        """Computes what isn't yet, verifies drafts, commits some of them and publishes."""
        old = len(sequence.blocks)
        free, fed = self.pool.num_free, sequence.tokens + drafts
        grown = self.pool.grow(sequence.blocks, len(fed))
        assert grown == (-(-len(fed) // BLOCK) - old <= free)
        if not grown:
            assert len(sequence.blocks) == old
            assert self.pool.num_free == free
            return
        for block in sequence.blocks[old:]:
            assert self.held[block] == 0, "a block in use was handed out"
            self.held[block] += 1
        for index in range(sequence.committed // BLOCK, len(sequence.blocks)):
            block = sequence.blocks[index]
            assert self.held[block] == 1, "a shared block was written"
            end = (index + 1) * BLOCK
            self.content[block] = tuple(fed[:end]) if end <= len(fed) else None
        sequence.tokens = fed[: len(sequence.tokens) + num_accepted]
        sequence.committed = len(sequence.tokens)
        self.pool.publish(sequence.tokens, sequence.blocks, sequence.committed)

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        for block in sequence.blocks:
            self.held[block] -= 1

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        self.pool.check()
        assert self.pool.num_used == sum(count > 0 for count in self.held)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """A finished prefill: blocks held, published."""
    blocks = pool.match_prefix(tokens)
    assert pool.grow(blocks, len(tokens))
    pool.publish(tokens, blocks, len(tokens))
    return blocks


def test_a_prefix_is_shared_and_outlives_its_owner() -> None:
    pool = BlockPool(8, 2)
    first = filled(pool, [1, 2, 3, 4, 5])
    assert first == [0, 1, 2]
    second = filled(pool, [1, 2, 3, 4, 9])
    assert second[:2] == first[:2]
    assert pool.num_free == 4
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (8, 2)
    assert pool.match_prefix([1, 2, 3, 4]) == first[:1]  # one token must be left to compute
    assert pool.match_prefix([1, 2, 3, 4, 7]) == first[:2]
    assert pool.match_prefix([3, 4, 1, 2, 7]) == []  # the same tokens after another parent are another block


def test_the_tail_of_the_oldest_prefix_is_evicted_first() -> None:
    pool = BlockPool(4, 2)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        pool.release(filled(pool, tokens))
    held: list[int] = []
    assert pool.grow(held, 2)
    assert len(pool.match_prefix([1, 2, 3, 4, 0])) == 1
    assert len(pool.match_prefix([5, 6, 7, 8, 0])) == 2
    pool.publish([9, 9], held, 2)  # the evicted block is as good as new
    assert pool.match_prefix([9, 9, 0]) == held


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(4, 2, enable_prefix_caching=False)
    pool.release(filled(pool, [1, 2, 3, 4]))
    assert pool.num_cached == 0
    assert pool.match_prefix([1, 2, 3, 4, 5]) == []


def test_a_block_is_released_once() -> None:
    pool = BlockPool(4, 2)
    blocks = filled(pool, [1, 2, 3])
    pool.release(blocks)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(blocks)


def test_pages_return_what_was_written() -> None:
    kv = PagedKV(num_layers=3, num_blocks=5, block_size=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)
    keys, values = torch.randn(2, 3, 3, 2, 4)
    slots = torch.tensor([9, 2, 3])  # block 4 offset 1, then the whole of block 1
    kv.write_all(slots, keys, values)
    rows = kv.read(1, torch.tensor([1, 4]), num_sequences=2)
    torch.testing.assert_close(rows[0], torch.stack((keys[1, 1:], values[1, 1:]), 1))
    torch.testing.assert_close(rows[1, 1], torch.stack((keys[1, 0], values[1, 0])))
    torch.testing.assert_close(kv.read_run(1, 1, 1)[0], rows[0])
    all_keys, all_values = kv.read_all(torch.tensor([[1, 4], [4, 0]]), num_tokens=3)
    assert all_keys.shape == all_values.shape == (3, 2, 3, 2, 4)
    torch.testing.assert_close(all_keys[:, 0, :2], keys[:, 1:])
    torch.testing.assert_close(all_values[:, 1, 1], values[:, 0])
    assert not all_keys[:, 0, 2].any()
