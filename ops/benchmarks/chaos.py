"""What the death of the fleet's scheduler costs: throughput with it, without it, and with it killed every second.

    python -m ops.benchmarks.chaos --config deployments/dspark_cpu.yaml --json ops/results/chaos.json

The real application under a closed loop of streams, in stretches of a minute, in rotating order:

    lease     the scheduler lives
    local     it is stopped (SIGSTOP), so that engines decide for themselves
    killed    its process is killed every second, and Serve makes another

Tokens are counted by the engines. A request that fails is reported and makes the command fail.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deployments.app import build
from ops.benchmarks import report
from ops.benchmarks.prompts import BUILT_IN, read_texts

CONDITIONS = ("lease", "local", "killed")
KILL_EVERY_SECONDS = 1.0
SETTLE_SECONDS = 15.0
"""Between two stretches, under load: Serve looks after its actors every ten seconds."""
SCHEDULER = "ray::ConfidenceScheduler"[:15]
"""What the kernel keeps of the process's name."""


class Load:
    """Threads that ask one streaming request after another."""

    def __init__(self, url: str, model: str, concurrency: int, max_tokens: int) -> None:
        self.failures: list[str] = []
        self.num_finished = 0
        self._url, self._model, self._max_tokens = url, model, max_tokens
        self._prompts = cycle(read_texts(BUILT_IN))
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(concurrency)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                prompt = next(self._prompts)
            error = self._ask(prompt)
            with self._lock:
                self.num_finished += not error
                self.failures += [error] if error else []

    def _ask(self, prompt: str) -> str:
        """ "" or what went wrong."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        return "" if text.endswith("data: [DONE]\n\n") else text[-300:]  # an error takes its place


def counters(url: str) -> dict[str, float]:
    """Tokens so far, and steps by mode, over all engines."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == "dspark_generated_tokens_total":
                found["tokens"] = found.get("tokens", 0.0) + sample.value
            elif sample.name == "dspark_steps_total":
                mode = sample.labels["mode"]
                found[mode] = found.get(mode, 0.0) + sample.value
    return found


def schedulers() -> list[psutil.Process]:
    """The living processes of the scheduler."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith(SCHEDULER) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def condition(name: str) -> Iterator[list[int]]:
    """The trouble, while it is needed; the list grows by a 1 for each kill."""
    kills: list[int] = []
    stopped = schedulers() if name == "local" else []
    done = threading.Event()

    def kill() -> None:
        while not done.wait(KILL_EVERY_SECONDS):
            for process in schedulers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
                    kills.append(1)

    killer = threading.Thread(target=kill, daemon=True)
    for process in stopped:
        process.suspend()
    if name == "killed":
        killer.start()
    try:
        yield kills
    finally:
        done.set()
        if name == "killed":
            killer.join()
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def stretch(url: str, name: str, seconds: float, load: Load) -> dict[str, Any]:
    """One measurement."""
    deadline = time.monotonic() + 120
    while not schedulers() and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(SETTLE_SECONDS)
    with condition(name) as kills:
        time.sleep(3)  # leases that were made before have ended
        failed, before, began = len(load.failures), counters(url), time.monotonic()
        time.sleep(seconds)
        after, took = counters(url), time.monotonic() - began
    steps = {mode: after[mode] - before.get(mode, 0.0) for mode in after if mode != "tokens"}
    total = max(sum(steps.values()), 1.0)
    return {
        "condition": name,
        "tokens_per_second": (after["tokens"] - before["tokens"]) / took,
        "modes": {mode: round(count / total, 4) for mode, count in steps.items() if count},
        "kills": len(kills),
        "failures": load.failures[failed:],
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each condition; `over_local` compares within each round, where the machine was the same."""
    rounds = [rows[i : i + len(CONDITIONS)] for i in range(0, len(rows), len(CONDITIONS))]
    lines = []
    for name in CONDITIONS:
        own = [row for row in rows if row["condition"] == name]
        ratios = [
            next(row["tokens_per_second"] for row in each if row["condition"] == name)
            / next(row["tokens_per_second"] for row in each if row["condition"] == "local")
            for each in rounds
        ]
        lines.append(
            {
                "condition": name,
                "tokens_per_second": sum(row["tokens_per_second"] for row in own) / len(own),
                "over_local": sum(ratios) / len(ratios),
                "over_local_range": [min(ratios), max(ratios)],
                "lease_steps": sum(row["modes"].get("lease", 0.0) for row in own) / len(own),
                "kills": sum(row["kills"] for row in own),
                "failures": sum(len(row["failures"]) for row in own),
            }
        )
    return lines


@contextlib.contextmanager
def served(args: dict[str, Any]) -> Iterator[str]:
    """A Ray of its own with the application; its URL, when an engine is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="dspark-", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build(args), name="chaos", route_prefix="/")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=report.ROOT / "deployments" / "dspark_cpu.yaml")
    parser.add_argument("--num-threads", type=int, help="of the engine; fewer than cores leave the scheduler one")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at once, over all replicas")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="of one stretch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the results go")
    options = parser.parse_args()
    args = yaml.safe_load(options.config.read_text())["applications"][0]["args"]
    if options.num_threads is not None:
        args.setdefault("engine_kwargs", {})["num_threads"] = options.num_threads
    rows: list[dict[str, Any]] = []
    model = args["model_loading_config"]["model_id"]
    with served(args) as url, Load(url, model, options.concurrency, options.max_tokens) as load:
        for number in range(options.rounds):
            turn = number % len(CONDITIONS)
            for name in CONDITIONS[turn:] + CONDITIONS[:turn]:
                rows.append(stretch(url, name, options.seconds, load))
                print(json.dumps(rows[-1]), flush=True)
    lines = summary(rows)
    print(table(lines))
    print(f"{load.num_finished} requests finished, {len(load.failures)} failed")
    if options.json:
        result = {**report.provenance(), "requests": load.num_finished, "failures": load.failures}
        options.json.write_text(json.dumps({**result, "conditions": lines, "stretches": rows}, indent=1))
    return 1 if load.failures else 0


def table(lines: list[dict[str, Any]]) -> str:
    return report.table(
        ["scheduler", "tok/s", "over local", "steps by lease", "kills", "failed"],
        [
            [
                line["condition"],
                f"{line['tokens_per_second']:.1f}",
                f"{line['over_local']:.3f}x ({line['over_local_range'][0]:.3f}-{line['over_local_range'][1]:.3f})",
                f"{line['lease_steps']:.1%}",
                str(line["kills"]),
                str(line["failures"]),
            ]
            for line in lines
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
