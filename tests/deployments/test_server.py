"""Every field of the API through the real server, asked by the real `openai` client."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from conftest import MAX_MODEL_LEN, MODEL, Server, eventually

from deployments.tokenizer import Tokenizer

pytestmark = pytest.mark.server

END = "2"
"""SmolLM2's end token."""
COUNT = "1, 2, 3, 4, 5,"


@pytest.fixture(scope="module")
def tokenizer(model_folder: Any) -> Tokenizer:
    return Tokenizer(model_folder)


def complete(client: openai.OpenAI, prompt: Any = COUNT, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **fields)


def chat(client: openai.OpenAI, content: str = "Name three colours.", **fields: Any) -> Any:
    fields = {"temperature": 0, "max_completion_tokens": 12, **fields}
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra, **fields)


EXTRA = {"top_k", "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "dspark"}
"""Fields that the client passes on without knowing them."""


def text_of(answer: Any) -> str:
    return str(answer.choices[0].text)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_chat_answers(client: openai.OpenAI) -> None:
    answer = chat(client, "What is the capital of France?", max_completion_tokens=30)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_is_sent_back_as_it_came(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    messages: Any = [{"role": "user", "content": "Name a colour."}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=4)
    answer = first.choices[0].message
    messages += [answer.model_dump(), {"role": "user", "content": "Another?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    turns = [messages[0], {"role": "assistant", "content": answer.content}, messages[2]]
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(tokenizer.render(turns))


def test_roles_and_parts_are_rendered(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    messages: Any = conversation
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    flat = [{**turn, "content": "Bye"} if isinstance(turn["content"], list) else turn for turn in conversation]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.render(flat))  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [{"max_tokens": 5}, {"max_completion_tokens": 5}])
def test_max_tokens_and_usage(client: openai.OpenAI, limit: dict[str, int]) -> None:
    answer = chat(client, **{"max_completion_tokens": openai.omit, **limit})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_default_length_is_what_fits(client: openai.OpenAI) -> None:
    prompt = list(range(100, 100 + MAX_MODEL_LEN - 3))
    answer = complete(client, prompt, max_tokens=openai.omit, ignore_eos=True)
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_sampling_fields_that_leave_one_token_are_greedy(client: openai.OpenAI) -> None:
    greedy = text_of(complete(client))
    hot = text_of(complete(client, temperature=2, seed=1))
    assert hot != greedy, "else this test proves nothing"
    for field in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert text_of(complete(client, temperature=2, seed=1, **field)) == greedy, field


def test_seed(client: openai.OpenAI) -> None:
    texts = [text_of(complete(client, "Once upon a time", temperature=1, seed=seed)) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_n_choices(client: openai.OpenAI) -> None:
    greedy = complete(client, n=3)
    assert [choice.index for choice in greedy.choices] == [0, 1, 2]
    assert len({choice.text for choice in greedy.choices}) == 1
    assert greedy.usage.completion_tokens == 36
    seeded = complete(client, n=3, temperature=1, seed=5)
    alone = [text_of(complete(client, temperature=1, seed=5 + i)) for i in range(3)]
    assert [choice.text for choice in seeded.choices] == alone
    assert len(set(alone)) > 1


def test_prompt_shapes_are_one(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode(COUNT))
    expected = text_of(complete(client))
    assert text_of(complete(client, ids)) == expected
    for prompt in ([COUNT, COUNT], [ids, ids]):
        answer = complete(client, prompt)
        assert [choice.text for choice in answer.choices] == [expected, expected]
        assert answer.usage.prompt_tokens == 2 * len(ids)


def test_stop_string_is_cut_and_never_leaks(client: openai.OpenAI) -> None:
    whole = text_of(complete(client, max_tokens=30))
    stop = whole[10:14]
    expected = whole[: whole.index(stop)]
    answer = complete(client, max_tokens=30, stop=stop)
    assert (text_of(answer), answer.choices[0].finish_reason) == (expected, "stop")
    assert answer.usage.completion_tokens < 30
    streamed = list(complete(client, max_tokens=30, stop=[stop, "never"], stream=True))
    assert "".join(text_of(chunk) for chunk in streamed) == expected
    assert streamed[-1].choices[0].finish_reason == "stop"
    assert streamed[-1].dspark["ttft_ms"] > 0


def test_end_token_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    at_once = complete(client, logit_bias={END: 100})
    assert (text_of(at_once), at_once.choices[0].finish_reason, at_once.usage.completion_tokens) == ("", "stop", 1)
    later = complete(client, logit_bias={END: 100}, min_tokens=5)
    assert (later.choices[0].finish_reason, later.usage.completion_tokens) == ("stop", 6)
    never = complete(client, logit_bias={END: 100}, ignore_eos=True)
    assert (never.choices[0].finish_reason, never.usage.completion_tokens) == ("length", 12)


def test_logit_bias_forces_a_token(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    (token_id,) = tokenizer.encode(" hello")
    assert text_of(complete(client, logit_bias={str(token_id): 100}, max_tokens=4)) == " hello" * 4


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.5}], ids=str
)
def test_penalties_repeat_less(client: openai.OpenAI, tokenizer: Tokenizer, penalty: dict[str, float]) -> None:
    def most_repeated(**fields: float) -> int:
        text = text_of(complete(client, "the cat the cat the cat the cat the cat", max_tokens=24, **fields))
        return max(Counter(tokenizer.encode(text)).values())

    assert most_repeated(**penalty) < most_repeated()


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, max_completion_tokens=6)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens == 6
    for token in content:
        assert token.token == token.top_logprobs[0].token, "greedy takes the likeliest"
        assert token.logprob == token.top_logprobs[0].logprob < 0
        assert len(token.top_logprobs) == 3
        assert bytes(token.bytes).decode() == token.token
    assert "".join(token.token for token in content) == answer.choices[0].message.content


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    content = chat(client, logprobs=True, top_logprobs=0).choices[0].logprobs.content
    assert {len(token.top_logprobs) for token in content} == {0}
    assert all(token.logprob < 0 for token in content)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == text_of(answer)
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(12)]
    assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs


def test_logprobs_stop_where_the_text_stops(client: openai.OpenAI) -> None:
    answer = complete(client, stop=" 8", logprobs=0)
    assert "8" not in "".join(answer.choices[0].logprobs.tokens)
    assert "".join(answer.choices[0].logprobs.tokens).startswith(text_of(answer))


def test_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=1)
    chunks = list(
        chat(client, logprobs=True, top_logprobs=1, stream=True, stream_options={"include_usage": True}),
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    told = {"accepted_length", "tokens_per_second", "ttft_ms", "tpot_ms", "tier", "tier_met"}
    assert chunks[-1].dspark.keys() == told
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(delta.delta.content or "" for delta in deltas) == whole.choices[0].message.content
    tokens = [token for delta in deltas if delta.logprobs for token in delta.logprobs.content]
    assert [t.token for t in tokens] == [t.token for t in whole.choices[0].logprobs.content]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]


def test_streamed_choices_are_told_apart(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in complete(client, n=2, seed=3, temperature=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    whole = complete(client, n=2, seed=3, temperature=1)
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_characters_of_several_tokens_are_whole_in_chunks(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩")
    assert len(ids) > 1, "else this test proves nothing"
    # Each byte's token is allowed, nothing else: whatever comes is made of parts of characters.
    bias = {str(token_id): 100 for token_id in ids}
    fields: dict[str, Any] = {"logit_bias": bias, "temperature": 1, "seed": 4, "max_tokens": 16}
    whole = text_of(complete(client, "👩👩👩👩👩👩", **fields))
    chunks = [text_of(chunk) for chunk in complete(client, "👩👩👩👩👩👩", stream=True, **fields)]
    assert "".join(chunks) == whole
    assert "👩" in whole


def test_wire_format_of_a_stream(server: Server) -> None:
    body = {"model": MODEL, "prompt": COUNT, "max_tokens": 2, "stream": True}
    response = server.post("/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert "usage" not in response.text


def test_dspark_extension(client: openai.OpenAI) -> None:
    answer = complete(client, dspark={"max_draft_tokens": 0})
    assert answer.dspark["accepted_length"] == 1.0, "plain decoding"
    assert answer.dspark["ttft_ms"] > 0
    assert answer.dspark["tpot_ms"] > 0
    assert answer.dspark["tokens_per_second"] > 0
    assert (answer.dspark["tier"], answer.dspark["tier_met"]) == ("default", True), "no tiers, no promises"
    assert text_of(answer) == text_of(complete(client)), "drafts never change an answer"


def test_informational_fields_are_accepted(client: openai.OpenAI) -> None:
    assert text_of(complete(client, user="somebody")) == text_of(complete(client))


def test_metrics_of_every_process(server: Server, client: openai.OpenAI) -> None:
    def finished() -> float:
        return server.metric("dspark_requests_total", finish_reason="length", replica="ingress-0")

    before, generated = finished(), server.metric("dspark_generated_tokens_total", replica="0", rank="0")
    complete(client, n=20, max_tokens=7)  # 20: more than an earlier test can still have on the way to the hub
    eventually(lambda: finished() >= before + 20, "the ingress counted the choices")
    eventually(
        lambda: server.metric("dspark_generated_tokens_total", replica="0") >= generated + 20 * 7,
        "the engine counted their tokens",
    )
    text = httpx.get(f"{server.url}/metrics").text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) > 10


def test_health_needs_no_key(server: Server) -> None:
    assert server.healthy()
