from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.messages import InvalidRequestError
from deployments.openai import (
    INFORMATIONAL,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MESSAGE_NEUTRAL,
    NEUTRAL,
    ChatRequest,
    Choice,
    CompletionRequest,
    ModelLimits,
    parse_body,
    tier_of,
    to_choices,
)

LIMITS = ModelLimits(max_model_len=100, vocab_size=1000, end_token_ids=(2,))
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatRequest:
    return parse_body(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), ChatRequest)


def completion(**fields: object) -> CompletionRequest:
    return parse_body(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionRequest)


def choices(body: ChatRequest | CompletionRequest, num_prompt_tokens: int = 10) -> list[Choice]:
    return to_choices(body, [tuple(range(num_prompt_tokens))], LIMITS, "id")


def refused(make: Any, **fields: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as raised:
        choices(make(**fields))
    return raised.value


def test_every_field_reaches_the_engine() -> None:
    body = chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, max_tokens=20, min_tokens=3, presence_penalty=0.2,
        frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={"5": -1.5}, logprobs=True, top_logprobs=4,
        stop=["a", "b"], dspark={"max_draft_tokens": 2},
    )  # fmt: skip
    (choice,) = choices(body)
    sampling = choice.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (11, 20, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.2, 0.3, 1.1)
    assert sampling.logit_bias == ((5, -1.5),)
    assert (sampling.num_logprobs, sampling.max_draft_tokens) == (4, 2)
    assert sampling.stop_token_ids == (2,)
    assert choice.stop == ("a", "b")


def test_defaults_are_openais_and_null_means_default() -> None:
    nulls = dict.fromkeys(["temperature", "top_p", "n", "seed", "stop", "max_tokens", "logprobs", "stream", "tools"])
    assert choices(chat(**nulls)) == choices(chat())
    sampling = choices(chat())[0].request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.num_logprobs) == (1.0, 1.0, 0, None)
    assert sampling.max_tokens == 90, "what fits"


def test_ignore_eos_and_top_k_off() -> None:
    sampling = choices(chat(ignore_eos=True, top_k=-1))[0].request.sampling
    assert sampling.stop_token_ids == ()
    assert sampling.top_k == 0


def test_zero_logprobs_is_not_no_logprobs() -> None:
    assert choices(completion(logprobs=0))[0].request.sampling.num_logprobs == 0
    assert choices(chat(logprobs=True))[0].request.sampling.num_logprobs == 0


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "fits"), [(40, 59, True), (40, 60, True), (40, 61, False)])
def test_prompt_and_output_at_the_limit(num_prompt_tokens: int, max_tokens: int, fits: bool) -> None:
    body = chat(max_completion_tokens=max_tokens)
    if fits:
        assert choices(body, num_prompt_tokens)[0].request.sampling.max_tokens == max_tokens
        return
    with pytest.raises(InvalidRequestError, match=r"40 tokens \+ 61 = 101 exceed max_model_len = 100") as raised:
        choices(body, num_prompt_tokens)
    assert raised.value.field_name == "max_completion_tokens"


@pytest.mark.parametrize(("num_prompt_tokens", "fits"), [(99, True), (100, False), (101, False)])
def test_prompt_alone_at_the_limit(num_prompt_tokens: int, fits: bool) -> None:
    if fits:
        assert choices(chat(), num_prompt_tokens)[0].request.sampling.max_tokens == 1
        return
    with pytest.raises(InvalidRequestError, match=f"{num_prompt_tokens} tokens.*max_model_len = 100"):
        choices(chat(), num_prompt_tokens)


def test_n_choices_have_their_own_seeds_and_ids() -> None:
    made = to_choices(completion(n=2, seed=2**63 - 1), [(1,), (2,)], LIMITS, "id")
    assert [choice.index for choice in made] == [0, 1, 2, 3]
    assert [choice.request.prompt_token_ids for choice in made] == [(1,), (1,), (2,), (2,)]
    assert [choice.request.sampling.seed for choice in made] == [2**63 - 1, 0, 2**63 - 1, 0]
    assert len({choice.request.request_id for choice in made}) == 4


def test_unseeded_choices_have_no_seed() -> None:
    assert {choice.request.sampling.seed for choice in choices(chat(n=3))} == {None}


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"], "n": MAX_CHOICES}, {"prompt": ["a"] * (MAX_CHOICES + 1)}])
def test_too_many_choices_are_refused_before_any_prompt_is_encoded(fields: dict[str, object]) -> None:
    """The body alone does it, which knows no tokenizer."""
    with pytest.raises(InvalidRequestError, match=f"exceed {MAX_CHOICES}") as raised:
        completion(**fields)
    assert raised.value.field_name == "n"
    assert len(completion(prompt=["a", "b"], n=MAX_CHOICES // 2).prompts()) == 2


MANY = 5000
UNKNOWN = {f"x{i}": 1 for i in range(MANY)}


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (completion, {"prompt": [-1] * MANY}),
        (completion, {"prompt": [[-1] * MANY]}),
        (completion, {"prompt": [[-1]] * MANY}),
        (completion, {"prompt": ["a", *[1.5] * MANY]}),
        (completion, {"stop": [1] * MANY}),
        (completion, {"logit_bias": dict.fromkeys(UNKNOWN, "x")}),
        (completion, {"dspark": UNKNOWN}),
        (completion, {"stream": True, "stream_options": UNKNOWN}),
        (chat, UNKNOWN),
        (chat, {"messages": [1] * MANY}),
        (chat, {"messages": [{**MESSAGES[0], **UNKNOWN}]}),
        (chat, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (chat, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **UNKNOWN}]}]}),
    ],
)
def test_a_body_full_of_mistakes_is_refused_at_the_first(make: Any, fields: dict[str, object]) -> None:
    """An error of pydantic's takes ten times the memory of what it is about, and the time of a request."""
    with pytest.raises(InvalidRequestError) as raised:
        make(**fields)
    cause = raised.value.__context__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() <= 4, "one for each shape of a prompt"


def test_biases_are_many_or_few() -> None:
    biases = {str(i): 1 for i in range(MAX_LOGIT_BIASES + 1)}
    assert refused(chat, logit_bias=biases).field_name == "logit_bias"
    biases.popitem()
    assert len(chat(logit_bias=biases).logit_bias or {}) == MAX_LOGIT_BIASES


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True), ("top_p", 0),
        ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.5), ("seed", 2**63), ("seed", "x"), ("n", 0),
        ("n", MAX_CHOICES + 1), ("stop", ""), ("stop", 3), ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
        ("stop", "x" * 10_000), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1e3), ("min_tokens", -1),
        ("min_tokens", 91), ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}), ("logit_bias", {"1000": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", []), ("ignore_eos", 1), ("stream", "true"), ("stream_options", {"include_usage": True}),
        ("dspark", {"max_draft_tokens": -1}), ("dspark", {"max_drafts": 1}), ("dspark", {"tier": 1}),
        ("dspark", 3), ("nonsense", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [chat, completion])
def test_bad_values_are_refused_by_name(make: Any, field: str, value: object) -> None:
    assert refused(make, **{field: value}).field_name.split(".")[0] == field


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": "hi"}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
        ({"model": None}, "model"),
    ],
)
def test_bad_chats(fields: dict[str, object], name: str) -> None:
    assert refused(chat, **fields).field_name.startswith(name)


@pytest.mark.parametrize("prompt", [None, 3, [], [[]], {"a": 1}, [1, "a"], [-1], [1.5], [True]])
def test_bad_prompts(prompt: object) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        body = completion(prompt=prompt)
        to_choices(body, [tuple(p) for p in body.prompts() if not isinstance(p, str)], LIMITS, "id")
    assert raised.value.field_name == "prompt"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_four_shapes_of_prompts(prompt: object, expected: list[object]) -> None:
    assert completion(prompt=prompt).prompts() == expected


def test_token_ids_outside_the_vocabulary() -> None:
    with pytest.raises(InvalidRequestError, match="1000"):
        to_choices(completion(prompt=[1000]), [(1000,)], LIMITS, "id")


def test_empty_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        to_choices(completion(prompt=""), [()], LIMITS, "id")


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_unsupported_fields_are_refused_unless_neutral(name: str) -> None:
    assert chat(**{name: None}) == chat()
    for value in NEUTRAL[name]:
        assert chat(**{name: value}) == chat()
    error = refused(chat, **{name: {"anything": "else"}})
    assert error.field_name == name
    assert "not supported" in error.message


@pytest.mark.parametrize("name", sorted(MESSAGE_NEUTRAL))
def test_a_message_may_have_all_fields_of_an_answer_when_they_say_nothing(name: str) -> None:
    for value in (None, *MESSAGE_NEUTRAL[name]):
        assert chat(messages=[{**MESSAGES[0], name: value}]) == chat()
    error = refused(chat, messages=[{**MESSAGES[0], name: {"anything": "else"}}])
    assert error.field_name == f"messages.0.{name}"
    assert "not supported" in error.message


@pytest.mark.parametrize("name", sorted(INFORMATIONAL))
def test_informational_fields_change_nothing(name: str) -> None:
    assert chat(**{name: "x"}) == chat()


HALF_PAIR = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'
"""JSON can say what no text can hold; tokenizers can't take it."""


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"model": NaN}', HALF_PAIR])
def test_bad_json(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_body(body, ChatRequest)
    assert raised.value.field_name == "body"


def test_developer_is_system_and_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    assert body.conversation() == [{"role": "system", "content": "x"}, {"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("options", "header", "expected"),
    [(None, None, 1), ({}, None, 1), ({"tier": "slow"}, None, 0), (None, "slow", 0), ({"tier": "slow"}, "slow", 0),
     ({"tier": None}, "slow", 0)],
)  # fmt: skip
def test_a_tier_is_named_in_body_or_header(options: object, header: str | None, expected: int) -> None:
    place = tier_of(chat(dspark=options), header, ["slow", "fast"], 1)
    assert place == expected
    made = to_choices(chat(dspark=options, n=2), [(1,)], LIMITS, "id", place)
    assert {choice.request.tier for choice in made} == {expected}


@pytest.mark.parametrize(
    ("options", "header", "field", "message"),
    [
        ({"tier": "gold"}, None, "dspark.tier", "'gold' is no tier of this server, which has slow, fast"),
        (None, "gold", "x-dspark-tier", "'gold' is no tier of this server, which has slow, fast"),
        (None, "x" * 9999, "x-dspark-tier", f"'{'x' * 64}..' is no tier of this server"),
        (None, "slow, fast", "x-dspark-tier", "'slow, fast' is no tier of this server"),
        (None, "", "x-dspark-tier", "'' is no tier of this server"),
        ({"tier": "slow"}, "fast", "dspark.tier", "is 'slow', but the header x-dspark-tier says 'fast'"),
    ],
)
def test_wrong_tiers_are_refused(options: object, header: str | None, field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        tier_of(chat(dspark=options), header, ["slow", "fast"], 1)
    assert raised.value.field_name == field
