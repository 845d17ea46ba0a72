"""A gang of replicas in lockstep behind the real server. Ranks on several nodes are in test_nodes.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import Server, actor_processes, application, eventually
from disturbed import args, outlive, undisturbed
from tiny_models import TinyModel, tiny_mixtral

from deployments.app import build

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.server, pytest.mark.dist]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> TinyModel:
    return tiny_mixtral(tmp_path_factory.mktemp("mixtral"), model_folder)


@pytest.fixture(scope="module")
def gang(serve_port: int, mixtral: TinyModel) -> Iterator[Server]:
    """Two replicas in lockstep, which share the experts."""
    _OTHERS.update(engines())
    with application(serve_port, "gang", "/gang", args(mixtral, 0.25, data_parallel_size=2)) as running:
        yield running
    eventually(lambda: not engines(), "nothing is left of it")


_OTHERS: set[psutil.Process] = set()
"""Engines of other applications of the same test session."""


def engines() -> list[psutil.Process]:
    return [process for process in actor_processes("EngineActor") if process not in _OTHERS]


def test_missing_gpus_are_said_at_once(serve_port: int) -> None:
    (qwen,) = yaml.safe_load((ROOT / "deployments" / "dspark_qwen3_moe.yaml").read_text())["applications"]
    with pytest.raises(ValueError, match=r"needs 4 GPUs of type H100.* has 0.*dspark_moe_cpu\.yaml"):
        build(qwen["args"])


def test_a_gang_shares_the_experts_and_is_replaced_together(gang: Server, mixtral: TinyModel) -> None:
    expected = undisturbed(gang, mixtral)
    before = engines()
    assert len(before) == 2
    outlive(gang, expected, before[0].kill)
    eventually(lambda: len(engines()) == 2, "two replicas run again")
    assert not set(before).intersection(engines()), "lockstep: all or none"
    assert gang.metric("dspark_engines_lost_total") == 1, "and lost as one"
