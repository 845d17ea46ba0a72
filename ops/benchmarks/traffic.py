"""Mixed traffic against a running server, so that there is something to see.

    python -m ops.benchmarks.traffic --prompts eval_gsm8k.jsonl eval_mt_bench.jsonl --minutes 6

A closed loop of clients whose number rises and falls. Every SLA tier, greedy and sampled, with and without a seed,
streams that are left early, several choices, and now and then a request that is refused. Tells what became of them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from ops.benchmarks.prompts import BUILT_IN, read_texts

LEVELS = (0.1, 0.3, 0.6, 1.0, 0.6, 0.2)
"""Share of the clients that are there, in each part of the time."""
SYSTEM = "You are a helpful assistant who answers briefly and to the point, step by step where that helps."
"""Common to many prompts, so that the prefix cache has something to find."""
MISTAKE_EVERY = 25
Body = dict[str, Any]


class Traffic:
    """Clients in threads. `outcomes` counts how their requests ended."""

    def __init__(self, url: str, model: str, tiers: list[str], prompts: list[str], most_clients: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url, self._model, self._tiers, self._prompts = url, model, tiers, prompts
        self._numbers, self._lock = count(), threading.Lock()
        self._wanted, self._most = 0, most_clients

    def run(self, seconds: float) -> None:
        """All levels, one after the other; returns when the last request has ended."""
        threads = [threading.Thread(target=self._client, args=(place,)) for place in range(self._most)]
        self._wanted = max(1, round(LEVELS[0] * self._most))
        for thread in threads:
            thread.start()
        for level in LEVELS:
            self._wanted = max(1, round(level * self._most))
            time.sleep(seconds / len(LEVELS))
        self._wanted = -1
        for thread in threads:
            thread.join()

    def _client(self, place: int) -> None:
        while self._wanted >= 0:
            if place >= self._wanted:
                time.sleep(0.2)
                continue
            with self._lock:
                number = next(self._numbers)
            outcome = self._ask(number, body_of(number, self._model, self._tiers, self._prompts))
            with self._lock:
                self.outcomes[outcome] += 1
            if outcome.startswith("refused"):
                time.sleep(1.0)  # a well-behaved client does not hammer a full server

    def _ask(self, number: int, body: Body) -> str:
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        last = b""
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                for lines, line in enumerate(response):
                    if body["stream"] and number % 10 == 1 and lines > 20:
                        return "left"
                    last = line.strip() or last
        except urllib.error.HTTPError as error:
            return f"refused: {error.code}"
        except (OSError, http.client.HTTPException) as error:
            return f"lost: {type(error).__name__}"
        return "answered" if not body["stream"] or last == b"data: [DONE]" else "failed"


def body_of(number: int, model: str, tiers: list[str], prompts: list[str]) -> Body:
    """The same number is always the same request."""
    dice = random.Random(number)
    messages = [{"role": "user", "content": prompts[number % len(prompts)]}]
    body: Body = {
        "model": model,
        "messages": [{"role": "system", "content": SYSTEM}] * (number % 2) + messages,
        "max_tokens": dice.choice((32, 64, 96, 160)),
        "temperature": dice.choice((0.0, 0.7, 1.0)),
        "stream": number % 3 != 0,
        "dspark": {"tier": dice.choice(tiers)},
    }
    if number % 4 == 0:
        body["seed"] = number
    if number % 11 == 0:
        body["n"] = 2
    if number % MISTAKE_EVERY == MISTAKE_EVERY - 1:
        body["temperature"] = -1.0  # refused with 400
    return body


def told(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=60) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the application answers")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[BUILT_IN], help="JSONL files")
    parser.add_argument("--tiers", nargs="+", default=["default"], help="SLA tiers to ask for, by name")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=24, help="at the highest level")
    options = parser.parse_args()
    prompts = [text for file in options.prompts for text in read_texts(file)]
    random.Random(0).shuffle(prompts)
    model = told(options.url, "/v1/models")["data"][0]["id"]
    traffic = Traffic(options.url, model, options.tiers, prompts, options.clients)
    traffic.run(options.minutes * 60)
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(traffic.outcomes.items())))


if __name__ == "__main__":
    main()
