"""A request that another engine began: what it emitted counts as output, and the rest is what it would have been."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import knowing_drafter, make_engine, prompts, request, run

from cluster.messages import InvalidRequestError, SlaTier
from cluster.sla import encode_paces

MAX_TOKENS = 24
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    "penalties": {
        "temperature": 1.0,
        "seed": 4,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.3,
    },
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    "min_tokens": {"temperature": 1.0, "seed": 5, "min_tokens": 12, "stop_token_ids": tuple(range(0, 96, 3))},
    "logprobs": {"temperature": 1.0, "seed": 6, "num_logprobs": 2},
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_the_rest_is_what_it_would_have_been(tiny: tuple[Path, Any], name: str, speculative: bool) -> None:
    prompt = prompts(1, shortest=9)[0]
    whole = request(prompt, "whole", max_tokens=MAX_TOKENS, **SAMPLINGS[name])
    undisturbed = run(make_engine(tiny[0], None), [whole])
    tokens = undisturbed.tokens["whole"]
    assert len(tokens) > 10
    drafter = knowing_drafter([[*prompt, *tokens]], 96) if speculative else None
    engine = make_engine(tiny[0], drafter)
    for cut in (1, 2, 7, len(tokens) - 1):
        rest = replace(whole, request_id=f"from {cut}", emitted_token_ids=tuple(tokens[:cut]))
        continued = run(engine, [rest])
        assert continued.tokens[rest.request_id] == tokens[cut:]
        assert continued.last[rest.request_id].finish_reason == undisturbed.last["whole"].finish_reason
        for now, then in zip(continued.logprobs[rest.request_id], undisturbed.logprobs["whole"][cut:], strict=True):
            assert now.logprob == pytest.approx(then.logprob, abs=1e-4)
    assert engine.num_free_kv_blocks == 512


@pytest.mark.parametrize("num_emitted", [1, 4])
def test_a_continued_request_is_held_to_its_promise(tiny: tuple[Path, Any], num_emitted: int) -> None:
    """From the first token that comes from this engine, also where its prompt ends in a chunk of a single row."""
    tiers = (SlaTier("fast", min_tokens_per_second=1.0),)
    engine = make_engine(tiny[0], None, tiers=tiers, max_num_batched_tokens=16)
    now = 5.0
    engine.clock = lambda: now
    engine.add(replace(request(list(range(16)), max_tokens=60), emitted_token_ids=(7,) * num_emitted))
    engine.step()
    engine.step()
    [sequence] = engine._batcher.running
    assert (sequence.began_seconds, sequence.began_output) == (5.0, num_emitted + 1)
    now = 105.0
    engine.step()
    assert engine.last_report.paces == encode_paces([1.0], [100.0], [1])


def test_nothing_left_to_generate_is_refused(tiny: tuple[Path, Any]) -> None:
    engine = make_engine(tiny[0], None)
    with pytest.raises(InvalidRequestError, match="emitted: 3 tokens leave none"):
        engine.add(replace(request([1, 2], max_tokens=3), emitted_token_ids=(4, 5, 6)))
    with pytest.raises(InvalidRequestError, match="emitted: token ids must lie in"):
        engine.add(replace(request([1, 2], max_tokens=3), emitted_token_ids=(96,)))
    with pytest.raises(InvalidRequestError, match="leave none"):
        engine.add(replace(request([1] * 126, max_tokens=50), emitted_token_ids=(4, 5)))
