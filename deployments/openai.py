"""What clients may ask in OpenAI's API, and what it means for the engine.

Knows every field, its range and its error; knows nothing of HTTP, tokens of text, or replicas. A field is used, refused
by name, or listed as informational: nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.messages import InvalidRequestError, Request, SamplingParams
from deployments.config import MAX_CHOICES

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
TIER_HEADER = "x-dspark-tier"
MAX_SHOWN = 64
"""Characters of a wrong name in the error that refuses it: names may be as long as a body."""

INFORMATIONAL = frozenset({"user", "safety_identifier", "metadata", "prompt_cache_key"})
"""Fields that by OpenAI's own definition never change an answer: labels of the caller's own. Accepted, no effect."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI fields that aren't supported, with the values (besides null) that ask for nothing; any other is refused."""

MESSAGE_NEUTRAL: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
    "tool_calls": ([],),
}
"""The same of a message: clients send back an answer's message with all the fields that it could have had."""

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that its first wrong item refuses: pydantic would build an error for each, and a body may hold a million."""
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _knows_each_field(cls, given: object) -> object:
        """Refuses the first one that it doesn't, where extra="forbid" would build an error for each."""
        for name, value in given.items() if isinstance(given, dict) else ():
            if name in cls.model_fields:
                continue
            if name not in cls.neutral:
                raise InvalidRequestError(name, "is not a known field")
            if value is not None and value not in cls.neutral[name]:
                raise InvalidRequestError(name, "is not supported by this server")
        return given


class DSparkOptions(_Strict):
    """Our extension in the body."""

    max_draft_tokens: int | None = Field(None, ge=0)
    """Most draft tokens verified per step; 0 is plain decoding."""
    tier: str | None = None
    """The name of an SLA tier."""


class StreamOptions(_Strict):
    include_usage: bool = False


class _Generation(_Strict):
    """The fields that both endpoints share."""

    neutral = NEUTRAL

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    dspark: DSparkOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, stop: object) -> object:
        if not isinstance(stop, str):
            return stop
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:  # said here, since the client wrote no list to point into
            raise ValueError(f"should have 1 to {MAX_STOP_LENGTH} characters")
        return [stop]

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases_are_few(cls, biases: object) -> object:
        if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIASES:  # pydantic would look at each first
            raise ValueError(f"should have at most {MAX_LOGIT_BIASES} token ids")
        return biases

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "only allowed when stream is true")
        return self


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    neutral = MESSAGE_NEUTRAL

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "only allowed when logprobs is true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError("max_completion_tokens", "differs from max_tokens, which means the same")
        return self

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, str]]:
        """The messages as chat templates want them. OpenAI's `developer` is the newer name of `system`."""
        return [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in self.messages]


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _starts_few_sequences(self) -> Self:
        """Said before any prompt is made into tokens."""
        num_prompts, n = len(self.prompts()), self.n or 1
        if num_prompts * n > MAX_CHOICES:
            raise InvalidRequestError(
                "n", f"{num_prompts} prompts x n = {n} exceed {MAX_CHOICES} sequences per request"
            )
        return self

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, texts or token ids. Raises InvalidRequestError when there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("prompt", "must not be empty")
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


Body = ChatRequest | CompletionRequest
BodyT = TypeVar("BodyT", ChatRequest, CompletionRequest)


def parse_body(body: bytes, schema: type[BodyT]) -> BodyT:
    """The request in a JSON body. Raises InvalidRequestError naming the first offending field."""
    try:
        given: Any = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(given, ensure_ascii=False).encode()  # fails for half a surrogate pair, which is no text
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("body", f"is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidRequestError("body", "must be a JSON object")
    try:
        return schema.model_validate({name: value for name, value in given.items() if name not in INFORMATIONAL})
    except ValidationError as error:
        raise _first_offence(error) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _first_offence(error: ValidationError) -> InvalidRequestError:
    offence = error.errors()[0]
    path = [str(part) for part in offence["loc"] if part != "str" and not str(part).startswith("list[")]
    ours = offence.get("ctx", {}).get("error")
    if isinstance(ours, InvalidRequestError):
        return InvalidRequestError(".".join([*path, ours.field_name]), ours.message)
    if path[:1] == ["prompt"]:  # pydantic's path names the members of the union
        return InvalidRequestError("prompt", "must be a string, strings, token ids, or lists of token ids")
    if offence["type"] == "missing":
        return InvalidRequestError(".".join(path), "is required")
    return InvalidRequestError(".".join(path), offence["msg"])


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model can take."""

    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence to generate and what the HTTP side does with its tokens."""

    index: int
    request: Request
    stop: tuple[str, ...] = field(default=())


def tier_of(body: Body, header: str | None, names: Sequence[str], default: int) -> int:
    """The place of the request's tier in `names`; `header` is what the tier's header says, None when there is none.

    Raises InvalidRequestError for a name that isn't there, and when body and header disagree.
    """
    asked = body.dspark.tier if body.dspark else None
    if asked is not None and header is not None and asked != header:
        raise InvalidRequestError(
            "dspark.tier", f"is {_shown(asked)}, but the header {TIER_HEADER} says {_shown(header)}"
        )
    name, field_name = (asked, "dspark.tier") if asked is not None else (header, TIER_HEADER)
    if name is None:
        return default
    if name not in names:
        raise InvalidRequestError(field_name, f"{_shown(name)} is no tier of this server, which has {', '.join(names)}")
    return names.index(name)


def _shown(name: str) -> str:
    return repr(name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + "..")


def to_choices(
    body: Body, prompts: list[tuple[int, ...]], limits: ModelLimits, request_id: str, tier: int = 0
) -> list[Choice]:
    """One Choice per prompt and per `n`, numbered as OpenAI numbers them (prompt-major). `tier`: that of all.

    Raises InvalidRequestError when a prompt does not fit. Choice i of a prompt draws with seed + i.
    """
    choices: list[Choice] = []
    for prompt in prompts:
        max_tokens = _room(body, prompt, limits)
        for i in range(body.n or 1):
            index = len(choices)
            request = Request(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt,
                sampling=_sampling(body, max_tokens, limits, None if body.seed is None else (body.seed + i) % 2**63),
                tier=tier,
            )
            choices.append(Choice(index, request, tuple(body.stop or ())))
    return choices


def _room(body: Body, prompt: tuple[int, ...], limits: ModelLimits) -> int:
    """max_tokens of this prompt: what was asked, else all that fits."""
    name = "messages" if isinstance(body, ChatRequest) else "prompt"
    if not prompt:
        raise InvalidRequestError(name, "must not be empty: there is no token to continue from")
    if max(prompt) >= limits.vocab_size:
        raise InvalidRequestError(name, f"token id {max(prompt)} is outside the vocabulary of {limits.vocab_size}")
    room = limits.max_model_len - len(prompt)
    if room < 1:
        raise InvalidRequestError(
            name, f"has {len(prompt)} tokens, which leaves no room to answer in max_model_len = {limits.max_model_len}"
        )
    wanted = body.max_output_tokens
    if wanted is not None and wanted > room:
        raise InvalidRequestError(
            "max_tokens" if body.max_tokens is not None else "max_completion_tokens",
            f"the prompt's {len(prompt)} tokens + {wanted} = {len(prompt) + wanted} exceed "
            f"max_model_len = {limits.max_model_len}",
        )
    return room if wanted is None else wanted


def _sampling(body: Body, max_tokens: int, limits: ModelLimits, seed: int | None) -> SamplingParams:
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError("min_tokens", f"{min_tokens} exceeds the most tokens there can be, {max_tokens}")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_default(body.temperature, 1.0),
        top_p=_default(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_default(body.min_p, 0.0),
        seed=seed,
        min_tokens=min_tokens,
        presence_penalty=_default(body.presence_penalty, 0.0),
        frequency_penalty=_default(body.frequency_penalty, 0.0),
        repetition_penalty=_default(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, limits.vocab_size),
        stop_token_ids=() if body.ignore_eos else limits.end_token_ids,
        num_logprobs=body.num_logprobs,
        max_draft_tokens=body.dspark.max_draft_tokens if body.dspark else None,
    )


def _default(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequestError("logit_bias", f"{key!r} is not a token id below {vocab_size}")
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
