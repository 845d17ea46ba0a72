"""`make serve`: fetch the model where progress can be seen, start `serve run`, and say when the first request can go.

python -m ops.serve deployments/dspark_cpu.yaml
python -m ops.serve my.yaml --check        # starts nothing
"""

from __future__ import annotations

import argparse
import itertools
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

from deployments.config import LLMConfig, parse_config
from drafter.source import resolve_source

POLL_SECONDS = 0.5
LOOKS_PER_STATUS = 20
"""Asking Serve starts a process, so it is asked far less often than /health."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a Serve configuration, as `serve run` takes it")
    parser.add_argument("--check", action="store_true", help="print the args in force, or what is wrong, and stop")
    arguments = parser.parse_args()
    path = arguments.config
    try:
        config = yaml.safe_load(path.read_text())
        if arguments.check:
            print(checked(config), end="")
            return 0
        applications = {url: parse_config(args) for url, args in served(config).items()}
        for application in applications.values():
            fetch(application)
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError):
        print(f"{path}: not a Serve configuration: it needs applications, each of them with args", file=sys.stderr)
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
        for url, application in applications.items():
            if not wait_until_ready(server, url):
                return server.wait() or 1
            print(welcome(url, application.model_loading_config.model_id), flush=True)
        return server.wait()
    except KeyboardInterrupt:  # Ctrl-C reached `serve run` too: it shuts the application down by itself
        return server.wait()


def checked(config: dict[str, Any]) -> str:
    """The settings in force of every application, in a Serve configuration or in a chart's values that hold one."""
    if "serveConfigV2" in config:
        config = yaml.safe_load(config["serveConfigV2"])
    return "---\n".join(parse_config(application["args"]).effective_yaml() for application in config["applications"])


def address(config: dict[str, Any]) -> tuple[str, int]:
    """Where Serve listens: `http_options` of the file, or Serve's own defaults."""
    options = config.get("http_options") or {}
    return options.get("host", "127.0.0.1"), options.get("port", 8000)


def served(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """URL -> args of each application. Raises ValueError when there is none."""
    found = {}
    for application in config["applications"]:
        args, prefix = application["args"], application.get("route_prefix") or "/"
        host, port = address(config)
        found[f"http://{host}:{port}{prefix.rstrip('/')}"] = args
    if not found:
        raise ValueError("applications: must not be empty, or nothing is served")
    return found


def fetch(application: LLMConfig) -> None:
    """Model and drafter, where they run on this machine's CPUs; else they may not even fit here."""
    for source in (application.model_loading_config.model_source, application.engine_kwargs.drafter_source):
        if source is not None and application.accelerator_type is None:
            resolve_source(source)


def port_is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1" if host == "0.0.0.0" else host, port)) == 0


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """True once /health says so; False when the server ended first, or when its application can't start."""
    looks = itertools.count(1)
    while server.poll() is None:
        if next(looks) % LOOKS_PER_STATUS == 0 and (reason := deploy_failure()):
            print(f"\nthe application could not start:\n{reason}", file=sys.stderr, flush=True)
            server.send_signal(signal.SIGINT)  # `serve run` itself would wait for ever
            return False
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(POLL_SECONDS)
    return False


def deploy_failure() -> str | None:
    """Why Serve gave an application up; None while it hasn't, or can't be asked yet."""
    program = str(Path(sys.executable).with_name("serve"))
    answer = subprocess.run([program, "status"], capture_output=True, text=True)
    try:
        applications = yaml.safe_load(answer.stdout)["applications"].values()
    except (yaml.YAMLError, TypeError, KeyError, AttributeError):
        return None
    return next((app["message"] for app in applications if app["status"] == "DEPLOY_FAILED"), None)


def welcome(url: str, model_id: str) -> str:
    """The URL and a line to paste."""
    body = {"model": model_id, "messages": [{"role": "user", "content": "What is 12 times 7?"}], "max_tokens": 64}
    return (
        f"\nReady at {url}/v1 - try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n"
    )


if __name__ == "__main__":
    sys.exit(main())
