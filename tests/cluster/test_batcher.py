"""Continuous batching: who is in a step, and who is not."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import request

from cluster.batcher import Batcher, Plan, Sequence
from cluster.config import EngineConfig
from cluster.kv_cache import BlockPool
from cluster.messages import InvalidRequestError


def make(max_drafts: int = 0, **settings: Any) -> Batcher:
    defaults = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_block_size": 4}
    config = EngineConfig(**{**defaults, "num_kv_blocks": 64, **settings})
    pool = BlockPool(config.num_kv_blocks, config.kv_block_size, config.enable_prefix_caching)
    return Batcher(config, pool, max_drafts)


def add(batcher: Batcher, prompt: list[int], **sampling: Any) -> Sequence:
    sequence = Sequence(request(prompt, **sampling), seed=0)
    batcher.add(sequence)
    return sequence


def finish_step(batcher: Batcher, plan: Plan, accepted: int = 0) -> None:
    """Every chunk that reached its anchor gets `accepted` drafts and one token more."""
    for chunk in plan.chunks:
        chunk.num_admitted = min(chunk.max_drafts, accepted)
        batcher.commit(chunk, [1] * chunk.num_logits)


def rows(plan: Plan) -> list[int]:
    return [chunk.num_rows for chunk in plan.chunks]


def test_a_long_prompt_comes_in_chunks_and_then_decodes() -> None:
    batcher = make()
    sequence = add(batcher, list(range(40)))
    seen = []
    for _ in range(5):
        plan = batcher.plan(0)
        seen.append((rows(plan), [chunk.num_logits for chunk in plan.chunks]))
        finish_step(batcher, plan)
    assert seen == [([16], [0]), ([16], [0]), ([8], [1]), ([1], [1]), ([1], [1])]
    assert sequence.tokens[40:] == [1, 1, 1]


def test_prefill_and_decode_share_every_step() -> None:
    batcher = make(max_num_batched_tokens=8, max_num_seqs=3)
    first = add(batcher, [1, 2], max_tokens=60)
    finish_step(batcher, batcher.plan(0))
    add(batcher, list(range(30)))
    for prefill in (7, 7, 7, 7, 2):
        plan = batcher.plan(0)
        assert plan.chunks[0].sequence is first, "decoding comes first"
        assert rows(plan) == [1, prefill], "and the prompt gets what is left"
        finish_step(batcher, plan)


def test_drafts_leave_prompts_half_of_the_rows() -> None:
    batcher = make(max_drafts=7, max_num_batched_tokens=12)
    for _ in range(2):
        add(batcher, [1, 2], max_tokens=60)
    finish_step(batcher, batcher.plan(100))
    plan = batcher.plan(100)
    assert plan.max_drafts == 10, "alone, the drafts may fill the batch"
    add(batcher, list(range(30)))
    assert batcher.draft_room(2) == 5
    plan = batcher.plan(100)
    assert plan.max_drafts == 5
    assert rows(plan) == [1, 1, 5]


def test_who_waits_for_a_place_takes_no_rows_from_drafts() -> None:
    batcher = make(max_drafts=7, max_num_batched_tokens=12, max_num_seqs=2)
    for _ in range(3):
        add(batcher, [1, 2], max_tokens=60)
    finish_step(batcher, batcher.plan(100))
    assert batcher.plan(100).max_drafts == batcher.draft_room(2) == 10


def test_the_cap_bounds_drafts_of_the_step_and_of_each_request() -> None:
    batcher = make(max_drafts=7, max_num_batched_tokens=64)
    add(batcher, [1, 2], max_tokens=60)
    add(batcher, [1, 2], max_tokens=60, max_draft_tokens=0)
    add(batcher, [1, 2], max_tokens=60, max_draft_tokens=2)
    add(batcher, [1, 2], max_tokens=4)
    finish_step(batcher, batcher.plan(100))
    assert [chunk.max_drafts for chunk in batcher.plan(100).chunks] == [7, 0, 2, 2], "max_tokens leaves 3: 2 drafts"
    plan = batcher.plan(3)
    assert plan.max_drafts == 3
    assert [chunk.max_drafts for chunk in plan.chunks] == [3, 0, 2, 2]


def test_a_sequence_stops_drafting_where_max_model_len_ends_it() -> None:
    batcher = make(max_drafts=7, max_model_len=16, max_num_batched_tokens=32)
    sequence = add(batcher, list(range(10)), max_tokens=60)
    finish_step(batcher, batcher.plan(100))
    assert batcher.num_left(sequence) == 5
    assert batcher.plan(100).chunks[0].max_drafts == 4


def test_the_newest_is_preempted_and_resumes_with_its_tokens() -> None:
    batcher = make(num_kv_blocks=4, max_model_len=16, enable_prefix_caching=False)
    old, new = add(batcher, [1] * 6), add(batcher, [2] * 6)
    finish_step(batcher, batcher.plan(0))
    assert batcher.running == [old, new]
    for _ in range(2):
        finish_step(batcher, batcher.plan(0))
    plan = batcher.plan(0)
    assert plan.num_preempted == 1
    assert [chunk.sequence for chunk in plan.chunks] == [old]
    assert list(batcher.waiting) == [new]
    assert new.block_ids == [] and new.num_computed == 0 and len(new.tokens) == 9 and new.num_preemptions == 1
    finish_step(batcher, plan)
    batcher.remove(old)
    plan = batcher.plan(0)
    assert rows(plan) == [9], "prompt and output are recomputed as one prefill"
    assert plan.num_prompt_tokens == 0, "it has entered before"


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    batcher = make(num_kv_blocks=4, max_model_len=16)
    running = add(batcher, [1] * 6)
    finish_step(batcher, batcher.plan(0))
    big, small = add(batcher, [2] * 13), add(batcher, [3])
    finish_step(batcher, batcher.plan(0))
    assert list(batcher.waiting) == [big, small]
    batcher.remove(running)
    assert [chunk.sequence for chunk in batcher.plan(0).chunks] == [big]


def test_a_prefix_hit_skips_rows_and_is_counted_once() -> None:
    batcher = make()
    first = add(batcher, list(range(12)))
    finish_step(batcher, batcher.plan(0))
    batcher.remove(first)
    again = add(batcher, list(range(12)))
    plan = batcher.plan(0)
    assert rows(plan) == [4], "of 12 tokens, 2 full blocks are reused; the last token is always computed"
    assert (plan.num_prompt_tokens, plan.num_cached_prompt_tokens) == (12, 8)
    assert again.num_cached_prompt_tokens == 8


def test_rejected_rows_never_enter_the_prefix_cache() -> None:
    batcher = make(max_drafts=7, max_num_batched_tokens=32)
    first = add(batcher, list(range(4)), max_tokens=30)
    finish_step(batcher, batcher.plan(0))
    plan = batcher.plan(100)
    plan.chunks[0].num_admitted = 7
    batcher.commit(plan.chunks[0], [50])  # nothing accepted: rows 5..11 hold rejected drafts
    batcher.remove(first)
    add(batcher, first.tokens + [1] * 8)
    assert rows(batcher.plan(0)) == [len(first.tokens) + 8 - 4], "only the prompt's block is known"


def test_what_could_never_run_is_refused_by_name() -> None:
    batcher = make(max_model_len=16)
    batcher.check(request([1] * 15))
    refused = ((request([]), "prompt"), (request([1] * 16), "prompt"), (request([1], max_tokens=0), "max_tokens"))
    for bad, name in refused:
        with pytest.raises(InvalidRequestError) as caught:
            batcher.check(bad)
        assert caught.value.field_name == name


def test_blocks_all_return() -> None:
    batcher = make(max_drafts=3)
    pool = batcher._pool
    for i in range(6):
        add(batcher, [i] * (i + 1))
    for _ in range(8):
        finish_step(batcher, batcher.plan(100), accepted=1)
    for sequence in [*batcher.running, *batcher.waiting]:
        batcher.remove(sequence)
    assert pool.num_free == 64


def test_cached_prompts_leave_no_rows() -> None:
    batcher = make(enable_prefix_caching=True)
    add(batcher, list(range(14)), max_tokens=30)
    finish_step(batcher, batcher.plan(0))
    add(batcher, list(range(14)), max_tokens=30)
    assert batcher.num_prompt_rows == batcher.plan(0).num_prefill_tokens == 2


@pytest.mark.parametrize("num_kv_blocks", [64, 17])
def test_the_prompt_rows_of_a_step_are_known_before_it(num_kv_blocks: int) -> None:
    """Also where places or blocks are too few for all who wait; a single row counts as an anchor."""
    batcher, seen = make(num_kv_blocks=num_kv_blocks, enable_prefix_caching=False), []
    for length in (9, 30, 5, 20, 12, 3):
        add(batcher, list(range(length)), max_tokens=8)
        for _ in range(2):
            expected = batcher.num_prompt_rows
            plan = batcher.plan(0)
            assert expected - plan.num_prefill_tokens in (0, 1)
            seen.append(expected)
            finish_step(batcher, plan)
            for sequence in [s for s in batcher.running if s.num_output >= 8]:
                batcher.remove(sequence)
    assert 0 in seen and len(set(seen)) > 3
