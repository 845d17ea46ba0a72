"""Streams of a tiny model that run while something is done to the engines below them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from conftest import Server, eventually
from tiny_models import TinyModel, model_args

MODEL = "tiny"
NUM_TOKENS = 150
PROMPTS = [[11 + i, 5, 900 + i, 42] for i in range(16)]
SEEDED: dict[str, Any] = {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.2}
Answer = tuple[str, int]
"""Text and number of completion tokens."""


def args(model: TinyModel, num_cpus: float, **engine_kwargs: Any) -> dict[str, Any]:
    """Two replicas, in fp32 so that texts can be compared."""
    return {
        **model_args(
            model,
            MODEL,
            max_num_seqs=len(PROMPTS),
            speculation="fixed",
            collective_timeout_s=10,
            **engine_kwargs,
        ),
        "deployment_config": {
            "num_replicas": 2,
            "ray_actor_options": {"num_cpus": num_cpus},
            "graceful_shutdown_timeout_s": 1.0,
        },
        "http_config": {"submit_timeout_s": 200, "migration_timeout_s": 200},
    }


async def ask(client: Any, number: int, started: asyncio.Semaphore) -> Answer:
    """A stream, greedy and seeded in turns; `started` is released by its first tokens."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=PROMPTS[number],
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **({"temperature": 0} if number % 2 == 0 else {**SEEDED, "seed": number}),
    )
    text: list[str] = []
    usage = 0
    async for chunk in stream:
        if chunk.choices:
            text.append(chunk.choices[0].text)
        if chunk.usage:
            usage = chunk.usage.completion_tokens
        if len(text) == 1:
            started.release()
    return "".join(text), usage


async def streams(server: Server, disturb: Callable[[], Any] = lambda: None) -> list[Answer | BaseException]:
    """What becomes of one stream for each prompt, when `disturb` is called in the midst of all of them."""
    started = asyncio.Semaphore(0)
    async with server.async_openai() as client:
        asked = [asyncio.create_task(ask(client, number, started)) for number in range(len(PROMPTS))]
        for _ in asked:
            await started.acquire()
        assert not any(task.done() for task in asked), "none has ended yet"
        await asyncio.to_thread(disturb)
        return await asyncio.gather(*asked, return_exceptions=True)


def undisturbed(server: Server, model: TinyModel) -> list[Answer | BaseException]:
    """What every later run must say: Hugging Face's text where it is greedy."""
    answers = asyncio.run(streams(server))
    for number in range(0, len(PROMPTS), 2):
        assert answers[number] == (model.greedy_text(PROMPTS[number], NUM_TOKENS), NUM_TOKENS)
    assert all(isinstance(answer, tuple) and answer[1] == NUM_TOKENS for answer in answers)
    assert server.metric("dspark_draft_tokens_verified_total") > 0, "speculation is on"
    return answers


def outlive(server: Server, expected: list[Answer | BaseException], disturb: Callable[[], Any]) -> None:
    """Every stream ends as if nothing had happened, and no engine keeps anything of it."""
    migrated = server.metric("dspark_requests_migrated_total")
    assert asyncio.run(streams(server, disturb)) == expected
    eventually(lambda: server.metric("dspark_requests_migrated_total") > migrated, "migrations are counted")
    nothing_is_left(server)


def nothing_is_left(server: Server) -> None:
    """Of any request, in the engines that live."""
    eventually(
        lambda: server.metric("dspark_requests_running") == server.metric("dspark_kv_cache_usage_ratio") == 0,
        "no sequence and no block is left",
    )
