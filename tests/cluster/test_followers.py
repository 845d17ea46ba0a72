"""An engine of two ranks behind a real Ray: same text, an honest death of either rank, and nothing left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from tiny_engine import dspark_drafter, greedy_truth, request
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import EngineConfig
from cluster.group import start_engine
from cluster.messages import EngineDeadError, TokenEvent
from drafter.checkpoint import save_checkpoint

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    paths = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "GLOO_SOCKET_IFNAME": "lo"}
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": paths}, log_to_driver=False)
    yield
    ray.shutdown()


def config(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {
        "model_source": str(folder),
        "tensor_parallel_size": 2,
        "collective_timeout_s": 15.0,
        "dtype": "float32",
        "num_threads": 1,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_block_size": 4,
        "num_kv_blocks": 256,
        "speculation": "fixed",
    }
    return EngineConfig(**{**defaults, **settings})


@pytest.fixture
def engine(cluster: None, tiny: tuple[Path, Any], tmp_path: Path) -> Iterator[Any]:
    save_checkpoint(dspark_drafter(tiny[1], 96), tmp_path, tiny[1].dtype)
    actor = start_engine(config(tiny[0], drafter_source=str(tmp_path)), "tiny")
    ray.get(actor.ready.remote())
    yield actor
    ray.kill(actor)


def processes(name: str) -> list[psutil.Process]:
    """The workers of this test run that hold such an actor; Ray names them so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith(f"ray::{name}"[:15]):  # the kernel keeps no more
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def eventually(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.2)


def collect(engine: Any, request_ids: set[str]) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {request_id: [] for request_id in request_ids}
    while not all(e and e[-1].finish_reason for e in events.values()):
        for event in ray.get(engine.next_events.remote(), timeout=120):
            events[event.request_id].append(event)
    return events


def test_two_ranks_say_what_one_says(engine: Any, tiny: tuple[Path, Any]) -> None:
    prompts = {f"r{i}": [i + 1, 5, 9] for i in range(6)}
    ray.get([engine.submit.remote(request(p, r, max_tokens=20)) for r, p in prompts.items()])
    events = collect(engine, set(prompts))
    for request_id, prompt in prompts.items():
        tokens = [token for event in events[request_id] for token in event.token_ids]
        assert tokens == greedy_truth(tiny[1], prompt, 20)
    assert len(processes("Follower")) == 1
    health = ray.get(engine.health.remote())
    assert (health.alive, health.num_running, health.num_free_kv_blocks) == (True, 0, 256)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
def test_a_lost_follower_ends_the_engine_with_its_name(engine: Any, how: signal.Signals) -> None:
    ray.get([engine.submit.remote(request([1, 2], f"r{i}", max_tokens=MAX_TOKENS)) for i in range(4)])
    [follower] = processes("Follower")
    follower.send_signal(how)
    for events in collect(engine, {f"r{i}" for i in range(4)}).values():
        assert events[-1].error is not None
        assert f"rank 1 of 2 {'died' if how is signal.SIGKILL else 'does not answer'}" in events[-1].error
    health = ray.get(engine.health.remote())
    assert not health.alive
    assert "rank 1 of 2" in health.reason
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        ray.get(engine.submit.remote(request([1], "later")))
    ray.kill(engine)
    eventually(lambda: not processes("Follower") and not processes("EngineActor"), "nothing is left")


def test_followers_end_with_their_leader(engine: Any) -> None:
    [leader], [follower] = processes("EngineActor"), processes("Follower")
    leader.kill()
    eventually(lambda: not follower.is_running(), "the follower is gone")
    eventually(lambda: not processes("Follower"), "no follower is left")


def test_an_idle_follower_that_dies_is_noticed(engine: Any) -> None:
    [follower] = processes("Follower")
    follower.kill()
    eventually(lambda: not ray.get(engine.health.remote()).alive, "the engine knows", 30)
    assert "rank 1 of 2 died" in ray.get(engine.health.remote()).reason


def test_a_model_that_cannot_be_divided_is_refused(cluster: None, tmp_path: Path) -> None:
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=95,
            hidden_size=36,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=128,
        )
    ).save_pretrained(tmp_path)
    actor = start_engine(config(tmp_path), "odd")
    with pytest.raises(EngineDeadError, match="can't be divided over 2 ranks"):
        ray.get(actor.ready.remote())
    ray.kill(actor)
    eventually(lambda: not processes("Follower"), "no follower is left")
