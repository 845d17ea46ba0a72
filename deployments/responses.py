"""Token events in, OpenAI's objects out: what is counted, timed and written, for streams and for whole answers.

Knows the shapes of responses; knows nothing of HTTP connections, and no clock (times are arguments).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.messages import FinishReason, RequestStats, SlaTier, TokenEvent
from deployments.attainment import Delivered, judge
from deployments.openai import Body, ChatRequest, Choice
from deployments.text_stream import Piece, ShownToken, TextStream
from deployments.tokenizer import Tokenizer

Json = dict[str, Any]


class Progress:
    """One choice on its way to the client."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        sampling = choice.request.sampling
        self.choice = choice
        self.stream = TextStream(tokenizer.text_bytes, choice.stop, sampling.min_tokens)
        self.finish_reason: FinishReason | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._num_rounds = 0
        self._num_round_tokens = 0
        self._stats: RequestStats | None = None

    @property
    def num_tokens(self) -> int:
        return self.stream.num_tokens

    def take(self, event: TokenEvent, now: float) -> Piece:
        """Count one step's tokens and return what of them can be delivered."""
        before = self.num_tokens
        piece = self._push(event)
        if self.num_tokens > before:
            self._time(now, self.num_tokens - before)
        self._stats = event.stats
        return piece

    def _push(self, event: TokenEvent) -> Piece:
        ended = event.finish_reason == "stop"
        piece = self.stream.push(event.token_ids[:-1] if ended else event.token_ids, event.logprobs)
        if self.stream.stopped:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            if ended:
                self.stream.push_end()
            rest = self.stream.finish()
            piece = Piece(piece.text + rest.text, piece.tokens + rest.tokens)
        return piece

    def _time(self, now: float, num_tokens: int) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        else:  # the first token is the prefill's own, not a verify round's
            self._num_rounds += 1
            self._num_round_tokens += num_tokens
        self.last_token_at = now

    def delivered(self, arrived_at: float, now: float) -> Delivered:
        """What it has got by `now`."""
        if self.first_token_at is None or self.last_token_at is None:
            return Delivered(0, now - arrived_at, 0.0)
        later_seconds = self.last_token_at - self.first_token_at
        return Delivered(self.num_tokens, self.first_token_at - arrived_at, later_seconds)

    def rounds(self) -> tuple[int, int]:
        """(verify rounds, tokens that they delivered): the engine's own count, or ours without one.

        There is none when a stop string cut it, or when more than one engine had the request.
        """
        if self._stats is not None:
            return self._stats.num_rounds, self._stats.num_rounds + self._stats.num_accepted
        return self._num_rounds, self._num_round_tokens


def dspark_stats(progress: Sequence[Progress], arrived_at: float, tier: SlaTier) -> Json:
    """What speculation and the queue did, over all choices of a finished request.

    accepted_length: tokens per verify round. tokens_per_second: all tokens over arrival to last token. ttft_ms: arrival
    to first token. tpot_ms: mean time per token after a choice's first. None where there is nothing to divide.
    tier_met: whether each choice got what the tier promises.
    """
    rounds, round_tokens = (sum(column) for column in zip(*(p.rounds() for p in progress), strict=True))
    started = [p for p in progress if p.first_token_at is not None and p.last_token_at is not None]
    first = min((p.first_token_at or 0.0 for p in started), default=arrived_at)
    last = max((p.last_token_at or 0.0 for p in started), default=arrived_at)
    later_seconds = sum((p.last_token_at or 0.0) - (p.first_token_at or 0.0) for p in started)
    num_later = sum(p.num_tokens - 1 for p in started)
    num_tokens = sum(p.num_tokens for p in started)
    return {
        "accepted_length": round(round_tokens / rounds, 4) if rounds else None,
        "tokens_per_second": round(num_tokens / (last - arrived_at), 2) if last > arrived_at else None,
        "ttft_ms": round(1000 * (first - arrived_at), 2) if started else None,
        "tpot_ms": round(1000 * later_seconds / num_later, 2) if num_later else None,
        "tier": tier.name,
        "tier_met": not any(judge(tier, p.delivered(arrived_at, last), "finished") for p in progress),
    }


class Writer:
    """Writes the objects of one HTTP request."""

    def __init__(self, body: Body, request_id: str, created: int, tokenizer: Tokenizer) -> None:
        """`body` decides the endpoint's shape; `created` is in seconds since the epoch."""
        self._chat = isinstance(body, ChatRequest)
        self._wants_logprobs = body.num_logprobs is not None
        self._tells_usage = body.stream_options is not None and body.stream_options.include_usage
        self._tokenizer = tokenizer
        self._head: Json = {"id": request_id, "created": created, "model": body.model}

    def whole(self, texts: Sequence[tuple[Progress, str, Sequence[ShownToken]]], usage: Json, dspark: Json) -> Json:
        """The answer of a request that doesn't stream. `texts`: each choice with all it delivered."""
        choices = []
        for progress, text, tokens in texts:
            content: Json = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(self._choice(progress, content, tokens))
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage, "dspark": dspark}

    def opening(self, progress: Progress) -> Json | None:
        """The first chunk of a choice: a chat tells its role."""
        if not self._chat:
            return None
        return self._chunk([self._choice(progress, {"delta": {"role": "assistant", "content": ""}}, ())])

    def chunk(self, progress: Progress, piece: Piece) -> Json | None:
        """What a step delivered; None when it is nothing yet."""
        if not (piece.text or piece.tokens or progress.finish_reason):
            return None
        delta = {"content": piece.text} if piece.text or not progress.finish_reason else {}
        content: Json = {"delta": delta} if self._chat else {"text": piece.text}
        return self._chunk([self._choice(progress, content, piece.tokens)])

    def closing(self, usage: Json) -> Json:
        """The chunk without a choice that carries the usage."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {"object": "chat.completion.chunk" if self._chat else "text_completion", "choices": choices}
        usage = {"usage": None} if self._tells_usage else {}  # OpenAI: null on every chunk but the last
        return {**self._head, **chunk, **usage}

    def _choice(self, progress: Progress, content: Json, tokens: Sequence[ShownToken]) -> Json:
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._chat_logprobs(tokens) if self._chat else self._completion_logprobs(tokens)
        head = {"index": progress.choice.index, **content}
        return {**head, "logprobs": logprobs, "finish_reason": progress.finish_reason}

    def _chat_logprobs(self, tokens: Sequence[ShownToken]) -> Json:
        content = []
        for token in tokens:
            assert token.logprobs is not None, "the engine was asked for logprobs"
            top = [self._named(token_id, logprob) for token_id, logprob in token.logprobs.top]
            content.append({**self._named(token.token_id, token.logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, tokens: Sequence[ShownToken]) -> Json:
        names, own, tops = [], [], []
        for token in tokens:
            assert token.logprobs is not None, "the engine was asked for logprobs"
            top: dict[str, float] = {}
            # OpenAI: the sampled token is always among them. Ids with one name: the likeliest stays.
            for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
                top.setdefault(self._name(token_id), _finite(logprob))
            names.append(self._name(token.token_id))
            own.append(_finite(token.logprobs.logprob))
            tops.append(top)
        offsets = [token.offset for token in tokens]
        return {"tokens": names, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}

    def _named(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.name_bytes(token_id)
        return {"token": self._name(token_id), "logprob": _finite(logprob), "bytes": list(data)}

    def _name(self, token_id: int) -> str:
        return self._tokenizer.name_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that could not be."""
    return max(logprob, -9999.0)


def usage_of(progress: Sequence[Progress], num_prompt_tokens: int) -> Json:
    """Tokens in and out. A prompt counts once, whatever `n`."""
    num_tokens = sum(p.num_tokens for p in progress)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def sse(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
