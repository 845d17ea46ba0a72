"""What a Grafana is sent. None can be had here: a server that answers as its HTTP API documents stands in."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ops import grafana
from ops.dashboards.catalog import DASHBOARDS


class FakeGrafana(HTTPServer):
    """Remembers sources and dashboards; wants a token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeGrafana

    def answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def handle_api(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        *_, last = self.path.split("/")
        if self.headers.get("Authorization") != "Bearer secret":
            self.answer(401, {"message": "Unauthorized"})
        elif self.command == "GET":
            self.answer(200 if last in self.server.sources else 404, {})
        elif self.path == "/api/dashboards/db":
            known = body["dashboard"]["uid"] in self.server.dashboards
            self.server.dashboards[body["dashboard"]["uid"]] = body["dashboard"]
            self.answer(412 if known and not body["overwrite"] else 200, {"url": f"/d/{body['dashboard']['uid']}/x"})
        elif (self.command == "POST") == (body["uid"] in self.server.sources):
            self.answer(409 if self.command == "POST" else 404, {"message": "data source"})
        else:
            self.server.sources[body["uid"]] = body
            self.answer(200, {})

    do_GET = do_PUT = do_POST = handle_api

    def log_message(self, format: str, *args: object) -> None:
        """Not among the tests' output."""


@pytest.fixture
def server() -> Iterator[FakeGrafana]:
    with FakeGrafana() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_source_and_dashboards_arrive_and_are_replaced_the_next_time(server: FakeGrafana) -> None:
    for address in ("http://127.0.0.1:9090", "http://127.0.0.1:9091"):
        places = grafana.provision(server.url + "/", "secret", address)
        assert places == [f"{server.url}/d/{dashboard.uid}/x" for dashboard in DASHBOARDS]
        (source,) = server.sources.values()
        assert source["url"] == address
    assert set(server.dashboards) == {dashboard.uid for dashboard in DASHBOARDS}


def test_a_refusal_is_told_with_grafanas_words(server: FakeGrafana) -> None:
    with pytest.raises(grafana.GrafanaError, match="401.*Unauthorized"):
        grafana.provision(server.url, "wrong", "http://127.0.0.1:9090")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "grafana", "127.0.0.1:3000"])
def test_where_there_is_none_it_says_so(url: str) -> None:
    with pytest.raises(grafana.GrafanaError):
        grafana.provision(url, "", "http://127.0.0.1:9090")


def test_an_empty_token_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(grafana.GrafanaError, match="holds no token"):
        grafana.read_token(tmp_path / "token")
    with pytest.raises(grafana.GrafanaError, match="--grafana-token-file"):
        grafana.read_token(tmp_path / "missing")
