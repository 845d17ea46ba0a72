"""A Ray cluster of two nodes on this machine, as a program: JSON lines in, one answer for each.

A process of its own, because the test session has a Ray of its own. Whatever it starts has its RAY_TMPDIR and can be
found by that, orphans included; everything ends with it. The first node has Serve's controller and proxy and stays.

    python two_nodes.py PORT
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.app import build

NODE: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False}
# A node whose processes are gone is noticed within some seconds; one that is only slow is not lost.
SYSTEM = {"health_check_period_ms": 1000, "health_check_failure_threshold": 4, "health_check_timeout_ms": 10000}


class TwoNodes:
    """Every public method is a command."""

    def __init__(self, port: int) -> None:
        head = {**NODE, "_system_config": SYSTEM}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False)
        self._second: Any = None
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def deploy(self, args: dict[str, Any]) -> None:
        """Returns at once: the application may wait for nodes."""
        serve.run_many([serve.RunTarget(build(args))], wait_for_applications_running=False)

    def delete(self) -> None:
        """The application."""
        serve.delete("default")

    def add_node(self) -> None:
        self._second = self._cluster.add_node(**NODE)

    def remove_node(self) -> None:
        """All processes of the second node are killed, as when its machine is lost."""
        self._cluster.remove_node(self._second, allow_graceful=False)

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def num_nodes_of_groups(self) -> list[int]:
        """Of each placement group that has found its place."""
        groups = ray.util.placement_group_table().values()
        return [len(set(group["bundles_to_node_id"].values())) for group in groups if group["state"] == "CREATED"]


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed must not look like an answer
    nodes = TwoNodes(int(sys.argv[1]))
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        os.write(answers, (json.dumps(getattr(nodes, command)(*arguments)) + "\n").encode())


if __name__ == "__main__":
    main()
