"""`make bench`: plain decoding, DSpark with its full block and DSpark scheduled, side by side in one run.

    python -m ops.benchmarks.speedup --prompts gsm8k.jsonl humaneval.jsonl --temperature 1 0 --json speedup.json

The three take turns, step by step, on clocks that stand still meanwhile: what else the machine does meets all three
alike. docs/benchmarks.md says what is counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.messages import SamplingParams
from drafter.source import resolve_source
from ops.benchmarks import machine, report
from ops.benchmarks.drive import Measurement, OwnClock, steps, turns
from ops.benchmarks.engines import MODES, Bench, EngineBackend, TrafficBackend, end_token_ids, served_config
from ops.benchmarks.prompts import Dataset, load_datasets

MIN_BATCHES = 3
"""The fewest batches that an interval is drawn from."""
NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Cell:
    """One point of the comparison."""

    dataset: Dataset
    temperature: float
    concurrency: int
    batches: tuple[tuple[tuple[int, ...], ...], ...]


def make_cells(
    datasets: Sequence[Dataset], temperatures: Sequence[float], concurrencies: Sequence[int], num_prompts: int
) -> list[Cell]:
    """Batches of one prompt at concurrency 1, and of three per place above it, so that places are refilled."""
    cells = []
    for dataset in datasets:
        for temperature in temperatures:
            for concurrency in concurrencies:
                size = 1 if concurrency == 1 else 3 * concurrency
                count = max(MIN_BATCHES, -(-num_prompts // size))
                batches = tuple(tuple(dataset.take(index * size, size)) for index in range(count))
                cells.append(Cell(dataset, temperature, concurrency, batches))
    return cells


def measure_cell(
    cell: Cell, engines: dict[str, Engine], sampling: SamplingParams, bar: Any
) -> dict[str, list[Measurement]]:
    measured: dict[str, list[Measurement]] = {mode: [Measurement() for _ in cell.batches] for mode in MODES}
    backend = EngineBackend if cell.concurrency == 1 else TrafficBackend
    for index, batch in enumerate(cell.batches):
        bar.set_postfix_str(f"{cell.dataset.name} x{cell.concurrency}")
        clocks = [OwnClock() for _ in MODES]
        loops = [
            steps(backend(engines[mode], sampling), batch, cell.concurrency, measured[mode][index], clock)
            for mode, clock in zip(MODES, clocks, strict=True)
        ]
        for _ in turns(loops, clocks):
            pass
        bar.update()
    return measured


def ratio_interval(ours: Sequence[Measurement], theirs: Sequence[Measurement], seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the ratio of tok/s, resampling batches; both sides keep their pairing."""
    sums = np.array([[a.num_tokens, a.seconds, b.num_tokens, b.seconds] for a, b in zip(ours, theirs, strict=True)])
    picks = np.random.default_rng(seed).integers(len(sums), size=(NUM_RESAMPLES, len(sums)))
    tokens, seconds, other_tokens, other_seconds = sums[picks].sum(axis=1).T
    low, high = np.quantile(tokens / seconds / (other_tokens / other_seconds), [0.025, 0.975])
    return float(low), float(high)


def rows_of(cell: Cell, measured: dict[str, list[Measurement]]) -> list[report.Row]:
    totals = {mode: sum(batches, Measurement()) for mode, batches in measured.items()}
    rows = []
    for mode, total in totals.items():
        rows.append(
            {
                "mode": mode,
                "dataset": cell.dataset.name,
                "temperature": cell.temperature,
                "concurrency": cell.concurrency,
                "tokens_per_second": total.tokens_per_second,
                "tokens_per_second_per_user": total.tokens_per_second_per_user,
                "accepted_length": total.accepted_length,
                "speedup": total.tokens_per_second / totals["plain"].tokens_per_second,
                "speedup_interval": ratio_interval(measured[mode], measured["plain"]),
                "num_batches": len(cell.batches),
                "num_tokens": total.num_tokens,
                "seconds": total.seconds,
            }
        )
    return rows


def memory_bandwidth_limit(config: EngineConfig, bench: Bench, step_seconds: float) -> report.Row:
    """How much of the machine's read bandwidth a step of one token turns into weights read."""
    bandwidth = machine.read_bytes_per_second()
    folder = resolve_source(config.model_source)
    size = machine.weight_bytes(folder, bench.decoder.config.tie_word_embeddings, bench.decoder.dtype.itemsize)
    return {
        "weight_bytes": size,
        "bytes_per_second": bandwidth,
        "step_seconds": step_seconds,
        "fraction": size / step_seconds / bandwidth,
    }


def run(options: argparse.Namespace) -> report.Row:
    config = served_config(options.config)
    torch.set_num_threads(config.num_threads)
    folder = resolve_source(config.model_source)
    cells = make_cells(
        load_datasets(options.prompts, folder), options.temperature, options.concurrency, options.num_prompts
    )
    bench = Bench.load(config)
    step_times = machine.step_seconds_by_tokens(bench.decoder, repeats=5 if options.quick else 25)
    limit = memory_bandwidth_limit(config, bench, step_times["1"])
    rows = []
    with tqdm(total=sum(len(cell.batches) for cell in cells), unit="batch") as bar:
        for cell in cells:
            sampling = SamplingParams(
                max_tokens=options.max_tokens, temperature=cell.temperature, stop_token_ids=end_token_ids(folder)
            )
            rows += rows_of(cell, measure_cell(cell, bench.engines, sampling, bar))
    return {
        **report.provenance(),
        "model": config.model_source,
        "drafter": config.drafter_source and Path(config.drafter_source).name,  # no folder of this machine
        "dtype": config.dtype,
        "max_tokens": options.max_tokens,
        "step_time_seconds_by_tokens": step_times,
        "memory_bandwidth_limit": limit,
        "rows": rows,
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, default=Path("deployments/dspark_cpu.yaml"), help="whose model and drafter"
    )
    parser.add_argument("--prompts", type=Path, nargs="+", default=(), help="JSONL files (default: a built-in set)")
    parser.add_argument("--concurrency", type=int, nargs="+", help="requests in flight (default: 1 2 4 8 16)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0], help="one or more (default: 1)")
    parser.add_argument("--max-tokens", type=int, help="new tokens of a request, in the mean (default: 128)")
    parser.add_argument("--num-prompts", type=int, help="least prompts per data set and concurrency (default: 16)")
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: concurrency 1 and 4, 24 tokens, few prompts"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    concurrency, max_tokens, num_prompts = ([1, 4], 24, 4) if options.quick else ([1, 2, 4, 8, 16], 128, 16)
    options.concurrency = options.concurrency or concurrency
    options.max_tokens = options.max_tokens or max_tokens
    options.num_prompts = options.num_prompts or num_prompts
    if min(*options.concurrency, options.max_tokens, options.num_prompts, 10**9) < 1:
        parser.error("--concurrency, --max-tokens and --num-prompts must be at least 1")
    return options


def main() -> None:
    options = parse_options()
    results = run(options)
    print(report.speedup_section(results))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
