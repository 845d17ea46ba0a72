"""Renders the chart with a real Helm engine; shared by the tests of this folder."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).resolve().parents[2] / "helm" / "dspark"
PRESETS = {path.stem.removeprefix("values-"): path for path in sorted(CHART.glob("values-*.yaml"))}
EVERYTHING = CHART / "ci" / "everything-values.yaml"
GOLDEN = Path(__file__).parent / "golden"
GENERATED = ("dashboards.yaml", "prometheusrule.yaml")
CASES = {**PRESETS, "everything": EVERYTHING}


@functools.cache
def chart() -> Chart:
    return Chart.load(CHART)


def values_of(case: str) -> dict[str, Any]:
    return dict(yaml.safe_load(CASES[case].read_text()))


def with_(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value set, `path` with dots."""
    changed = copy.deepcopy(values)
    *parents, key = path.split(".")
    section = changed
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return changed


def manifests(values: dict[str, Any]) -> dict[str, str]:
    """Template -> text, without those that render to nothing."""
    rendered = chart().render(values=values, name="demo", namespace="llm")
    return {Path(name).name: text.strip() + "\n" for name, text in sorted(rendered.items()) if text.strip()}


def notes(values: dict[str, Any]) -> str:
    """What an install prints, on one line."""
    return " ".join(manifests(values)["NOTES.txt"].split())


def golden(case: str) -> str:
    """What the golden file of a case must hold: all but dashboards and rules, which have files of their own."""
    shown = {name: text for name, text in manifests(values_of(case)).items() if name not in GENERATED}
    return "".join(f"# --- {name}\n{text}" for name, text in shown.items())


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Every Kubernetes object of a release."""
    texts = [text for name, text in manifests(values).items() if name != "NOTES.txt"]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def one(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    (found,) = [document for document in objects(values) if document["kind"] == kind]
    return found


def pods(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pod templates of the head and of the workers."""
    cluster = one("RayService", values)["spec"]["rayClusterConfig"]
    (worker,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"], "worker": worker["template"]}
