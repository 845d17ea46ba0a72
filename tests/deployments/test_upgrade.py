"""An upgrade in place: metrics go on under the names that they had."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import Server, application, eventually
from ray import serve
from tiny_models import model_args, tiny_llama

from deployments.app import build

pytestmark = pytest.mark.server

NAME = "upgraded"
GRACE_SECONDS = 20.0
"""Longer than a new ingress takes to start."""


def request_without_end(server: Server) -> socket.socket:
    """It keeps its ingress from stopping for as long as there is grace."""
    url = urlsplit(server.url)
    held = socket.create_connection((url.hostname or "", url.port or 0))
    held.sendall(f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\n".encode())
    return held


def test_the_new_ingress_is_called_as_the_old_one_was(serve_port: int, model_folder: Path, tmp_path: Path) -> None:
    """While both are there, Serve has another number for the new one."""
    settings = {
        **model_args(tiny_llama(tmp_path, model_folder), "tiny", num_speculative_tokens=0),
        "deployment_config": {"graceful_shutdown_timeout_s": GRACE_SECONDS},
    }
    with application(serve_port, NAME, f"/{NAME}", settings) as running, request_without_end(running):
        changed = {**settings, "http_config": {"max_body_bytes": 2048}}
        serve.run(build(changed), name=NAME, route_prefix=f"/{NAME}")
        eventually(running.healthy, "the new engine is ready")
        answer = running.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        eventually(lambda: running.metric("dspark_requests_total", replica="ingress-0") == 1, "it was counted there")
