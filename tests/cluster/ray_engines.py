"""Engines behind a real Ray: their settings, and what they emit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from cluster.config import EngineConfig
from cluster.messages import TokenEvent

ROOT = Path(__file__).parents[2]


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of its own, whose workers find the project and the tests' modules."""
    paths = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "GLOO_SOCKET_IFNAME": "lo"}
    ray.init(address="local", num_cpus=1, include_dashboard=False, runtime_env={"env_vars": paths}, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {
        "model_source": str(folder),
        "dtype": "float32",
        "num_threads": 1,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_waiting": 4,
        "max_num_batched_tokens": 64,
        "kv_block_size": 4,
        "num_kv_blocks": 256,
    }
    return EngineConfig(**{**defaults, **settings})


def collect(engine: Any, request_ids: set[str]) -> dict[str, list[TokenEvent]]:
    """Poll until all of them have ended."""
    events: dict[str, list[TokenEvent]] = {request_id: [] for request_id in request_ids}
    while not all(e and e[-1].finish_reason for e in events.values()):
        for event in ray.get(engine.next_events.remote(), timeout=120):
            events[event.request_id].append(event)
    return events
