"""Engines of several ranks behind the real server: the text of one process, and streams that outlive lost ranks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from conftest import Server, actor_processes, application, eventually
from tiny_models import TinyModel, tiny_llama, tiny_mixtral

from deployments.app import build

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.server, pytest.mark.dist]

MODEL = "tiny"
NUM_TOKENS = 300
PROMPTS = [[11 + i, 5, 900 + i, 42] for i in range(8)]
SEEDED: dict[str, Any] = {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.2}


def args(model: TinyModel, num_replicas: int, num_cpus: float, **engine_kwargs: Any) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": str(model.folder)},
        "engine_kwargs": {
            "drafter_source": str(model.drafter_folder),
            "dtype": "float32",
            "num_threads": 1,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            "num_kv_blocks": 512,
            "speculation": "fixed",
            "collective_timeout_s": 10,
            **engine_kwargs,
        },
        "deployment_config": {
            "num_replicas": num_replicas,
            "ray_actor_options": {"num_cpus": num_cpus},
            "graceful_shutdown_timeout_s": 1.0,
        },
        "http_config": {"submit_timeout_s": 200},
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> TinyModel:
    return tiny_llama(tmp_path_factory.mktemp("llama"), model_folder)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> TinyModel:
    return tiny_mixtral(tmp_path_factory.mktemp("mixtral"), model_folder)


@pytest.fixture(scope="module")
def pair(serve_port: int, llama: TinyModel) -> Iterator[Server]:
    """Two replicas of two tensor-parallel ranks, each replica in a placement group of its own."""
    _OTHERS.update(processes())
    with application(serve_port, "pair", "/pair", args(llama, 2, 0.25, tensor_parallel_size=2)) as running:
        whole(2, 2)
        yield running
    eventually(lambda: not processes(), "nothing is left of it")


@pytest.fixture(scope="module")
def gang(serve_port: int, mixtral: TinyModel) -> Iterator[Server]:
    """Two replicas in lockstep, which share the experts."""
    _OTHERS.update(processes())
    with application(serve_port, "gang", "/gang", args(mixtral, 2, 0.25, data_parallel_size=2)) as running:
        whole(2, 0)
        yield running
    eventually(lambda: not processes(), "nothing is left of it")


_OTHERS: set[int] = set()
"""Processes of other applications of the same test session."""


def of_this_application(name: str) -> list[psutil.Process]:
    return [process for process in actor_processes(name) if process.pid not in _OTHERS]


def processes() -> list[int]:
    return [process.pid for name in ("EngineActor", "Follower") for process in of_this_application(name)]


def whole(num_leaders: int, num_followers: int) -> None:
    """Returns when there are just so many; a replica that is lost leaves none of its own behind."""
    eventually(
        lambda: [len(of_this_application(n)) for n in ("EngineActor", "Follower")] == [num_leaders, num_followers],
        f"{num_leaders} leaders and {num_followers} followers run",
    )


def fields(number: int) -> dict[str, Any]:
    """Requests are greedy and seeded in turns."""
    return {"temperature": 0} if number % 2 == 0 else {**SEEDED, "seed": number}


async def ask(client: Any, number: int, started: asyncio.Semaphore | None = None) -> tuple[str, int]:
    """(text, completion tokens) of a stream; `started` is released by its first tokens."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=PROMPTS[number],
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **fields(number),
    )
    text, usage = [], 0
    async for chunk in stream:
        if chunk.choices:
            text.append(chunk.choices[0].text)
        if chunk.usage:
            usage = chunk.usage.completion_tokens
        if started is not None:
            started.release()
            started = None
    return "".join(text), usage


async def undisturbed(server: Server) -> list[tuple[str, int]]:
    async with server.async_openai() as client:
        return list(await asyncio.gather(*(ask(client, number) for number in range(len(PROMPTS)))))


async def outlive(server: Server, actor: str, how: signal.Signals) -> None:
    """Every stream ends as if nothing had happened, and the engines come back."""
    expected = await undisturbed(server)
    assert {tokens for _, tokens in expected} == {NUM_TOKENS}
    migrated = server.metric("dspark_requests_migrated_total")
    started = asyncio.Semaphore(0)
    async with server.async_openai() as client:
        asked = [asyncio.create_task(ask(client, number, started)) for number in range(len(PROMPTS))]
        for _ in asked:
            await started.acquire()
        of_this_application(actor)[0].send_signal(how)
        assert await asyncio.gather(*asked) == expected
    eventually(lambda: server.metric("dspark_requests_migrated_total") > migrated, "migrations are counted")
    eventually(
        lambda: server.metric("dspark_requests_running") == server.metric("dspark_kv_cache_usage_ratio") == 0,
        "no sequence and no block is left",
    )


def test_missing_gpus_are_said_at_once(serve_port: int) -> None:
    (qwen,) = yaml.safe_load((ROOT / "deployments" / "dspark_qwen3_moe.yaml").read_text())["applications"]
    with pytest.raises(ValueError, match=r"needs 4 GPUs of type H100.* has 0.*dspark_moe_cpu\.yaml"):
        build(qwen["args"])


def test_two_ranks_say_what_one_process_says(pair: Server, llama: TinyModel) -> None:
    with pair.openai() as client:
        for prompt in PROMPTS[:3]:
            answer = client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].text == llama.greedy_text(prompt, 40)
    assert pair.metric("dspark_draft_tokens_verified_total") > 0, "speculation is on"


@pytest.mark.parametrize(
    ("actor", "how"),
    [("EngineActor", signal.SIGKILL), ("Follower", signal.SIGKILL), ("Follower", signal.SIGSTOP)],
    ids=["leader killed", "follower killed", "follower stuck"],
)
async def test_streams_of_a_lost_replica_go_on(pair: Server, actor: str, how: signal.Signals) -> None:
    before = processes()
    await outlive(pair, actor, how)
    await asyncio.to_thread(whole, 2, 2)
    replaced = set(before).difference(processes())
    assert len(replaced) == 2, "both ranks of one replica, and no other"


async def test_a_gang_shares_the_experts_and_is_replaced_together(gang: Server, mixtral: TinyModel) -> None:
    texts = await undisturbed(gang)
    for number in range(0, len(PROMPTS), 2):
        assert texts[number][0] == mixtral.greedy_text(PROMPTS[number], NUM_TOKENS)
    before = processes()
    await outlive(gang, "EngineActor", signal.SIGKILL)
    await asyncio.to_thread(whole, 2, 0)
    assert not set(before).intersection(processes()), "lockstep: all or none"
