"""A Prometheus server: how to start one here, and how to ask one. Knows its HTTP API and nothing of our metrics."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

INSTALL = (
    "Prometheus is not installed. On Debian or Ubuntu: apt-get install prometheus. Elsewhere: its release archive."
)
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Series:
    """Labels, and (unix time, value) in order."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server that can be asked."""

    url: str

    def query(self, expression: str) -> list[Series]:
        """The value now. Raises ValueError with the server's words when the expression is wrong."""
        answer = self._get("query", query=expression)
        if answer["resultType"] == "scalar":
            return [_series({}, [answer["result"]])]
        return [_series(found["metric"], [found["value"]]) for found in answer["result"]]

    def query_range(self, expression: str, start: float, end: float, step_seconds: float) -> list[Series]:
        """The values from `start` to `end`."""
        answer = self._get("query_range", query=expression, start=start, end=end, step=step_seconds)
        return [_series(found["metric"], found["values"]) for found in answer["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule that the server evaluates, with its state and last error."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _get(self, path: str, **parameters: object) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=60) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None


def _series(labels: dict[str, str], points: list[tuple[float, str]]) -> Series:
    return Series(labels, tuple((float(at), float(value)) for at, value in points))


def installed() -> bool:
    return shutil.which("prometheus") is not None


def configuration(target: str, rules: Path, scrape_seconds: float) -> dict[str, Any]:
    """Scrape `target` (host:port, and the path below which the application answers) and evaluate `rules`."""
    interval = f"{scrape_seconds:g}s"
    address, slash, prefix = target.partition("/")
    scrape = {"job_name": "dspark", "metrics_path": f"{slash}{prefix}/metrics"}
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules)],
        "scrape_configs": [{**scrape, "static_configs": [{"targets": [address]}]}],
    }


@contextlib.contextmanager
def running(folder: Path, listen: str, config: dict[str, Any]) -> Iterator[Prometheus]:
    """A server of our own on `listen` (host:port), its data and log in `folder`; ended on the way out.

    Raises FileNotFoundError when Prometheus is not installed, RuntimeError when it does not start.
    """
    if not installed():
        raise FileNotFoundError(INSTALL)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    command = [
        "prometheus",
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={listen}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = Prometheus(f"http://{listen}")
            deadline = time.monotonic() + START_SECONDS
            while not server.ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Prometheus did not start; its log is {log.name}")
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            process.wait()
