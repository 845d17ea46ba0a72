"""HTTP: OpenAI's API in, streams of the replicas out.

Knows connections, keys, statuses and how long things took; what fields mean is openai.py's, what is written back is
responses.py's. A client that leaves takes its sequences with it.

Serve copies the routes where `@serve.ingress` stands. So the class comes last, after all that it uses, and annotations
are not postponed: FastAPI could not resolve them in the copy.
"""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, get_args

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from starlette.exceptions import HTTPException

from cluster.accounts import FleetAccount
from cluster.exposition import CONTENT_TYPE, Exposition
from cluster.messages import DSparkError, EngineDeadError, InvalidRequestError, QueueFullError, TierUnmetError
from cluster.messages import Request as EngineRequest
from cluster.metrics import ServiceMetrics, ShedReason
from deployments.admission import Ticket
from deployments.config import ApiKeysConfig, LLMConfig
from deployments.generation import Generation, Streams
from deployments.metrics_hub import PUSH_PERIOD_SECONDS
from deployments.migration import Events, MigratingStream
from deployments.openai import (
    TIER_HEADER,
    Body,
    BodyT,
    ChatRequest,
    Choice,
    CompletionRequest,
    ModelLimits,
    error_body,
    parse_body,
    tier_of,
    to_choices,
)
from deployments.responses import Json, Writer
from deployments.tokenizer import Tokenizer
from drafter.source import resolve_source

HUB_TIMEOUT_SECONDS = 3.0
RETRY_SOON = {"Retry-After": "5"}

app = FastAPI(title="DSpark Serve", openapi_url=None)


class HttpError(DSparkError):
    """A refusal with a status of its own."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, param, code)


def describe(error: Exception) -> tuple[int, Json, dict[str, str]]:
    """(status, body, headers) of any error: ours, Serve's or Ray's."""
    match _cause(error):
        case HttpError(status=status, body=body):
            return status, body, {}
        case InvalidRequestError() as cause:
            return 400, error_body(str(cause), "invalid_request_error", cause.field_name), {}
        case QueueFullError() as cause:
            retry_after = {"Retry-After": str(max(1, round(cause.retry_after_seconds)))}
            return 429, error_body(str(cause), "rate_limit_error", code="queue_full"), retry_after
        case TierUnmetError() as cause:
            retry_after = {"Retry-After": str(max(1, round(cause.retry_after_seconds)))}
            return 429, error_body(str(cause), "rate_limit_error", code="tier_unmet"), retry_after
        case HTTPException() as cause:
            return cause.status_code, error_body(str(cause.detail), "invalid_request_error"), {}
        case EngineDeadError() as cause:
            return 503, error_body(str(cause), "server_error", code="engine_unavailable"), RETRY_SOON
        case RayError() | RayServeException() | TimeoutError():
            message = "no replica can serve this request now"
            return 503, error_body(message, "server_error", code="engine_unavailable"), RETRY_SOON
        case cause:
            return 500, error_body(f"{type(cause).__name__}: {cause}", "server_error"), {}


def error_response(error: Exception) -> JSONResponse:
    """Any error in OpenAI's shape."""
    status, body, headers = describe(error)
    return JSONResponse(body, status, headers)


def _cause(error: Exception) -> Exception:
    """What a replica raised, without Ray's wrapping."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return error


@app.exception_handler(Exception)
@app.exception_handler(DSparkError)
@app.exception_handler(404)
@app.exception_handler(405)
async def _on_error(_: Request, error: Exception) -> JSONResponse:
    return error_response(error)


class ReplicaStream:
    """A replica's events, with errors as the replica raised them; a replica whose process ended is a lost engine."""

    def __init__(self, stream: Any, ticket: Ticket) -> None:
        """`stream`: what the handle of a deployment gives for `generate`. Once something comes of it, an engine has the
        request."""
        self._stream = stream
        self._ticket: Ticket | None = ticket
        self._failed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Events:
        try:
            events: Events = await anext(self._stream)
        except TaskCancelledError:  # by us
            raise
        except Exception as error:
            self._failed = True
            if isinstance(error, RayTaskError):
                raise _cause(error) from None
            if isinstance(error, RayError):  # its process or its node died, or can't be reached
                raise EngineDeadError(f"the replica's process died: {' '.join(str(error).split())}") from None
            raise
        if self._ticket is not None:
            self._ticket.is_taken()
            self._ticket = None
        return events

    def cancel(self) -> None:
        if not self._failed:  # Serve would raise again what kept the request from a replica
            self._stream.cancel()


class ApiKeys:
    """Who may ask. Only hashes are kept, so that no key can get into a log or a dump."""

    def __init__(self, config: ApiKeysConfig | None) -> None:
        """Raises ValueError when the configured place holds no key."""
        self._hashes: list[bytes] = []
        if config is None:
            return
        if config.file is not None:
            place, text = f"the file {config.file}", Path(config.file).read_text()
        else:
            name = str(config.environment_variable)
            place, text = f"the environment variable {name}", os.environ.get(name, "")
        self._hashes = [_hash(key.strip()) for key in text.splitlines() if key.strip()]
        if not self._hashes:
            raise ValueError(f"http_config.api_keys: {place} holds no key")

    def check(self, request: Request) -> None:
        """Raises HttpError 401 unless the request shows a key, or none is needed."""
        if self._hashes and not self.accepts(request.headers.get("Authorization", "")):
            raise HttpError(401, "a valid API key is required", "authentication_error", "invalid_api_key")

    def accepts(self, authorization: str) -> bool:
        """Whether an Authorization header shows one of the keys. Takes the same time for any key."""
        scheme, _, key = authorization.partition(" ")
        shown = _hash(key.strip())
        matches = [hmac.compare_digest(shown, known) for known in self._hashes]
        return scheme.lower() == "bearer" and any(matches)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _closing(events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """The events; they are closed, and with them their sequences, as soon as nobody reads on."""
    async with contextlib.aclosing(events):
        async for event in events:
            yield event


@serve.ingress(app)
class Ingress:
    """Serve deployment with the HTTP routes. `/v1` asks for an API key when keys are configured."""

    def __init__(self, config: LLMConfig, replicas: Any, hub: Any) -> None:
        """`replicas`, `hub`: handles of the Replica and MetricsHub deployments."""
        self._config = config
        self._replicas = replicas.options(stream=True)
        self._fleet = replicas
        self._hub = hub
        self._tokenizer = Tokenizer(resolve_source(config.engine_config().model_source))
        self._limits = ModelLimits(
            config.engine_kwargs.max_model_len, self._tokenizer.vocab_size, self._tokenizer.end_token_ids
        )
        self._keys = ApiKeys(config.http_config.api_keys)
        self._tier_names = [tier.name for tier in config.tiers]
        self._metrics = ServiceMetrics(self._tier_names)
        self._started_at = int(time.time())
        self._pusher = asyncio.get_running_loop().create_task(self._push_metrics())

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(self, request: Request) -> Response:
        """A conversation's next turn."""
        arrived_at = time.monotonic()
        body, tier = await self._parse(request, ChatRequest)
        prompt = await asyncio.to_thread(self._tokenizer.render, body.conversation())
        return await self._answer(body, [prompt], tier, "chatcmpl", arrived_at)

    @app.post("/v1/completions", response_model=None)
    async def completions(self, request: Request) -> Response:
        """Continuations of prompts."""
        arrived_at = time.monotonic()
        body, tier = await self._parse(request, CompletionRequest)
        prompts = [
            await asyncio.to_thread(self._tokenizer.encode, prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts()
        ]
        return await self._answer(body, prompts, tier, "cmpl", arrived_at)

    @app.get("/v1/models", response_model=None)
    async def models(self, request: Request) -> Response:
        """The one model there is."""
        self._keys.check(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    @app.get("/v1/models/{model_id:path}", response_model=None)
    async def model(self, request: Request, model_id: str) -> Response:
        self._keys.check(request)
        self._check_model(model_id)
        return JSONResponse(self._model())

    @app.get("/v1/dspark/scheduler", response_model=None)
    async def scheduler(self, request: Request) -> Response:
        """What each engine may verify, and why, and what became of the tiers' promises since this process began."""
        self._keys.check(request)
        if not self._config.is_scheduled:
            message = "nothing is scheduled here: there is no drafter, or how much is verified is fixed"
            raise HttpError(404, message, "invalid_request_error", "not_scheduled")
        try:
            async with asyncio.timeout(HUB_TIMEOUT_SECONDS):
                account: FleetAccount = await self._fleet.explain.remote()
        except (ValueError, RayError, RayServeException, TimeoutError):
            message = "the fleet's scheduler doesn't answer now; engines decide for themselves"
            raise HttpError(503, message, "server_error", "scheduler_unavailable") from None
        kept = {tier: self._metrics.promises_kept(tier) for tier in self._tier_names}
        attainment = [{"tier": tier, "num_kept": good, "num_judged": of} for tier, (good, of) in kept.items()]
        return JSONResponse(asdict(account) | {"attainment": attainment})

    @app.get("/health", response_model=None)
    async def health(self) -> Response:
        """200 while some engine takes requests and gets on with them, else 503."""
        try:
            async with asyncio.timeout(HUB_TIMEOUT_SECONDS):
                ready: bool = await self._hub.any_ready.remote()
        except (RayError, RayServeException, TimeoutError):
            ready = False
        return JSONResponse({"status": "ok" if ready else "no engine is ready"}, 200 if ready else 503)

    @app.get("/metrics", response_model=None)
    async def metrics(self) -> Response:
        """The metrics of every process, for one scrape."""
        try:
            async with asyncio.timeout(HUB_TIMEOUT_SECONDS):
                return Response(await self._hub.exposition.remote(), media_type=CONTENT_TYPE)
        except (RayError, RayServeException, TimeoutError) as error:
            return error_response(error)

    async def _parse(self, request: Request, schema: type[BodyT]) -> tuple[BodyT, int]:
        """The body, and the place of its tier."""
        self._keys.check(request)
        body = parse_body(await self._read(request), schema)
        self._check_model(body.model)
        headers = request.headers.getlist(TIER_HEADER)  # HTTP: lines of one name are one list; no tier is named so
        header = ", ".join(headers) if headers else None
        return body, tier_of(body, header, self._tier_names, self._config.default_tier)

    async def _read(self, request: Request) -> bytes:
        limit = self._config.http_config.max_body_bytes
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > limit:
                raise HttpError(
                    413, f"the request body exceeds {limit} bytes", "invalid_request_error", "body_too_large"
                )
        return bytes(data)

    async def _answer(
        self, body: Body, prompts: list[tuple[int, ...]], tier: int, prefix: str, arrived_at: float
    ) -> Response:
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        choices = to_choices(body, prompts, self._limits, request_id, tier)
        streams = Streams([self._stream(choice, arrived_at) for choice in choices])
        generation = Generation(
            streams,
            choices,
            Writer(body, request_id, int(time.time()), self._tokenizer),
            self._tokenizer,
            self._metrics,
            tier=self._config.tiers[tier].promise,
            num_prompt_tokens=sum(len(prompt) for prompt in prompts),
            arrived_at=arrived_at,
        )
        try:
            if not body.stream:
                return JSONResponse(await generation.whole())
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            events = generation.events(include_usage, lambda error: describe(error)[1])
            await anext(events)  # raises what refuses the request, while there still is a status line to say so
        except Exception as error:  # whatever it was, the client is told in OpenAI's shape
            status, answer, headers = describe(error)
            if not streams.is_open and (code := answer["error"]["code"]) in get_args(ShedReason):
                self._metrics.observe_shed(self._tier_names[tier], code)
            return JSONResponse(answer, status, headers)
        return StreamingResponse(
            _closing(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    def _stream(self, choice: Choice, arrived_at: float) -> MigratingStream:
        tier = self._config.tiers[choice.request.tier]

        def send(request: EngineRequest, migrates: bool) -> ReplicaStream:
            report = functools.partial(self._metrics.observe_admission, tier.name)
            ticket = Ticket(request, tier, arrived_at + tier.longest_wait_seconds, migrates, report)
            return ReplicaStream(self._replicas.generate.remote(request, ticket=ticket), ticket)

        return MigratingStream(
            choice.request,
            send,
            self._config.http_config.submit_timeout_s,
            self._config.http_config.migration_timeout_s,
            self._metrics.observe_migration,
        )

    def _check_model(self, model_id: str) -> None:
        if model_id != self._config.model_id:
            message = f"the model {model_id!r} does not exist; this server has {self._config.model_id!r}"
            raise HttpError(404, message, "invalid_request_error", "model_not_found", "model")

    def _model(self) -> Json:
        return {
            "id": self._config.model_id,
            "object": "model",
            "created": self._started_at,
            "owned_by": "dspark",
            "max_model_len": self._limits.max_model_len,
        }

    async def _push_metrics(self) -> None:
        while True:
            context = serve.get_replica_context()  # Serve deals the ranks anew, so a rank names us only for now
            exposition = Exposition(f"ingress-{context.rank.rank}", 0, self._metrics.text())
            self._hub.push.remote(exposition, source=context.replica_id.unique_id)
            await asyncio.sleep(PUSH_PERIOD_SECONDS)
