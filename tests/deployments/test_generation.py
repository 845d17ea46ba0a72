"""What is counted of a request that no engine has taken yet."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cluster.messages import EngineDeadError, InvalidRequestError, Request, SamplingParams, SlaTier
from cluster.metrics import ServiceMetrics
from deployments.generation import Generation, Streams
from deployments.openai import Choice


class Closed:
    """A stream that no engine takes: for ever, or because of an error."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def open(self) -> None:
        if self._error is None:
            await asyncio.Event().wait()
        else:
            raise self._error

    def cancel(self) -> None:
        pass


class Words:
    text_bytes = None


async def counted(error: Exception | None, ttft_ms: float) -> dict[str, float]:
    """Promises broken, and all that were judged, when the client leaves after 20 ms."""
    metrics = ServiceMetrics(["quick"])
    choice = Choice(0, Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1)))
    generation = Generation(
        Streams(cast(Any, [Closed(error)])),
        [choice],
        cast(Any, None),
        cast(Any, Words()),
        metrics,
        tier=SlaTier("quick", ttft_ms=ttft_ms),
        num_prompt_tokens=1,
        arrived_at=asyncio.get_running_loop().time(),
    )
    asked = asyncio.create_task(generation.whole())
    await asyncio.sleep(0.02)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    lines = [line.split() for line in metrics.text().splitlines() if line.startswith("dspark_sla_")]
    return {name: float(value) for name, value in lines if "_total{" in name and float(value)}


@pytest.mark.parametrize(
    ("error", "ttft_ms", "broken"),
    [
        (None, 10.0, "ttft"),
        (None, 60_000.0, None),
        (EngineDeadError("gone"), 60_000.0, "answer"),
        (InvalidRequestError("n", "is wrong"), 1e-6, None),
    ],
    ids=str,
)
async def test_promises_are_judged_though_no_engine_had_it(
    error: Exception | None, ttft_ms: float, broken: str | None
) -> None:
    """An outage in which impatient clients leave is no clean record."""
    found = await counted(error, ttft_ms)
    assert len(found) == (2 if broken else 0), found
    assert all("dspark_sla_requests_total" in name or f'promise="{broken}"' in name for name in found)
