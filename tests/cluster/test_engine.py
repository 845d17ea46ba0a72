"""The whole engine against Hugging Face: speculation, batching, caching and preemption never change a token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import (
    TAPS,
    Outputs,
    TinyDrafter,
    chain_drafter,
    dspark_drafter,
    greedy_truth,
    knowing_drafter,
    make_engine,
    prompts,
    random_drafter,
    request,
    run,
)

from cluster import group
from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.local_scheduler import PLAIN, UNLIMITED
from cluster.messages import InvalidRequestError, QueueFullError
from cluster.shard import Shard
from drafter.checkpoint import save_checkpoint

VOCAB = 96
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def truth(tiny: tuple[Path, Any]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): greedy_truth(tiny[1], p, MAX_TOKENS) for p in prompts(8)}


@pytest.fixture(params=["plain", "random", "knowing", "dspark", "eagle3", "mtp"])
def drafter(request: pytest.FixtureRequest, tiny: tuple[Path, Any], truth: dict[tuple[int, ...], list[int]]) -> Any:
    if request.param == "plain":
        return None
    if request.param == "dspark":
        return dspark_drafter(tiny[1], VOCAB // 2)
    if request.param in ("eagle3", "mtp"):
        return chain_drafter(tiny[1], request.param, VOCAB // 2)
    if request.param == "random":
        return random_drafter(VOCAB)
    return knowing_drafter([[*prompt, *tokens] for prompt, tokens in truth.items()], VOCAB)


def run_greedy(engine: Engine, truth: dict[tuple[int, ...], list[int]], concurrency: int) -> Outputs:
    requests = [request(list(p), f"g{i}", max_tokens=MAX_TOKENS) for i, p in enumerate(truth)]
    outputs = run(engine, requests, concurrency)
    for i, tokens in enumerate(truth.values()):
        assert outputs.tokens[f"g{i}"] == tokens
        assert outputs.last[f"g{i}"].finish_reason == "length"
    return outputs


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_equals_hugging_face(tiny, truth, drafter, concurrency: int) -> None:
    engine = make_engine(tiny[0], drafter)
    outputs = run_greedy(engine, truth, concurrency)
    assert engine.num_free_kv_blocks == 512
    stats = [event.stats for event in outputs.last.values()]
    for s in stats:
        assert s is not None
        assert 1 + s.num_rounds + s.num_accepted == MAX_TOKENS, "every token is the prompt's, a round's, or accepted"
    if isinstance(drafter, TinyDrafter) and len(drafter.target_ids) == VOCAB // 2:
        assert sum(s.num_accepted for s in stats if s) > 20, "the knowing drafter must be of use"


def test_prefix_hits_change_nothing(tiny, truth, drafter) -> None:
    engine = make_engine(tiny[0], drafter)
    run_greedy(engine, truth, 8)
    outputs = run_greedy(engine, truth, 8)
    cached = sum(step.num_cached_prompt_tokens for step in outputs.steps)
    assert cached == sum((len(p) - 1) // 4 * 4 for p in truth)


def test_forced_preemption_changes_nothing(tiny, truth, drafter) -> None:
    # 64 tokens are the longest sequence; eight of about 45 can't be held at once.
    engine = make_engine(tiny[0], drafter, num_kv_blocks=32, max_model_len=64, max_num_batched_tokens=24)
    outputs = run_greedy(engine, truth, 8)
    assert sum(step.num_preempted for step in outputs.steps) > 0
    assert engine.num_free_kv_blocks == 32


def test_64_requests_on_a_pool_for_8(tiny, drafter) -> None:
    engine = make_engine(tiny[0], drafter, num_kv_blocks=64, max_model_len=64, max_num_seqs=32, max_num_waiting=64)
    requests = [request(p, max_tokens=12) for p in prompts(64, shortest=8, longest=24)]
    outputs = run(engine, requests)
    assert {r.request_id for r in requests} == set(outputs.last)
    assert all(len(tokens) == 12 for tokens in outputs.tokens.values())
    assert engine.num_free_kv_blocks == 64


@pytest.mark.parametrize("draft_every", [1, 5])
def test_draft_context_is_the_features_of_committed_tokens(tiny, truth, draft_every: int) -> None:
    """Also when it waited for some steps without drafts, while blocks changed hands by preemption."""
    folder, model = tiny
    drafter = random_drafter(VOCAB)
    engine = make_engine(folder, drafter, num_kv_blocks=40, max_model_len=64, max_num_batched_tokens=24)
    steps = itertools.count()
    engine._scheduler.lease = lambda *_: (UNLIMITED if next(steps) % draft_every == 0 else PLAIN, "fixed")
    outputs = run_greedy(engine, truth, 8)
    assert sum(step.num_preempted for step in outputs.steps) > 0
    sequences = [torch.tensor([[*prompt, *tokens]]) for prompt, tokens in truth.items()]
    with torch.inference_mode():
        states = [model(ids, output_hidden_states=True).hidden_states for ids in sequences]
    features = [torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1) for hidden in states]
    assert len(drafter.seen) > 100 / draft_every
    for anchor, position, keys, values in drafter.seen:
        candidates = [
            (f[:position], ids[0, 1 : position + 1])
            for ids, f in zip(sequences, features, strict=True)
            if len(f) > position and ids[0, position] == anchor
        ]
        assert any(
            torch.allclose(keys, f, atol=1e-4) and torch.equal(values[:, 1].long(), next_tokens)
            for f, next_tokens in candidates
        )
        assert torch.equal(values[:, 0], torch.arange(position, dtype=values.dtype))


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_chains_draft_as_they_would_over_the_whole_sequence(tiny, truth, family) -> None:
    """Rows come in chunks and rounds and again after preemptions, and know the token behind them all the same."""
    folder, model = tiny
    chain = chain_drafter(model, family, VOCAB)
    settings = {"num_kv_blocks": 40, "max_model_len": 64, "max_num_batched_tokens": 24, "enable_prefix_caching": False}
    engine = make_engine(folder, chain, **settings)
    blocks: list[tuple[int, int, list[int]]] = []
    propose = chain.propose

    def seen(anchors: torch.Tensor, positions: torch.Tensor, *rest: Any) -> Any:
        draft = propose(anchors, positions, *rest)
        blocks.extend(zip(anchors.tolist(), positions.tolist(), draft.tokens.tolist(), strict=True))
        return draft

    chain.propose = seen
    outputs = run_greedy(engine, truth, 8)
    assert sum(step.num_preempted for step in outputs.steps) > 0
    sequences = [torch.tensor([[*prompt, *tokens]]) for prompt, tokens in truth.items()]
    features = [tapped(model, ids, chain.target_layer_ids) for ids in sequences]

    def block_of(ids: torch.Tensor, taps: torch.Tensor, position: int, drafted: list[int]) -> list[int]:
        written = torch.cat([ids[:, : position + 1], torch.tensor([drafted])], dim=1)
        padded = torch.cat([taps[:, : position + 1], taps[:, : len(drafted)]], dim=1)
        hidden = chain.teacher_forced(written, padded, torch.tensor([[position]]))
        return chain.base_logits(hidden[0, 0]).argmax(-1).tolist()[: len(drafted)]

    assert len(blocks) > 60
    for anchor, position, drafted in blocks:
        assert any(
            block_of(ids, taps, position, drafted) == drafted
            for ids, taps in zip(sequences, features, strict=True)
            if ids.shape[1] > position and ids[0, position] == anchor
        )


def tapped(model: Any, ids: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
    """What the layers give. Hugging Face's own list of states has the last layer's only after the final norm."""
    outputs: list[torch.Tensor] = []
    layers = [model.model.layers[layer] for layer in layer_ids]
    hooks = [layer.register_forward_hook(lambda *seen: outputs.append(seen[-1])) for layer in layers]
    with torch.inference_mode():
        model(ids)
    for hook in hooks:
        hook.remove()
    return torch.cat(outputs, dim=-1)


def test_a_chain_is_served_from_its_files_and_can_not_be_scheduled(tiny, truth, tmp_path: Path) -> None:
    save_checkpoint(chain_drafter(tiny[1], "eagle3", VOCAB // 2), tmp_path, torch.float32)
    config = EngineConfig(
        model_source=str(tiny[0]), dtype="float32", drafter_source=str(tmp_path), speculation="fixed", max_model_len=128
    )
    engine = group.make_engine(config, Shard.load(config))
    outputs = run_greedy(engine, truth, 8)
    assert sum(event.stats.num_drafted for event in outputs.last.values() if event.stats) > 100
    scheduled = config.model_copy(update={"speculation": "scheduled"})
    with pytest.raises(ValueError, match=r"speculation: .*confidence head"):
        Shard.load(scheduled)


@pytest.mark.parametrize("block_size", [2, 4])
def test_a_seeded_request_is_the_same_plain_speculative_alone_and_among_others(tiny, block_size: int) -> None:
    prompt = prompts(1, shortest=20)[0]
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 1234, "max_tokens": 40, "top_p": 0.95}
    texts = []
    for drafter in (None, random_drafter(VOCAB, block_size), dspark_drafter(tiny[1], VOCAB // 2)):
        for others in (0, 8):
            engine = make_engine(tiny[0], drafter, max_num_batched_tokens=32)
            crowd = [request(p, temperature=1.0, max_tokens=30) for p in prompts(others, longest=12)]
            outputs = run(engine, [*crowd[:4], request(prompt, "seeded", **sampling), *crowd[4:]])
            texts.append(outputs.tokens["seeded"])
    assert len(texts[0]) == 40
    assert all(text == texts[0] for text in texts)
    engine = make_engine(tiny[0], None)
    other = run(engine, [request(prompt, "seeded", **{**sampling, "seed": 1235})]).tokens["seeded"]
    assert other != texts[0]


def test_unseeded_requests_differ(tiny) -> None:
    outputs = run(make_engine(tiny[0], None), [request([1, 2, 3], temperature=1.0, max_tokens=20) for _ in range(2)])
    first, second = outputs.tokens.values()
    assert first != second


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.4},
    {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"logit_bias": ((5, 3.0), (7, -9.0))},
    {"min_tokens": 10, "stop_token_ids": tuple(range(0, VOCAB, 3))},
]


@pytest.mark.parametrize("edits", PENALTIES, ids=lambda e: "+".join(e))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_act_inside_a_block_as_in_plain_decoding(tiny, edits: dict[str, Any], temperature: float) -> None:
    requests = [
        request(p, f"p{i}", temperature=temperature, seed=i, max_tokens=30, **edits) for i, p in enumerate(prompts(6))
    ]
    plain = run(make_engine(tiny[0], None), requests)
    references = [[*r.prompt_token_ids, *plain.tokens[r.request_id]] for r in requests]
    drafted = run(make_engine(tiny[0], knowing_drafter(references, VOCAB)), requests)
    assert drafted.tokens == plain.tokens
    assert sum(e.stats.num_accepted for e in drafted.last.values() if e.stats) > 20


def test_stop_tokens_inside_an_accepted_run_end_it_there(tiny, truth) -> None:
    prompt, tokens = next((p, t) for p, t in truth.items() if len(set(t)) > 12)
    full = {(t, i): [*prompt, *tokens][i + 1 :] for i, t in enumerate([*prompt, *tokens])}

    def logits(anchor: int, position: int, slot: int) -> torch.Tensor:
        following = full.get((anchor, position), [])
        result = torch.zeros(VOCAB)
        if slot < len(following):
            result[following[slot]] = 30.0
        return result

    for cut in range(1, 12):
        stop = tokens[cut]
        end = tokens.index(stop)
        engine = make_engine(tiny[0], TinyDrafter(logits, torch.arange(VOCAB), block_size=7))
        outputs = run(engine, [request(list(prompt), "s", max_tokens=MAX_TOKENS, stop_token_ids=(stop,))])
        assert outputs.tokens["s"] == tokens[: end + 1]
        event = outputs.last["s"]
        assert event.finish_reason == "stop"
        assert event.stats is not None
        assert 1 + event.stats.num_rounds + event.stats.num_accepted == end + 1
        # What follows the stop was computed but is not in the prefix cache.
        again = run(engine, [request([*prompt, *tokens], max_tokens=1)])
        assert again.steps[0].num_cached_prompt_tokens <= len(prompt) + end


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_max_tokens_is_exact(tiny, truth, max_tokens: int) -> None:
    references = [[*prompt, *tokens] for prompt, tokens in truth.items()]
    prompt, tokens = next(iter(truth.items()))
    outputs = run(
        make_engine(tiny[0], knowing_drafter(references, VOCAB)), [request(list(prompt), "m", max_tokens=max_tokens)]
    )
    assert outputs.tokens["m"] == tokens[:max_tokens]
    assert outputs.last["m"].finish_reason == "length"


@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_sequences_end_at_max_model_len(tiny, drafter, delta: int) -> None:
    engine = make_engine(tiny[0], drafter, max_model_len=32)
    outputs = run(engine, [request(list(range(20)), "e", max_tokens=12 + delta)])
    assert len(outputs.tokens["e"]) == min(12, 12 + delta)
    assert outputs.last["e"].finish_reason == "length"


def test_abort_frees_the_blocks_in_one_step(tiny, drafter) -> None:
    engine = make_engine(tiny[0], drafter)
    engine.add(request(list(range(30)), "kept", max_tokens=50))
    engine.add(request(list(range(40, 90)), "gone", max_tokens=50))
    for _ in range(4):
        engine.step()
    engine.abort("gone")
    engine.abort("never seen")
    result = engine.step()
    [event] = [e for e in result.events if e.request_id == "gone"]
    assert event.finish_reason == "abort"
    kept = len(engine._batcher.running[0].block_ids)
    assert engine.num_free_kv_blocks == 512 - kept
    assert engine.request_ids() == ("kept",)
    engine.abort("kept")
    assert engine.has_work
    assert [e.finish_reason for e in engine.step().events] == ["abort"], "a step with nothing left to run"
    assert engine.num_free_kv_blocks == 512
    assert not engine.has_work


def test_an_abort_that_comes_too_late_does_not_hit_a_successor_of_the_name(tiny) -> None:
    engine = make_engine(tiny[0], None)
    engine.add(request([1, 2], "name", max_tokens=2))
    engine.step()
    finish = engine._finish

    def finish_and_abort(sequence, reason, outcome=None):
        engine.abort("name")  # another thread's, in the middle of the step that ends it
        return finish(sequence, reason, outcome)

    engine._finish = finish_and_abort
    [event] = engine.step().events
    engine._finish = finish
    assert event.finish_reason == "length"
    engine.add(request([1, 2], "name", max_tokens=3))
    assert [engine.step().events[0].finish_reason for _ in range(3)] == [None, None, "length"]


def test_abort_of_a_waiting_request(tiny) -> None:
    engine = make_engine(tiny[0], None, max_num_seqs=1)
    engine.add(request([1, 2], "first", max_tokens=4))
    engine.add(request([1, 2], "second", max_tokens=4))
    engine.step()
    engine.abort("second")
    result = engine.step()
    assert [e.request_id for e in result.events if e.finish_reason == "abort"] == ["second"]


def test_the_queue_is_bounded(tiny) -> None:
    engine = make_engine(tiny[0], None, max_num_seqs=2, max_num_waiting=1)
    for _ in range(3):
        engine.add(request([1, 2, 3]))
    with pytest.raises(QueueFullError) as caught:
        engine.add(request([1, 2, 3]))
    assert caught.value.retry_after_seconds >= 1
    while engine.has_work:
        engine.step()
    engine.add(request([1, 2, 3]))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1] * 128}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1], "logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"prompt": [1], "stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_what_could_never_run_is_refused(tiny, bad: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_engine(tiny[0], None).add(request(bad.pop("prompt"), **bad))
    assert caught.value.field_name == field


def test_max_draft_tokens_of_a_request(tiny) -> None:
    drafter = random_drafter(VOCAB)
    engine = make_engine(tiny[0], drafter)
    outputs = run(engine, [request([1, 2, 3], max_draft_tokens=0)])
    assert drafter.seen == [], "nobody wants drafts: no draft pass"
    assert not any(step.report.drafted for step in outputs.steps)
    outputs = run(engine, [request([1, 2, 3], "two", max_draft_tokens=2), request([4, 5], "none", max_draft_tokens=0)])
    assert {r.num_verified for step in outputs.steps for r in step.rounds} == {0, 1, 2}
    none = outputs.last["none"].stats
    assert none is not None
    assert none.num_drafted == 0


def test_logprobs_are_the_models_own(tiny, truth, drafter) -> None:
    prompt, tokens = next(iter(truth.items()))
    asked = request(list(prompt), "l", max_tokens=MAX_TOKENS, num_logprobs=3, repetition_penalty=1.0)
    outputs = run(make_engine(tiny[0], drafter), [asked])
    with torch.inference_mode():
        logits = tiny[1](torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(outputs.logprobs["l"]) == len(tokens)
    for token, row, entry in zip(tokens, expected, outputs.logprobs["l"], strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
