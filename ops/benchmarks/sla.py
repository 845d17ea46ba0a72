"""What promised speeds cost and keep on the real engine: mixed traffic, two tiers, policies side by side in one run.

    python -m ops.benchmarks.sla --prompts gsm8k.jsonl mt_bench.jsonl --json ops/results/sla.json

The closed loops of all policies take turns, step by step, on clocks that stand still meanwhile: what else the machine
does meets all alike. Every `STRICT_EVERY`th request is of the strict tier; the same ones under each policy, with the
same prompts. The promise is
a number of tokens per second, or the speed that scheduling without promises gives all but 15% of the requests at
--promise-at: so that the strict tier is in danger there, safe below and lost above.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.messages import Request, SamplingParams, SlaTier
from cluster.profiler import cost_curve
from cluster.shard import Shard
from drafter.interface import Drafter
from drafter.source import resolve_source
from ops.benchmarks import report
from ops.benchmarks.drive import Measurement, OwnClock, Progress, steps, turns
from ops.benchmarks.engines import TrafficBackend, served_config
from ops.benchmarks.prompts import load_datasets

Prompts = Sequence[tuple[int, ...]]

STRICT_EVERY = 4
PILOT_QUANTILE = 0.15
OWN = "no promises"
"""Scheduled by throughput alone."""
NUM_RESAMPLES = 2000


class TieredBackend(TrafficBackend):
    """An engine that takes every `STRICT_EVERY`th request into the second tier, and how fast each request was."""

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        super().__init__(engine, sampling)
        self.speeds: dict[str, float] = {}
        """By request: tokens after the first, over the time from the first to the last; those with two or more."""
        self.num_finished = 0
        self._flights: dict[str, tuple[float, int, float]] = {}

    def request(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> Request:
        return replace(super().request(request_id, prompt_token_ids), tier=int(is_strict(request_id)))

    def step(self) -> list[Progress]:
        progress = super().step()
        now = self._engine.clock()
        for item in progress:
            if item.num_tokens:
                first, num_tokens, _ = self._flights.get(item.request_id, (now, 0, now))
                self._flights[item.request_id] = first, num_tokens + item.num_tokens, now
            if item.finished:
                self.num_finished += 1
                first, num_tokens, last = self._flights.pop(item.request_id, (now, 0, now))
                if last > first:
                    self.speeds[item.request_id] = (num_tokens - 1) / (last - first)
        return progress


def is_strict(request_id: str) -> bool:
    return int(request_id) % STRICT_EVERY == 0


@dataclass
class Policy:
    """An engine with pages and a clock of its own."""

    engine: Engine
    clock: OwnClock


@dataclass
class Record:
    """What one policy did at one load."""

    measured: Measurement = field(default_factory=Measurement)
    strict_speeds: list[float] = field(default_factory=list)
    other_speeds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.measured.tokens_per_second

    def kept(self, promise: float) -> float:
        return float(np.mean(np.array(self.strict_speeds) >= promise))


def make_policies(
    config: EngineConfig, shard: Shard, promise: float, weights: Sequence[float], fixed_lengths: Sequence[int]
) -> dict[str, Policy]:
    """All that are compared, on one set of weights."""
    curve = cost_curve(config, shard)
    unpromised = (SlaTier("standard"), SlaTier("strict"))

    def policy(drafter: Drafter | None, tiers: tuple[SlaTier, ...], **update: Any) -> Policy:
        settings, clock = config.model_copy(update=update), OwnClock()
        own = Shard(shard.decoder, drafter, settings)
        scheduled = drafter is not None and settings.speculation == "scheduled"
        return Policy(Engine(settings, own, curve if scheduled else None, clock, tiers), clock)

    def fixed(length: int) -> Policy:
        return policy(shard.drafter, unpromised, speculation="fixed", num_speculative_tokens=length)

    def scheduled(tiers: tuple[SlaTier, ...]) -> Policy:
        return policy(shard.drafter, tiers, speculation="scheduled")

    return {
        "plain": policy(None, unpromised, num_speculative_tokens=0),
        **{f"fixed {length}": fixed(length) for length in fixed_lengths},
        OWN: scheduled(unpromised),
        **{f"weight {w:g}": scheduled((unpromised[0], SlaTier("strict", promise, weight=w))) for w in weights},
    }


def measure(policies: dict[str, Policy], sampling: SamplingParams, prompts: Prompts, concurrency: int) -> list[Record]:
    """All policies at one load, in their order."""
    backends = [TieredBackend(policy.engine, sampling) for policy in policies.values()]
    clocks = [policy.clock for policy in policies.values()]
    records = [Record() for _ in policies]
    loops = [
        steps(backend, prompts, concurrency, record.measured, clock)
        for backend, record, clock in zip(backends, records, clocks, strict=True)
    ]
    with tqdm(total=len(prompts) * len(loops), desc=f"{concurrency} requests", unit="request") as bar:
        for _ in turns(loops, clocks):
            bar.update(sum(backend.num_finished for backend in backends) - bar.n)
    for backend, record in zip(backends, records, strict=True):
        record.strict_speeds = [speed for name, speed in backend.speeds.items() if is_strict(name)]
        record.other_speeds = [speed for name, speed in backend.speeds.items() if not is_strict(name)]
    return records


def difference_interval(
    ours: Sequence[float], theirs: Sequence[float], statistic: Callable[[np.ndarray], float], seed: int = 0
) -> tuple[float, float]:
    """95% bootstrap interval of statistic(ours) - statistic(theirs), each resampled for itself."""
    generator = np.random.default_rng(seed)
    draws = [
        statistic(generator.choice(ours, len(ours))) - statistic(generator.choice(theirs, len(theirs)))
        for _ in range(NUM_RESAMPLES)
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def rows_of(concurrency: int, promise: float, records: dict[str, Record]) -> list[report.Row]:
    own = records[OWN]
    fixed = [name for name in records if name.startswith("fixed")]
    best_fixed = max(["plain", *fixed], key=lambda name: records[name].tokens_per_second)
    rows = []
    for name, record in records.items():
        low, high = difference_interval(
            record.strict_speeds, own.strict_speeds, lambda speeds: float(np.mean(speeds >= promise))
        )
        rows.append(
            {
                "concurrency": concurrency,
                "policy": name,
                "tokens_per_second": record.tokens_per_second,
                "over_no_promises": record.tokens_per_second / own.tokens_per_second - 1,
                "over_best_fixed": record.tokens_per_second / records[best_fixed].tokens_per_second - 1,
                "best_fixed": best_fixed,
                "kept": record.kept(promise),
                "kept_over_no_promises_interval": (low, high),
                "num_strict": len(record.strict_speeds),
                "strict_tokens_per_second": float(np.median(record.strict_speeds)),
                "other_tokens_per_second": float(np.median(record.other_speeds)),
            }
        )
    return rows


def recurring(prompts: Prompts, num_requests: int) -> Prompts:
    """So many; they recur after the last."""
    return list(islice(cycle(prompts), num_requests))


def run(options: argparse.Namespace) -> report.Row:
    config = served_config(options.config)
    torch.set_num_threads(config.num_threads)
    folder = resolve_source(config.model_source)
    datasets = load_datasets(options.prompts, folder)
    prompts = [prompt for row in zip(*(dataset.prompts for dataset in datasets), strict=False) for prompt in row]
    sampling = SamplingParams(max_tokens=options.max_tokens)
    shard = Shard.load(config)
    promise = options.promise or pilot(config, shard, sampling, prompts, options)
    policies = make_policies(config, shard, promise, options.weights, options.fixed)
    rows: list[report.Row] = []
    tqdm.write(f"promised: {promise:.1f} tokens per second")
    for concurrency in options.concurrency:
        records = measure(policies, sampling, recurring(prompts, options.num_requests), concurrency)
        rows += rows_of(concurrency, promise, dict(zip(policies, records, strict=True)))
        print(sla_table(rows[-len(policies) :]), flush=True)
    return {
        **report.provenance(),
        "model": config.model_source,
        "prompts": [dataset.name for dataset in datasets],
        "max_tokens": options.max_tokens,
        "strict_share": 1 / STRICT_EVERY,
        "promise_tokens_per_second": promise,
        "rows": rows,
    }


def pilot(
    config: EngineConfig, shard: Shard, sampling: SamplingParams, prompts: Prompts, options: argparse.Namespace
) -> float:
    """The speed that all but PILOT_QUANTILE of the requests have at one load without promises."""
    own = {OWN: make_policies(config, shard, 0.0, (), ())[OWN]}
    [record] = measure(own, sampling, recurring(prompts, options.num_requests), options.promise_at)
    return float(np.quantile([*record.strict_speeds, *record.other_speeds], PILOT_QUANTILE))


def sla_table(rows: Sequence[report.Row]) -> str:
    """Markdown, one line per load and policy."""
    header = ["requests", "policy", "tok/s", "over no promises", "over best fixed", "promise kept", "strict tok/s"]
    cells = [
        [
            str(row["concurrency"]),
            row["policy"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['over_no_promises']:+.1%}",
            f"{row['over_best_fixed']:+.1%}",
            f"{row['kept']:.1%} of {row['num_strict']}",
            f"{row['strict_tokens_per_second']:.1f}",
        ]
        for row in rows
    ]
    return report.table(
        [*header, "other tok/s"],
        [[*c, f"{r['other_tokens_per_second']:.1f}"] for c, r in zip(cells, rows, strict=True)],
    )


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("deployments/dspark_cpu.yaml"))
    parser.add_argument("--prompts", type=Path, nargs="+", default=(), help="JSONL files, mixed in turn")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 8, 16, 24, 32], help="requests in flight")
    parser.add_argument("--weights", type=float, nargs="+", default=[4.0, 16.0, 64.0], help="of the strict tier")
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 3, 5], help="lengths that don't adapt")
    parser.add_argument("--promise", type=float, help="tokens per second of the strict tier (default: by a pilot run)")
    parser.add_argument("--promise-at", type=int, default=16, help="load of the pilot run")
    parser.add_argument("--num-requests", type=int, default=128, help="of each policy and load")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens of a request, in the mean")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    if min(*options.concurrency, options.num_requests, options.max_tokens, options.promise_at) < 1:
        parser.error("--concurrency, --promise-at, --num-requests and --max-tokens must be at least 1")
    if options.promise is not None and options.promise <= 0:
        parser.error("--promise must be positive")
    if min(options.weights) < 1:
        parser.error("--weights must be at least 1")
    return options


def main() -> None:
    options = parse_options()
    results = run(options)
    print(f"\nPromised: {results['promise_tokens_per_second']:.1f} tokens per second.")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
