"""Key/value memory: which blocks are whose (BlockPool, pure Python), and the pages themselves (PagedKV, tensors).

Knows blocks, token ids as content, and tensors of pages; knows nothing of requests, models or attention. A slot is one
token's place in the pages: block * block_size + offset. Rollback is a length: what lies in a slot beyond a sequence's
committed length is simply written over.

Shape letters: N flat rows, R sequences, B blocks of one sequence, T context rows, L layers, S slots, H key/value
heads, C head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ROOT = 0


class BlockPool:
    """Hands out blocks, counts their references, and remembers the full blocks of committed tokens by content.

    The prefix cache is a trie: a published block is known by (identity of the block before it, its tokens). The
    dictionary compares those tokens, so a hash collision can't serve foreign keys, and an identity is never used
    twice, so the children of an evicted block can't be reached by a newcomer. A block is in exactly one state: free,
    used (referenced) or cached (published and unreferenced; evicted when needed, least recently used first).
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = enable_prefix_caching
        # Popped from the end: a fresh pool hands out neighbours in ascending order, which attention reads in place.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._identity = [_ROOT] * num_blocks
        """Trie identity of a block's content; _ROOT while it isn't known to the cache."""
        self._last_identity = _ROOT

    @property
    def num_free(self) -> int:
        """Blocks that `grow` can hand out: the free ones and the evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that a prefix may still hit."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """The longest cached run of full blocks that begins `token_ids`, each with a reference taken.

        At least one token is left over, since a forward pass needs a row to compute logits from.
        """
        matched = list(self._cached_run(token_ids))
        for block in matched:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        return matched

    def num_matched(self, token_ids: Sequence[int]) -> int:
        """Tokens that `match_prefix` would find. Nothing changes."""
        return self.block_size * sum(1 for _ in self._cached_run(token_ids))

    def _cached_run(self, token_ids: Sequence[int]) -> Iterator[int]:
        parent = _ROOT
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            block = self._block_of.get((parent, tuple(token_ids[start : start + self.block_size])))
            if block is None:
                return
            yield block
            parent = self._identity[block]

    def grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Appends blocks until `block_ids` holds `num_tokens`. False, and nothing changed, when too few are free."""
        missing = -(-num_tokens // self.block_size) - len(block_ids)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            block_ids.append(block)
        return True

    def publish(self, token_ids: Sequence[int], block_ids: Sequence[int], num_committed: int) -> None:
        """Enters the full blocks among the first `num_committed` tokens into the prefix cache.

        Those tokens must be committed and their keys and values written, in every PagedKV that these blocks address:
        never count rejected drafts, nor the anchor before its own forward pass. Cheap to call again as it grows.
        """
        if not self._caching:
            return
        parent = _ROOT
        for index in range(num_committed // self.block_size):
            block = block_ids[index]
            if self._identity[block] == _ROOT:
                start = index * self.block_size
                self._enter(block, (parent, tuple(token_ids[start : start + self.block_size])))
            parent = self._identity[block]

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives one reference of each block back. The last blocks become the first to be evicted or handed out.

        ValueError when a block isn't referenced.
        """
        for block in reversed(block_ids):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is released but nobody holds it")
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._identity[block] = _ROOT
                self._free.append(block)

    def check(self) -> None:
        """Asserts that free, cached and used blocks are a partition and that the cache's indexes agree. For tests."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free)
        assert not free & cached
        assert not free & used
        assert not cached & used
        assert len(free) + len(cached) + len(used) == self.num_blocks
        assert cached <= set(self._key_of)
        assert not free & set(self._key_of)
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        assert all(self._identity[block] == _ROOT for block in free)

    def _enter(self, block: int, key: tuple[int, tuple[int, ...]]) -> None:
        twin = self._block_of.get(key)
        if twin is not None:  # computed twice at the same time: the first stays, this one only knows what it equals
            self._identity[block] = self._identity[twin]
            return
        self._last_identity += 1
        self._identity[block] = self._last_identity
        self._block_of[key] = block
        self._key_of[block] = key

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self._identity[block] = _ROOT
        return block


class PagedKV:
    """The pages of one model: keys and values of a token lie side by side, so that one copy moves both.

    The target has one, the drafter's context rows another; both are addressed by the same block tables.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_parts: int = 2,
    ) -> None:
        """`num_parts`: 2 for keys and values; 1 where one row serves as both."""
        self.num_layers = num_layers
        self.block_size = block_size
        self._row_shape = (num_parts, num_kv_heads, head_dim)
        width = num_parts * num_kv_heads * head_dim
        # Zeros, never garbage: padded rows are read and masked, and 0 * NaN is NaN.
        self._blocks = torch.zeros(num_layers, num_blocks, block_size * width, dtype=dtype, device=device)
        # Views made once: indexing costs as much as a small kernel.
        self._layer_slots = self._blocks.view(num_layers, num_blocks * block_size, width).unbind(0)
        self._layer_blocks = self._blocks.unbind(0)

    def write_rows(self, layer: int, slots_N: Tensor, key_value_rows: Tensor) -> None:
        """Stores rows [N, parts*H*C], keys before values, of one layer."""
        self._layer_slots[layer].index_copy_(0, slots_N, key_value_rows)

    def write(self, layer: int, slots_N: Tensor, keys_NHC: Tensor, values_NHC: Tensor) -> None:
        """Stores keys and values, each [N, H, C], of one layer."""
        self.write_rows(layer, slots_N, torch.stack((keys_NHC, values_NHC), 1).flatten(1))

    def write_all(self, slots_N: Tensor, keys_LNHC: Tensor, values_LNHC: Tensor) -> None:
        """Stores keys and values, each [L, N, H, C], of every layer: what a drafter's `project_context` returns."""
        for layer, (keys, values) in enumerate(zip(keys_LNHC, values_LNHC, strict=True)):
            self.write(layer, slots_N, keys, values)

    def read(self, layer: int, block_ids: Tensor, num_sequences: int) -> Tensor:
        """Block ids [R * B] -> [R, B * block_size, 2, H, C] of one layer, copied block by block."""
        rows = self._layer_blocks[layer].index_select(0, block_ids)
        return rows.view(num_sequences, -1, *self._row_shape)

    def read_run(self, layer: int, first_block: int, num_blocks: int) -> Tensor:
        """Neighbouring blocks of one sequence -> [1, num_blocks * block_size, 2, H, C], without a copy."""
        rows = self._layer_blocks[layer].narrow(0, first_block, num_blocks)
        return rows.view(1, -1, *self._row_shape)

    def read_all(self, block_tables_RB: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Block tables [R, B] (padded with any block) -> keys and values of every layer, each [L, R, T, H, C].

        T is `num_tokens`, at most B * block_size; what lies beyond a sequence's own length is undefined but finite.
        """
        rows = self._blocks.index_select(1, block_tables_RB.flatten())
        rows = rows.view(self.num_layers, len(block_tables_RB), -1, *self._row_shape)[:, :, :num_tokens]
        return rows[:, :, :, 0], rows[:, :, :, 1]
