"""Real processes that act as the ranks of a mesh over gloo on 127.0.0.1: started once, given one job after another."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from cluster.config import ParallelConfig
from cluster.mesh import Mesh

Job = Callable[..., Any]
"""`job(mesh, *arguments)`, a function of a module; each rank's result comes back."""
TIMEOUT_SECONDS = 300.0
"""Generous: a rank that shares its core with others may be slow. What must end sooner says so."""


class JobError(Exception):
    """A rank's job raised; the message holds every rank's traceback."""


class Ranks:
    """A pool of processes; a job takes as many of them as its mesh has ranks."""

    def __init__(self, size: int) -> None:
        # From a server that has imported torch once, not once per rank.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "cluster.shard"])
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        for process in self._processes:
            process.start()

    def run(self, dp: int, tp: int, job: Job, *arguments: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
        """The results, by rank."""
        parallel = ParallelConfig(data_parallel_size=dp, tensor_parallel_size=tp)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        pipes = self._pipes[: dp * tp]
        for rank, pipe in enumerate(pipes):
            pipe.send((parallel, rank, address, timeout_seconds, job, arguments))
        answers = [pipe.recv() for pipe in pipes]
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failed:
            raise JobError("\n".join(failed))
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            process.kill()


def _serve(pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        parallel, rank, address, timeout_seconds, job, arguments = task
        try:
            mesh = Mesh.join(parallel, rank, init_method=address, timeout_seconds=timeout_seconds)
            try:
                pipe.send((True, job(mesh, *arguments)))
            finally:
                mesh.leave()
        except Exception:  # whatever it was: the parent raises it
            pipe.send((False, traceback.format_exc()))
