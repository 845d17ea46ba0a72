"""`serve run` takes the text that the CPU preset renders, and answers with it: proof without a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
import yaml

from ops.serve import address, port_is_taken
from tests.helm.render import CHART, one, values_of

pytestmark = pytest.mark.server

START_SECONDS = 600.0
"""Only bounds a failure: the first start measures the cost curve."""


def test_serve_run_with_the_rendered_text_answers() -> None:
    rendered = one("RayService", values_of("cpu"))["spec"]["serveConfigV2"]
    # Only this differs: bfloat16 is fifteen times as slow on CPUs that don't know it.
    assert rendered.count("dtype: bfloat16") == 1
    text = rendered.replace("dtype: bfloat16", "dtype: float32")
    config = yaml.safe_load(text)
    host, port = address(config)
    assert host == "0.0.0.0"
    if port_is_taken(host, port):
        pytest.skip(f"port {port}, which the preset names, is in use on this machine")
    # Not pytest's own folder: Ray puts sockets into it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="dspark-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "rendered.yaml"
        path.write_text(text)
        environment = {**os.environ, "RAY_ADDRESS": "local", "RAY_TMPDIR": folder}
        command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen(
                command,
                cwd=CHART.parents[1],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A shell starts background jobs with Ctrl-C ignored, which `serve run` would inherit.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            try:
                url = f"http://127.0.0.1:{port}"
                wait_until_healthy(server, url, Path(log.name))
                (model,) = httpx.get(f"{url}/v1/models").json()["data"]
                body = {"model": model["id"], "prompt": "1, 2, 3, 4,", "max_tokens": 8, "temperature": 0}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
                assert " 5" in answer["choices"][0]["text"]
            finally:
                server.send_signal(signal.SIGINT)
                try:
                    server.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    os.killpg(server.pid, signal.SIGKILL)
                    raise


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)
