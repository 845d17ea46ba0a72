"""Puts the dashboards, and the Prometheus that they ask, into a running Grafana. Knows Grafana's HTTP API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ops.dashboards.__main__ import files

SOURCE_UID = "dspark-prometheus"
TIMEOUT_SECONDS = 10.0


class GrafanaError(RuntimeError):
    """Grafana can't be reached or refused; the message says which request, and its answer."""


def provision(url: str, token: str, prometheus_url: str) -> list[str]:
    """Make or replace the data source and every dashboard; returns where the dashboards are.

    `token`: of a service account that may edit both; empty where anonymous users may. Raises GrafanaError.
    """
    url = url.rstrip("/")
    source = {"uid": SOURCE_UID, "name": "DSpark", "type": "prometheus", "access": "proxy", "url": prometheus_url}
    known, _ = _send(url, token, "GET", f"/api/datasources/uid/{SOURCE_UID}", allowed=(200, 404))
    if known == 200:
        _send(url, token, "PUT", f"/api/datasources/uid/{SOURCE_UID}", source)
    else:
        _send(url, token, "POST", "/api/datasources", source)
    places = []
    for text in files().values():
        _, answer = _send(url, token, "POST", "/api/dashboards/db", {"dashboard": json.loads(text), "overwrite": True})
        places.append(url + answer["url"])
    return places


def read_token(file: Path | None) -> str:
    """The token in a file, "" without one. Raises GrafanaError when the file holds none."""
    if file is None:
        return ""
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise GrafanaError(f"--grafana-token-file: {error}") from error
    if not token:
        raise GrafanaError(f"--grafana-token-file: {file} holds no token")
    return token


def _send(
    url: str, token: str, method: str, path: str, body: dict[str, Any] | None = None, allowed: tuple[int, ...] = (200,)
) -> tuple[int, Any]:
    """(status, decoded answer); any status that is not `allowed` is an error."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        if error.code in allowed:
            return error.code, None
        said = error.read(500).decode(errors="replace")
        raise GrafanaError(f"{method} {url}{path}: {error.code} {said}") from None
    except (OSError, ValueError) as error:  # not reached, no URL, or no JSON: no Grafana
        raise GrafanaError(f"{method} {url}{path}: {error}") from error
