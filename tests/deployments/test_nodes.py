"""Engines whose ranks lie on two nodes: what streams get when a rank dies, freezes, or loses its node.

Two raylets on this machine, and the real server in front of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from conftest import Server, eventually, free_port
from disturbed import Answer, args, nothing_is_left, outlive, streams, undisturbed
from tiny_models import TinyModel, tiny_llama, tiny_mixtral

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.server, pytest.mark.dist]


class Nodes:
    """The program two_nodes.py, all of whose processes have a folder of their own in their environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        port = free_port()
        self.server = Server(f"http://127.0.0.1:{port}")
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": self._folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        program = [sys.executable, str(Path(__file__).with_name("two_nodes.py")), str(port)]
        self._program = subprocess.Popen(
            program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def command(self, name: str, *arguments: Any) -> Any:
        """Its answer. Fails when the program has ended."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._program.stdin.flush()
        answer = self._program.stdout.readline()
        assert answer, f"the cluster ended during {name}"
        return json.loads(answer)

    def close(self) -> None:
        """The cluster ends, and nothing outlives it."""
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(60)
        try:
            eventually(lambda: not self.processes(), "no process is left", seconds=60)
        finally:
            for process in self.processes():
                process.kill()

    def processes(self, actor: str = "") -> list[psutil.Process]:
        """Its processes, or those of an actor: Ray names them so, and the kernel keeps 15 characters."""
        found = []
        for process in psutil.process_iter():
            try:
                named = not actor or process.name().startswith(f"ray::{actor}"[:15])
                if named and process.environ().get("RAY_TMPDIR") == self._folder:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def ranks(self) -> set[psutil.Process]:
        return {process for actor in ("EngineActor", "Follower") for process in self.processes(actor)}

    def wait_until_whole(self, num_leaders: int, num_followers: int, num_groups: int) -> None:
        """Just so many ranks run, in placement groups that span both nodes; none is left over from those lost."""
        eventually(
            lambda: (
                [len(self.processes(actor)) for actor in ("EngineActor", "Follower")] == [num_leaders, num_followers]
            ),
            f"{num_leaders} leaders and {num_followers} followers run",
        )
        eventually(lambda: num_engines(self.server) == num_leaders, "all engines have loaded their models")
        eventually(lambda: self.command("num_nodes_of_groups") == [2] * num_groups, "each group lies on two nodes")

    @contextmanager
    def application(self, args: dict[str, Any]) -> Iterator[Server]:
        """What speaks HTTP is to stay on the first node, so the second one comes when it is there."""
        self.command("deploy", args)
        eventually(lambda: answers(self.server), "the ingress answers")
        self.command("add_node")
        eventually(self.server.healthy, "the server is healthy")
        yield self.server
        self.command("delete")
        eventually(lambda: not self.ranks(), "no rank is left")
        self.command("remove_node")


def num_engines(server: Server) -> int:
    """Engines that say how they are, which they do once they are ready."""
    return httpx.get(f"{server.url}/metrics", timeout=30).text.count("\ndspark_requests_running{")


def answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/metrics", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # Ray puts sockets into it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="dspark-", ignore_cleanup_errors=True) as folder:
        running = Nodes(Path(folder))
        try:
            yield running
        finally:
            running.close()


def test_a_gang_that_finds_no_place_says_why_and_comes_back(
    nodes: Nodes, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two replicas in lockstep, each as large as a node."""
    mixtral = tiny_mixtral(tmp_path_factory.mktemp("mixtral"), model_folder)
    gang = {
        **args(mixtral, 2, data_parallel_size=2),
        "http_config": {"submit_timeout_s": 200, "migration_timeout_s": 5},
    }
    with nodes.application(gang) as server:
        nodes.wait_until_whole(2, 0, 1)
        before, expected = nodes.ranks(), undisturbed(server, mixtral)
        for end in asyncio.run(streams(server, lambda: nodes.command("remove_node"))):
            assert isinstance(end, openai.APIError)
            assert "no other engine took over within 5 s" in str(end)
        eventually(lambda: not before & nodes.ranks(), "no rank of theirs is left")
        assert not server.healthy()
        nodes.command("add_node")
        nodes.wait_until_whole(2, 0, 1)
        eventually(server.healthy, "the server is healthy again")
        assert asyncio.run(streams(server)) == expected
        nothing_is_left(server)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> TinyModel:
    return tiny_llama(tmp_path_factory.mktemp("llama"), model_folder)


@pytest.fixture(scope="module")
def pair(nodes: Nodes, llama: TinyModel) -> Iterator[Server]:
    """Two replicas, each with its two ranks on different nodes."""
    bundles = {"bundles": [{"CPU": 1}, {"CPU": 1}], "strategy": "STRICT_SPREAD"}
    with nodes.application({**args(llama, 1, tensor_parallel_size=2), "placement_group_config": bundles}) as server:
        nodes.wait_until_whole(2, 2, 2)
        yield server


@pytest.fixture(scope="module")
def expected(pair: Server, llama: TinyModel) -> list[Answer | BaseException]:
    return undisturbed(pair, llama)


@pytest.mark.parametrize(
    ("actor", "how"),
    [("EngineActor", signal.SIGKILL), ("Follower", signal.SIGSTOP)],
    ids=["leader killed", "follower frozen"],
)
def test_streams_outlive_a_rank(
    nodes: Nodes, pair: Server, expected: list[Answer | BaseException], actor: str, how: signal.Signals
) -> None:
    before = nodes.ranks()
    lost = nodes.processes(actor)[0]
    outlive(pair, expected, lambda: lost.send_signal(how))
    nodes.wait_until_whole(2, 2, 2)
    gone = before - nodes.ranks()
    assert lost in gone
    assert len(gone) == 2, "both ranks of one replica, and no other"


def test_streams_outlive_a_node_that_is_replaced(
    nodes: Nodes, pair: Server, expected: list[Answer | BaseException]
) -> None:
    before = nodes.ranks()

    def replace() -> None:
        nodes.command("remove_node")
        nodes.command("add_node")

    outlive(pair, expected, replace)
    nodes.wait_until_whole(2, 2, 2)
    assert not before & nodes.ranks(), "each replica had a rank there"
