"""One HTTP request on its way: the replicas' streams of its choices, merged, counted, and written whole or as events.

Knows asyncio and nothing of HTTP, Ray or Serve. However it ends, every sequence that still runs is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from cluster.messages import InvalidRequestError, SlaTier, TokenEvent
from cluster.metrics import ServiceMetrics
from deployments.attainment import Ended, judge
from deployments.migration import MigratingStream
from deployments.openai import Choice
from deployments.responses import Json, Progress, Writer, dspark_stats, sse, usage_of
from deployments.text_stream import Piece, ShownToken
from deployments.tokenizer import Tokenizer


class Streams:
    """Several streams as one."""

    def __init__(self, streams: Sequence[MigratingStream]) -> None:
        self._streams = streams
        self._arrivals: asyncio.Queue[tuple[int, TokenEvent | Exception]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.is_open = False

    async def open(self) -> None:
        """Returns when engines have taken every request. Raises whatever one was refused with; TimeoutError."""
        loop = asyncio.get_running_loop()
        opened: list[asyncio.Future[None]] = [loop.create_future() for _ in self._streams]
        self._tasks = [loop.create_task(self._run(i, opened[i])) for i in range(len(opened))]
        await asyncio.gather(*opened)
        self.is_open = True

    async def next(self) -> tuple[int, TokenEvent | Exception]:
        """(stream, its next event, or what ended it early), whichever comes first."""
        return await self._arrivals.get()

    def cancel(self, index: int) -> None:
        """No more of this stream: its sequence is aborted. No effect on one that has finished."""
        self._tasks[index].cancel()
        self._streams[index].cancel()

    def close(self) -> None:
        """No more of any."""
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            stream.cancel()

    async def _run(self, index: int, opened: asyncio.Future[None]) -> None:
        try:
            await self._streams[index].open()
            opened.set_result(None)
            await self._streams[index].forward(lambda event: self._arrivals.put_nowait((index, event)))
        except Exception as error:  # handed to the one who waits, and who knows whether it still matters
            if opened.done():
                self._arrivals.put_nowait((index, error))
            else:
                opened.set_exception(error)


class Generation:
    """Use `whole` or `events`, once."""

    def __init__(
        self,
        streams: Streams,
        choices: Sequence[Choice],
        writer: Writer,
        tokenizer: Tokenizer,
        metrics: ServiceMetrics,
        *,
        tier: SlaTier,
        num_prompt_tokens: int,
        arrived_at: float,
    ) -> None:
        """`arrived_at`: of time.monotonic()."""
        self._streams = streams
        self._progress = [Progress(choice, tokenizer) for choice in choices]
        self._writer = writer
        self._metrics = metrics
        self._tier = tier
        self._num_prompt_tokens = num_prompt_tokens
        self._arrived_at = arrived_at
        self._ended: Ended | None = "left"
        """How choices that have not finished end; None: what was asked is impossible, which breaks no promise."""

    async def whole(self) -> Json:
        """The finished answer."""
        texts: list[list[str]] = [[] for _ in self._progress]
        tokens: list[list[ShownToken]] = [[] for _ in self._progress]
        try:
            await self._streams.open()
            async for progress, piece in self._pieces():
                texts[progress.choice.index].append(piece.text)
                tokens[progress.choice.index] += piece.tokens
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._close()
        whole = [(p, "".join(texts[i]), tokens[i]) for i, p in enumerate(self._progress)]
        return self._writer.whole(whole, self._usage(), self._dspark())

    async def events(self, include_usage: bool, describe: Callable[[Exception], Json]) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, first an empty one when all is accepted (before it, errors are raised).

        Later errors become an event, made by `describe`, that ends the stream.
        """
        try:
            await self._streams.open()
            yield b""
            async for chunk in self._chunks(include_usage):
                yield sse(chunk)
            yield b"data: [DONE]\n\n"
        except Exception as error:  # the status line is gone: an event is the only way left to tell
            self._fail(error)
            if not self._streams.is_open:
                raise
            yield sse(describe(error))
        finally:
            self._close()

    async def _chunks(self, include_usage: bool) -> AsyncIterator[Json]:
        for progress in self._progress:
            if opening := self._writer.opening(progress):
                yield opening
        async for progress, piece in self._pieces():
            chunk = self._writer.chunk(progress, piece)
            if chunk is None:
                continue
            if self._all_finished and not include_usage:
                chunk["dspark"] = self._dspark()
            yield chunk
        if include_usage:
            yield {**self._writer.closing(self._usage()), "dspark": self._dspark()}

    async def _pieces(self) -> AsyncIterator[tuple[Progress, Piece]]:
        while not self._all_finished:
            index, item = await self._streams.next()
            progress = self._progress[index]
            if progress.finish_reason is not None:
                continue  # what came after a stop string
            if isinstance(item, Exception):
                raise item
            piece = progress.take(item, time.monotonic())
            if progress.finish_reason is not None:
                self._streams.cancel(index)
                self._observe(progress)
            yield progress, piece

    @property
    def _all_finished(self) -> bool:
        return all(progress.finish_reason is not None for progress in self._progress)

    def _fail(self, error: Exception) -> None:
        """The service's fault, unless what was asked is impossible: promises are broken, not given up by a client."""
        self._ended = None if isinstance(error, InvalidRequestError) else "failed"

    def _close(self) -> None:
        self._streams.close()
        for progress in self._progress:
            if progress.finish_reason is not None:
                continue
            if self._streams.is_open:
                progress.finish_reason = "abort"
                self._observe(progress)
            elif self._ended is not None:  # no engine had it yet: it is no request of theirs, but it was promised
                self._judge(progress, self._ended)

    def _observe(self, progress: Progress) -> None:
        first, seconds = progress.first_token_at, time.monotonic() - self._arrived_at
        ttft = None if first is None else first - self._arrived_at
        self._metrics.observe_request(progress.finish_reason or "abort", ttft, seconds, progress.num_tokens)
        self._judge(progress, (self._ended or "left") if progress.finish_reason == "abort" else "finished")

    def _judge(self, progress: Progress, ended: Ended) -> None:
        broken = judge(self._tier, progress.delivered(self._arrived_at, time.monotonic()), ended)
        if broken is not None:
            self._metrics.observe_sla(self._tier.name, broken)

    def _usage(self) -> Json:
        return usage_of(self._progress, self._num_prompt_tokens)

    def _dspark(self) -> Json:
        return dspark_stats(self._progress, self._arrived_at, self._tier)
