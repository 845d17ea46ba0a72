"""What breaks other servers, done to the real one."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import openai
import pytest
from conftest import MAX_BODY_BYTES, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_WAITING, MODEL, Server, eventually

from deployments.config import ApiKeysConfig
from deployments.ingress import ApiKeys

pytestmark = pytest.mark.server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def completion(server: Server, **fields: Any) -> httpx.Response:
    return server.post(COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": 2, **fields})


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""]], ids=str)
def test_empty_prompt(server: Server, prompt: object) -> None:
    assert error_of(completion(server, prompt=prompt))["param"] == "prompt"


def test_empty_conversation_and_empty_turn(server: Server) -> None:
    assert error_of(server.post(CHAT, {"model": MODEL, "messages": []}))["param"] == "messages"
    turn = [{"role": "user", "content": ""}]
    assert server.post(CHAT, {"model": MODEL, "messages": turn, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_prompt_and_output_at_the_limit(server: Server, excess: int) -> None:
    response = completion(server, prompt=[50] * (MAX_MODEL_LEN - 4), max_tokens=4 + excess, ignore_eos=True)
    if excess <= 0:
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 4 + excess
        return
    error = error_of(response)
    assert error["param"] == "max_tokens"
    assert str(MAX_MODEL_LEN) in error["message"]
    assert str(MAX_MODEL_LEN + 1) in error["message"]


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 5 * MAX_MODEL_LEN])
def test_prompt_too_long(server: Server, length: int) -> None:
    error = error_of(completion(server, prompt=[50] * length))
    assert error["param"] == "prompt"
    assert str(length) in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 50_000], ids=range(6))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_json(server: Server, path: str, body: bytes) -> None:
    assert error_of(server.post(path, body))["param"] == "body"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": "x" * 100_000}, "stop"),
        ({"top_k": 10**20}, "top_k"),
        ({"min_tokens": 10**20}, "min_tokens"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": [10**9]}, "prompt"),
        ({"dspark": {"drafts": 3}}, "dspark.drafts"),
        ({"dspark": {"tier": "gold"}}, "dspark.tier"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"suffix": "x"}, "suffix"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields(server: Server, fields: dict[str, object], param: str, stream: bool) -> None:
    assert error_of(completion(server, **fields, stream=stream))["param"] == param


def test_the_client_sees_the_right_exceptions(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=USER, temperature=9)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=USER)


def test_unknown_paths_and_methods(server: Server) -> None:
    assert error_of(server.post("/v1/nothing", {}), 404)
    assert error_of(httpx.get(server.url + CHAT), 405)


def test_body_too_large(server: Server) -> None:
    assert error_of(completion(server, prompt="x" * MAX_BODY_BYTES), 413)["code"] == "body_too_large"


@pytest.mark.parametrize("key", [None, "", "wrong", "key-for-test", "key-for-tests2"])
def test_keys_are_required_and_checked_first(server: Server, key: str | None) -> None:
    for path in (CHAT, COMPLETIONS):
        error = error_of(server.post(path, b"{", key=key), 401)
        assert error["code"] == "invalid_api_key"
        assert not key or key not in error["message"]
    assert error_of(httpx.get(f"{server.url}/v1/models"), 401)
    assert error_of(httpx.get(f"{server.url}/v1/dspark/scheduler"), 401)


def test_keys_from_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ApiKeysConfig(environment_variable="DSPARK_TEST_KEYS")
    with pytest.raises(ValueError, match="DSPARK_TEST_KEYS holds no key"):
        ApiKeys(config)
    monkeypatch.setenv("DSPARK_TEST_KEYS", " first \n\nsecond\n")
    keys = ApiKeys(config)
    assert [keys.accepts(f"Bearer {key}") for key in ("first", "second", "third", "")] == [True, True, False, False]
    assert not keys.accepts("first")
    assert "first" not in repr(vars(keys))


def test_more_than_the_queue_takes_is_shed(server: Server) -> None:
    shed = server.metric("dspark_requests_shed_total")
    for stream in (False, True):
        response = completion(server, n=MAX_NUM_SEQS + MAX_NUM_WAITING + 1, max_tokens=20, stream=stream)
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
    eventually(lambda: server.metric("dspark_requests_shed_total") == shed + 2, "both were counted")
    assert_nothing_runs(server)
    assert completion(server).status_code == 200


def assert_nothing_runs(server: Server) -> None:
    eventually(
        lambda: server.metric("dspark_requests_running") == server.metric("dspark_requests_waiting") == 0,
        "no sequence is left",
    )


async def running(server: Server, num_sequences: int) -> None:
    """Returns when the engine has said that it runs so many; the requests under way go on meanwhile."""
    await asyncio.to_thread(
        eventually, lambda: server.metric("dspark_requests_running") >= num_sequences, "the sequences run", 60
    )


async def test_64_concurrent_requests_on_a_pool_for_8(server: Server) -> None:
    prompts = [[1000 + i] * 100 for i in range(64)]
    async with server.async_openai() as client:

        async def ask(prompt: list[int], stream: bool) -> int:
            fields: Any = {"stream_options": {"include_usage": True}} if stream else {}
            answer: Any = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=12, stream=stream, extra_body={"ignore_eos": True}, **fields
            )
            if not stream:
                return int(answer.usage.completion_tokens)
            return [chunk.usage.completion_tokens async for chunk in answer if chunk.usage][0]

        counts = await asyncio.gather(*(ask(prompt, i % 2 == 0) for i, prompt in enumerate(prompts)))
    assert counts == [12] * 64
    assert_nothing_runs(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_sequence(server: Server, stream: bool) -> None:
    before = server.metric("dspark_generated_tokens_total")
    body = {"model": MODEL, "prompt": "hi", "max_tokens": MAX_MODEL_LEN - 10, "ignore_eos": True, "stream": stream}
    headers = {"Authorization": f"Bearer {server.openai().api_key}"}
    async with httpx.AsyncClient(timeout=120) as client:
        if stream:
            async with client.stream("POST", server.url + COMPLETIONS, json=body, headers=headers) as response:
                lines = response.aiter_lines()  # kept: dropping the iterator would already close the connection
                await anext(lines)
                await running(server, 1)
        else:
            asked = asyncio.create_task(client.post(server.url + COMPLETIONS, json=body, headers=headers))
            await running(server, 1)
            asked.cancel()
    assert_nothing_runs(server)
    assert server.metric("dspark_generated_tokens_total") - before < MAX_MODEL_LEN - 10, "it was cut short"
    eventually(lambda: server.metric("dspark_kv_cache_usage_ratio") == 0, "its blocks are free")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
async def test_a_lost_engine_is_replaced_and_its_requests_go_on(server: Server, how: signal.Signals) -> None:
    """There is one replica: its requests wait until a new engine has loaded the model."""
    migrated, num_lost = (server.metric(f"dspark_{name}_total") for name in ("requests_migrated", "engines_lost"))
    async with server.async_openai() as client:

        async def ask(stream: bool) -> tuple[str, int]:
            fields: Any = {"stream_options": {"include_usage": True}} if stream else {}
            answer: Any = await client.completions.create(
                model=MODEL,
                prompt="Once upon a time",
                max_tokens=150,
                temperature=0,
                stream=stream,
                extra_body={"ignore_eos": True},
                **fields,
            )
            if not stream:
                return answer.choices[0].text, answer.usage.completion_tokens
            chunks = [chunk async for chunk in answer]
            return "".join(c.choices[0].text for c in chunks if c.choices), chunks[-1].usage.completion_tokens

        expected = await ask(stream=False)
        asked = [asyncio.create_task(ask(stream)) for stream in (False, True)]
        await running(server, 2)
        lost = server.engine_process()
        assert lost is not None
        lost.send_signal(how)
        assert await asyncio.gather(*asked) == [expected, expected]
    assert expected[1] == 150
    assert server.engine_process() not in (None, lost), "the old one is gone"
    eventually(lambda: server.metric("dspark_requests_migrated_total") == migrated + 2, "both were counted")
    assert server.metric("dspark_engines_lost_total") == num_lost + 1
    assert_nothing_runs(server)
    assert completion(server).status_code == 200
