"""Our engine, vLLM for CPU and Hugging Face's generate on the same model, dtype, prompts and concurrency.

    python -m ops.benchmarks.peers --prompts gsm8k.jsonl --concurrency 1 4 16 --json peers.json

One worker process per system; they take turns, batch by batch in rotating order, and whoever isn't measured is blocked
on its input. vLLM needs an environment of its own, made at the first run (`--systems` leaves it out).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafter.source import resolve_source
from ops.benchmarks import report, vllm_environment
from ops.benchmarks.drive import Measurement
from ops.benchmarks.engines import end_token_ids, served_config
from ops.benchmarks.prompts import load_datasets
from ops.benchmarks.speedup import Cell, make_cells
from ops.benchmarks.worker import SYSTEMS, Settings

VLLM_FOLDER = report.ROOT / ".venv-vllm"


class Worker:
    """A system in its own process."""

    def __init__(self, settings: Settings) -> None:
        python = vllm_environment.ensure(VLLM_FOLDER) if settings.system == "vllm" else Path(sys.executable)
        self._system = settings.system
        self._process = subprocess.Popen(
            [str(python), "-m", "ops.benchmarks.worker", json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=report.ROOT,
            env=vllm_environment.variables(settings.num_threads),
        )
        self._answer()  # ready

    def measure(self, prompts: Sequence[tuple[int, ...]], concurrency: int) -> Measurement:
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "concurrency": concurrency}), file=self._process.stdin, flush=True)
        return Measurement(**self._answer())

    def close(self) -> None:
        """End of input ends the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {self._system} ended (its own message is above)")
        return json.loads(line)  # type: ignore[no-any-return]


def measure_cell(cell: Cell, workers: dict[str, Worker], bar: Any) -> dict[str, Measurement]:
    totals = {system: Measurement() for system in workers}
    for index, batch in enumerate(cell.batches):
        order = list(workers)[index % len(workers) :] + list(workers)[: index % len(workers)]
        for system in order:
            bar.set_postfix_str(f"{cell.dataset.name} x{cell.concurrency} {system}")
            totals[system] += workers[system].measure(batch, cell.concurrency)
            bar.update()
    return totals


def rows_of(cell: Cell, totals: dict[str, Measurement]) -> list[report.Row]:
    vllm = totals["vllm"].tokens_per_second if "vllm" in totals else None
    return [
        {
            "system": system,
            "dataset": cell.dataset.name,
            "temperature": cell.temperature,
            "concurrency": cell.concurrency,
            "tokens_per_second": total.tokens_per_second,
            "tokens_per_second_per_user": total.tokens_per_second_per_user,
            "accepted_length": total.accepted_length,
            "over_vllm": total.tokens_per_second / vllm if vllm else None,
            "num_tokens": total.num_tokens,
            "seconds": total.seconds,
        }
        for system, total in totals.items()
    ]


def run(options: argparse.Namespace) -> report.Row:
    config = served_config(options.config)
    folder = resolve_source(config.model_source)
    datasets = load_datasets(options.prompts, folder)
    cells = make_cells(datasets, [options.temperature], options.concurrency, options.num_prompts)
    workers: dict[str, Worker] = {}
    rows = []
    try:
        for system in options.systems:
            settings = Settings(
                system=system,
                folder=str(folder),
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                stop_token_ids=end_token_ids(folder),
                num_threads=config.num_threads,
                config=str(options.config.resolve()),
            )
            workers[system] = Worker(settings)
            warm_up = datasets[0].take(0, 2 * max(options.concurrency))
            workers[system].measure(warm_up, max(options.concurrency))
        with tqdm(total=len(workers) * sum(len(cell.batches) for cell in cells), unit="batch") as bar:
            for cell in cells:
                rows += rows_of(cell, measure_cell(cell, workers, bar))
    finally:
        for worker in workers.values():
            worker.close()
    peers = {"vllm": vllm_environment.VLLM} if "vllm" in options.systems else {}
    return {**report.provenance(), "peers": peers, "max_tokens": options.max_tokens, "rows": rows}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("deployments/dspark_cpu.yaml"), help="our Serve file")
    parser.add_argument("--prompts", type=Path, nargs="+", default=(), help="JSONL files (default: a built-in set)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="requests in flight")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens of a request")
    parser.add_argument("--num-prompts", type=int, default=16, help="least prompts per data set and concurrency")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    results = run(options)
    print(report.peers_table(results["rows"]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
