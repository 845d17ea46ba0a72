"""`make serve`: fetch the model where progress can be seen, start `serve run`, and say when the first request can go.

python -m ops.serve deployments/dspark_cpu.yaml
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from deployments.config import parse_config
from drafter.source import resolve_source

POLL_SECONDS = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a Serve configuration, as `serve run` takes it")
    path = parser.parse_args().config
    try:
        config = yaml.safe_load(path.read_text())
        model = parse_config(config["applications"][0]["args"]).model_loading_config
        resolve_source(model.model_source)
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    host, port = address(config)
    if port_is_taken(host, port):
        print(f"{host}:{port} is in use: stop what listens there, or change http_options in {path}", file=sys.stderr)
        return 2
    # A shell starts background jobs with Ctrl-C ignored, which `serve run` would inherit, and then never shut down.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    server = subprocess.Popen([str(Path(sys.executable).with_name("serve")), "run", str(path)])
    signal.signal(signal.SIGTERM, lambda *_: server.send_signal(signal.SIGINT))
    try:
        if wait_until_ready(server, f"http://{host}:{port}"):
            print(welcome(f"http://{host}:{port}", model.model_id), flush=True)
        return server.wait()
    except KeyboardInterrupt:  # Ctrl-C reached `serve run` too: it shuts the application down by itself
        return server.wait()


def address(config: dict[str, Any]) -> tuple[str, int]:
    """Where Serve listens: `http_options` of the file, or Serve's own defaults."""
    options = config.get("http_options") or {}
    return options.get("host", "127.0.0.1"), options.get("port", 8000)


def port_is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1" if host == "0.0.0.0" else host, port)) == 0


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """True once /health says so; False when the server ended first."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(POLL_SECONDS)
    return False


def welcome(url: str, model_id: str) -> str:
    """The URL and a line to paste."""
    body = {"model": model_id, "messages": [{"role": "user", "content": "What is 12 times 7?"}], "max_tokens": 64}
    return (
        f"\nReady at {url}/v1 - try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n"
    )


if __name__ == "__main__":
    sys.exit(main())
