"""A lockstep group with uneven traffic: what one budget for all its ranks gains over each rank's own.

    python -m ops.benchmarks.lockstep --prompts gsm8k.jsonl --loads 12 3 --json ops/results/lockstep.json

One group of real engines, as many replicas as there are loads, each with a closed loop of its own that never stops.
Windows alternate: in one the fleet's scheduler answers the ranks' reports, in the next they know of no scheduler and
each takes the budget that is best for itself. The beginning of each window, while leases come or end, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import ray
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from cluster.confidence_scheduler import ConfidenceScheduler
from cluster.config import EngineConfig
from cluster.group import Place, start_engine
from cluster.messages import Request, SamplingParams
from drafter.source import resolve_source
from ops.benchmarks import report
from ops.benchmarks.engines import end_token_ids, served_config
from ops.benchmarks.prompts import load_datasets

GROUP = "lockstep-benchmark"
MODES = ("each for itself", "central")
UNCOUNTED_SECONDS = 2.5
"""Longer than a lease lasts."""
NUM_RESAMPLES = 2000


@dataclass
class Window:
    """What was counted in one window."""

    mode: str
    seconds: float
    num_tokens: list[int] = field(default_factory=list)
    """By rank."""
    num_steps: int = 0
    num_verified: int = 0
    """Draft tokens that the ranks verified."""
    leased_share: float = 0.0
    """Of the steps."""

    @property
    def tokens_per_second(self) -> float:
        return sum(self.num_tokens) / self.seconds


class Traffic:
    """A closed loop on one rank's engine: always `load` requests, all tokens counted."""

    def __init__(
        self, engine: Any, rank: int, load: int, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
    ) -> None:
        self._engine = engine
        self._load = load
        self._sampling = sampling
        self._ids: Iterator[str] = (f"{rank}-{index}" for index in count())
        self._prompts = cycle(prompts[rank:] + prompts[:rank])
        self.num_tokens = 0

    async def run(self) -> None:
        for _ in range(self._load):
            await self._submit()
        while True:
            for event in await self._engine.next_events.remote():
                if event.error is not None:
                    raise RuntimeError(f"the engine gave request {event.request_id} up: {event.error}")
                self.num_tokens += len(event.token_ids)
                if event.finish_reason is not None:
                    await self._submit()

    async def _submit(self) -> None:
        prompt = next(self._prompts)
        await self._engine.submit.remote(
            Request(request_id=next(self._ids), prompt_token_ids=prompt, sampling=self._sampling)
        )


async def counters(engines: Sequence[Any]) -> dict[str, float]:
    """Sums over the ranks: steps, those by lease, verified drafts."""
    sums = {"steps": 0.0, "leased": 0.0, "verified": 0.0}
    for text in await asyncio.gather(*(engine.metrics_text.remote() for engine in engines)):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "dspark_steps_total":
                    sums["steps"] += sample.value
                    sums["leased"] += sample.value * (sample.labels["mode"] == "lease")
                elif sample.name == "dspark_budget_used_tokens_total":
                    sums["verified"] += sample.value
    return sums


async def measure_window(
    mode: str, scheduler: Any, engines: Sequence[Any], traffic: Sequence[Traffic], seconds: float
) -> Window:
    for rank, engine in enumerate(engines):
        await engine.advise.remote(scheduler if mode == "central" else None, str(rank))
    await asyncio.sleep(UNCOUNTED_SECONDS)
    before, tokens, began = await counters(engines), [each.num_tokens for each in traffic], time.perf_counter()
    await asyncio.sleep(seconds)
    window = Window(mode, time.perf_counter() - began)
    window.num_tokens = [each.num_tokens - past for each, past in zip(traffic, tokens, strict=True)]
    after = await counters(engines)
    window.num_steps = int(after["steps"] - before["steps"])
    window.num_verified = int(after["verified"] - before["verified"])
    window.leased_share = (after["leased"] - before["leased"]) / max(window.num_steps, 1)
    return window


async def measure(
    config: EngineConfig, loads: Sequence[int], prompts: Sequence[tuple[int, ...]], options: argparse.Namespace
) -> list[Window]:
    """`options.windows` of each mode in turn, under one and the same traffic."""
    engines = [start_engine(config, f"rank {rank}", Place(group=GROUP, dp_rank=rank)) for rank in range(len(loads))]
    await asyncio.gather(*(engine.ready.remote() for engine in engines))
    scheduler = ray.remote(ConfidenceScheduler).options(num_cpus=0).remote()
    sampling = SamplingParams(
        max_tokens=options.max_tokens, stop_token_ids=end_token_ids(resolve_source(config.model_source))
    )
    traffic = [
        Traffic(engine, rank, load, prompts, sampling)
        for rank, (engine, load) in enumerate(zip(engines, loads, strict=True))
    ]
    loops = [asyncio.create_task(each.run()) for each in traffic]
    windows = []
    try:
        for index in tqdm(range(2 * options.windows), unit="window"):
            windows.append(await measure_window(MODES[index % 2], scheduler, engines, traffic, options.seconds))
            for loop in loops:
                if loop.done():
                    loop.result()  # raises what ended it
    finally:
        for loop in loops:
            loop.cancel()
    return windows


def gain(windows: Sequence[Window], seed: int = 0) -> tuple[float, float, float]:
    """Central over each for itself: (ratio - 1, and its 95% bootstrap interval over pairs of neighbouring windows)."""
    own, central = (np.array([w.tokens_per_second for w in windows if w.mode == mode]) for mode in MODES)
    picks = np.random.default_rng(seed).integers(len(own), size=(NUM_RESAMPLES, len(own)))
    low, high = np.quantile(central[picks].sum(axis=1) / own[picks].sum(axis=1) - 1, [0.025, 0.975])
    return float(central.sum() / own.sum() - 1), float(low), float(high)


def summary(windows: Sequence[Window]) -> list[report.Row]:
    rows = []
    for mode in MODES:
        of_mode = [window for window in windows if window.mode == mode]
        seconds = sum(window.seconds for window in of_mode)
        num_steps = sum(window.num_steps for window in of_mode)
        rows.append(
            {
                "mode": mode,
                "tokens_per_second": sum(sum(w.num_tokens) for w in of_mode) / seconds,
                "tokens_per_second_by_rank": [
                    sum(counted) / seconds for counted in zip(*(w.num_tokens for w in of_mode), strict=True)
                ],
                "verified_per_step": sum(w.num_verified for w in of_mode) / num_steps,
                "step_seconds": len(of_mode[0].num_tokens) * seconds / num_steps,
                "leased_share": float(np.mean([w.leased_share for w in of_mode])),
                "seconds": seconds,
            }
        )
    return rows


def table(rows: Sequence[report.Row]) -> str:
    """Markdown."""
    header = ["budget", "tok/s", "by rank", "drafts verified per rank and step", "step ms", "steps by lease"]
    return report.table(
        header,
        [
            [
                row["mode"],
                f"{row['tokens_per_second']:.1f}",
                " / ".join(f"{rate:.1f}" for rate in row["tokens_per_second_by_rank"]),
                f"{row['verified_per_step']:.1f}",
                f"{row['step_seconds'] * 1e3:.1f}",
                f"{row['leased_share']:.0%}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("deployments/dspark_moe_cpu.yaml"))
    parser.add_argument("--prompts", type=Path, nargs="+", default=(), help="JSONL files, mixed in turn")
    parser.add_argument("--loads", type=int, nargs="+", default=[12, 3], help="requests in flight of each rank")
    parser.add_argument("--windows", type=int, default=8, help="of each kind")
    parser.add_argument("--seconds", type=float, default=12.0, help="counted of each window")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    if len(options.loads) < 2 or min(*options.loads, options.windows, options.max_tokens) < 1 or options.seconds <= 0:
        parser.error("--loads needs two numbers or more, and all numbers must be positive")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = served_config(options.config).model_copy(update={"data_parallel_size": len(options.loads)})
    datasets = load_datasets(options.prompts, resolve_source(config.model_source))
    prompts = [prompt for row in zip(*(dataset.prompts for dataset in datasets), strict=False) for prompt in row]
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        windows = asyncio.run(measure(config, options.loads, prompts, options))
    finally:
        ray.shutdown()
    rows, (ratio, low, high) = summary(windows), gain(windows)
    print(table(rows))
    print(f"\nCentral over each for itself: {ratio:+.1%} (95%: {low:+.1%} to {high:+.1%}) accepted tokens per second.")
    if options.json:
        results = {
            **report.provenance(),
            "model": config.model_source,
            "prompts": [dataset.name for dataset in datasets],
            "loads": options.loads,
            "max_tokens": options.max_tokens,
            "gain": ratio,
            "gain_interval": (low, high),
            "rows": rows,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
