"""An engine of two ranks behind a real Ray: same text, an honest death of either rank, and nothing left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from processes import actor_processes, eventually
from ray_engines import collect, local_ray, make_config
from tiny_engine import dspark_drafter, greedy_truth, request
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import EngineConfig
from cluster.group import start_engine
from cluster.messages import EngineDeadError
from drafter.checkpoint import save_checkpoint

pytestmark = pytest.mark.dist

MAX_TOKENS = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


def config(folder: Path, **settings: Any) -> EngineConfig:
    return make_config(folder, tensor_parallel_size=2, collective_timeout_s=15.0, speculation="fixed", **settings)


@pytest.fixture
def engine(cluster: None, tiny: tuple[Path, Any], tmp_path: Path) -> Iterator[Any]:
    save_checkpoint(dspark_drafter(tiny[1], 96), tmp_path, tiny[1].dtype)
    actor = start_engine(config(tiny[0], drafter_source=str(tmp_path)), "tiny")
    ray.get(actor.ready.remote())
    yield actor
    ray.kill(actor)
    eventually(lambda: not actor_processes("Follower"), "the next test finds nobody else's ranks")


def test_two_ranks_say_what_one_says(engine: Any, tiny: tuple[Path, Any]) -> None:
    prompts = {f"r{i}": [i + 1, 5, 9] for i in range(6)}
    ray.get([engine.submit.remote(request(p, r, max_tokens=20)) for r, p in prompts.items()])
    events = collect(engine, set(prompts))
    for request_id, prompt in prompts.items():
        tokens = [token for event in events[request_id] for token in event.token_ids]
        assert tokens == greedy_truth(tiny[1], prompt, 20)
    assert len(actor_processes("Follower")) == 1
    health = ray.get(engine.health.remote())
    assert (health.alive, health.num_running, health.num_free_kv_blocks) == (True, 0, 256)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
def test_a_lost_follower_ends_the_engine_with_its_name(engine: Any, how: signal.Signals) -> None:
    ray.get([engine.submit.remote(request([1, 2], f"r{i}", max_tokens=MAX_TOKENS)) for i in range(4)])
    [follower] = actor_processes("Follower")
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
    eventually(lambda: not actor_processes("Follower") and not actor_processes("EngineActor"), "nothing is left")


def test_followers_end_with_their_leader(engine: Any) -> None:
    [leader], [follower] = actor_processes("EngineActor"), actor_processes("Follower")
    leader.kill()
    eventually(lambda: not follower.is_running(), "the follower is gone")
    eventually(lambda: not actor_processes("Follower"), "no follower is left")


def test_an_idle_follower_that_dies_is_noticed(engine: Any) -> None:
    [follower] = actor_processes("Follower")
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
    eventually(lambda: not actor_processes("Follower"), "no follower is left")
