"""Writes helm/dspark/values.schema.json from values.yaml and its comments: `python -m ops.chart`.

A key's type is that of its default, its description the comment above it; a text may be empty where its default is.
What a default can't say (choices, ranges, shapes of Kubernetes' own) stands in REFINED. Every mapping is closed, save
those that are Kubernetes' own to check.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "helm" / "dspark"
SCHEMA = CHART / "values.schema.json"

Schema = dict[str, Any]
OPEN: Schema = {"type": "object"}
"""Kubernetes' own structure: checked by the API server, not here."""
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}
NAME: Schema = {"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
KEY: Schema = {"type": "string", "pattern": r"^[-._a-zA-Z0-9]+$"}
COUNT: Schema = {"type": "integer", "minimum": 1}
RESOURCES: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        kind: {"type": "object", "additionalProperties": {"anyOf": [QUANTITY, {"type": "number"}]}}
        for kind in ("requests", "limits")
    },
}


def one_of(*choices: str) -> Schema:
    return {"type": "string", "enum": list(choices)}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


REFINED: dict[str, Schema] = {
    "image.pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "image.pullSecrets": many(NAME),
    "head.resources": RESOURCES,
    "head.nodeSelector": TEXTS,
    "head.tolerations": many(OPEN),
    "worker.replicas": {"type": "integer", "minimum": 0},
    "worker.minReplicas": {"type": "integer", "minimum": 0},
    "worker.maxReplicas": COUNT,
    "worker.resources": RESOURCES,
    "worker.nodeSelector": TEXTS,
    "worker.tolerations": many(OPEN),
    "worker.topologySpread.maxSkew": COUNT,
    "worker.topologySpread.whenUnsatisfiable": one_of("ScheduleAnyway", "DoNotSchedule"),
    "autoscaling.idleTimeoutSeconds": COUNT,
    "autoscaling.upscalingMode": one_of("Default", "Conservative", "Aggressive"),
    "autoscaling.resources": RESOURCES,
    "modelCache.type": one_of("emptyDir", "persistentVolumeClaim"),
    "modelCache.size": QUANTITY,
    "modelCache.existingClaim": NAME,
    "modelCache.storageClassName": NAME,
    "modelCache.accessMode": one_of("ReadWriteOnce", "ReadWriteMany"),
    "hubToken.secretName": NAME,
    "hubToken.secretKey": KEY,
    "apiKeys.secretName": NAME,
    "apiKeys.secretKey": KEY,
    "service.type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "service.annotations": TEXTS,
    "upgradeStrategy": one_of("NewCluster", "None"),
    "gcsFaultTolerance.redisAddress": {"type": "string", "pattern": r"^([^:\s]+(:[0-9]+)?)?$"},
    "gcsFaultTolerance.redisPassword.secretName": NAME,
    "gcsFaultTolerance.redisPassword.secretKey": KEY,
    "networkPolicy.clients": many(OPEN),
    "monitoring.podMonitor.labels": TEXTS,
    "monitoring.podMonitor.interval": {"type": "string", "pattern": "^[1-9][0-9]*s$"},
    "monitoring.prometheusRule.labels": TEXTS,
    "monitoring.dashboards.labels": TEXTS,
    "monitoring.dashboards.annotations": TEXTS,
    "probes.periodSeconds": COUNT,
    "probes.timeoutSeconds": COUNT,
    "probes.livenessFailureThreshold": COUNT,
    "probes.readinessFailureThreshold": COUNT,
    "terminationGracePeriodSeconds": COUNT,
    "podAnnotations": TEXTS,
    "podSecurityContext": OPEN,
    "securityContext": OPEN,
    "extraEnv": many({"type": "object", "required": ["name"]}),
}
TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer"}


def schema() -> Schema:
    """The whole schema. ValueError names a key that has no type, or a refinement of a key that doesn't exist."""
    text = (CHART / "values.yaml").read_text()
    used: set[str] = set()
    properties = _closed(yaml.safe_load(text), _comments(text), "", used)
    properties["properties"]["global"] = OPEN  # Helm adds it when the chart is part of another
    if unknown := REFINED.keys() - used:
        raise ValueError(f"values.yaml has no {sorted(unknown)}")
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the dspark chart", **properties}


def _closed(values: dict[str, Any], comments: dict[str, str], prefix: str, used: set[str]) -> Schema:
    properties: dict[str, Schema] = {}
    for key, default in values.items():
        path = f"{prefix}{key}"
        if path in REFINED:
            used.add(path)
            found = dict(REFINED[path])
        elif isinstance(default, dict):
            found = _closed(default, comments, f"{path}.", used)
        elif type(default) in TYPES:
            found = {"type": TYPES[type(default)]}
            if default and isinstance(default, str):
                found["minLength"] = 1
        else:
            raise ValueError(f"{path}: its default does not say its type; add it to REFINED")
        properties[key] = {"description": comments[path], **found} if path in comments else found
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _comments(text: str) -> dict[str, str]:
    """Path of a key -> the comment lines right above it."""
    found: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    lines: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            lines.append(stripped.removeprefix("#").strip())
            continue
        key, colon, _ = stripped.partition(":")
        if colon:
            indent = len(line) - len(line.lstrip())
            stack = [*(parent for parent in stack if parent[0] < indent), (indent, key)]
            if lines:
                found[".".join(name for _, name in stack)] = " ".join(lines)
        lines = []
    return found


def text() -> str:
    """The file."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text())
