"""Processes of this test run, and waiting for what must come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil


def actor_processes(actor: str) -> list[psutil.Process]:
    """The living workers of this test run that hold such an actor; Ray names them so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith(f"ray::{actor}"[:15]):  # the kernel keeps no more
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def scheduler_processes(application: str) -> list[psutil.Process]:
    """Those of this application: Serve tells them its name. One that is being replaced may still be among them."""
    found = []
    for process in actor_processes("ConfidenceScheduler"):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if process.environ().get("RAY_SERVE_INTERNAL_DEPLOYMENT_APP_NAME") == application:
                found.append(process)
    return found


def eventually(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    """Wait for a state that must come, however slow the machine; `seconds` only bounds a failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.2)
