"""`make observe`: a Prometheus that ends with it, and a word where there is none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ops import prometheus
from ops.benchmarks.report import ROOT


def observe(folder: Path, listen: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "ops.observe", "--listen", listen, "--folder", str(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_without_prometheus_it_says_how_to_get_it(tmp_path: Path) -> None:
    process = observe(tmp_path, free_address(), PATH="/nowhere")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and "apt-get install prometheus" in errors


def test_a_taken_address_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = observe(tmp_path, f"127.0.0.1:{taken.getsockname()[1]}")
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and "is in use" in errors


@pytest.mark.skipif(not prometheus.installed(), reason=prometheus.INSTALL)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_prometheus_knows_the_rules_and_ends_with_it(tmp_path: Path, how: signal.Signals) -> None:
    listen = free_address()
    process = observe(tmp_path, listen)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Ctrl-C ends it"):
                break
        server = prometheus.Prometheus(f"http://{listen}")
        assert any(rule["name"] == "DSparkEngineStuck" for rule in server.rules())
    finally:
        process.send_signal(how)
        process.communicate(timeout=300)
    assert process.returncode == 0
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{listen}/-/ready", timeout=5)
