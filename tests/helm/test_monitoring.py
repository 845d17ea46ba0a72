"""What the chart brings for Prometheus and Grafana: the scrape, the rules and the dashboards."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.helm.render import CHART, manifests, notes, objects, one, values_of, with_
from tests.ops.metric_names import known, named

ROOT = CHART.parents[1]
EVERYTHING = values_of("everything")


@pytest.mark.parametrize("more", [{}, {"team": "x"}], ids=["alone", "another"])
@pytest.mark.parametrize(
    ("section", "kind", "label"),
    [
        ("podMonitor", "PodMonitor", "release"),
        ("prometheusRule", "PrometheusRule", "release"),
        ("dashboards", "ConfigMap", "grafana_dashboard"),
    ],
)
def test_a_label_of_the_defaults_can_be_taken_away(section: str, kind: str, label: str, more: dict[str, str]) -> None:
    values = with_(EVERYTHING, f"monitoring.{section}.labels", {label: None, **more})
    found = [document for document in objects(values) if document["kind"] == kind]
    assert found
    for labels in (document["metadata"]["labels"] for document in found):
        assert labels.keys() == one("RayService", values)["metadata"]["labels"].keys() | more.keys()


def test_each_application_is_scraped_and_shown_below_its_prefix() -> None:
    serve = yaml.safe_load(EVERYTHING["serveConfigV2"])
    first = serve["applications"][0]
    del first["route_prefix"]
    serve["applications"].append({**first, "name": "other", "route_prefix": "/other"})
    values = {**EVERYTHING, "serveConfigV2": yaml.safe_dump(serve)}
    endpoints = one("PodMonitor", values)["spec"]["podMetricsEndpoints"]
    assert [endpoint["path"] for endpoint in endpoints] == ["/metrics", "/other/metrics"]
    named_as = [endpoint["relabelings"][0]["replacement"] for endpoint in endpoints]
    assert named_as == ["dspark", "other"], "else one target's samples would pass for the other's"
    said = notes(values)
    assert "curl http://127.0.0.1:8000/v1/models" in said and "curl http://127.0.0.1:8000/other/v1/models" in said
    assert "cluster: http://demo.llm.svc:9000/v1 http://demo.llm.svc:9000/other/v1" in said


def test_monitoring_ships_the_rules_and_dashboards_with_working_links() -> None:
    values = values_of("everything")
    url = values["monitoring"]["runbookUrl"]
    rules = one("PrometheusRule", values)["spec"]
    source = (ROOT / "ops" / "rules" / "dspark.rules.yaml").read_text()
    assert rules == yaml.safe_load(source.replace("ops/runbook.md", url))
    assert f"{url}#dsparkenginestuck" in json.dumps(rules)
    shipped = [document for document in objects(values) if document["kind"] == "ConfigMap"]
    files = {name: text for document in shipped for name, text in document["data"].items()}
    originals = {path.name: path.read_text() for path in (ROOT / "ops" / "dashboards" / "json").glob("*.json")}
    assert files == {name: text.replace("ops/runbook.md", url) for name, text in originals.items()}
    assert all(document["metadata"]["labels"]["grafana_dashboard"] == "1" for document in shipped)
    assert named("\n".join(manifests(values).values())) <= known()


def test_nothing_of_monitoring_is_there_unless_asked_for() -> None:
    kinds = {document["kind"] for document in objects(values_of("cpu"))}
    assert kinds == {"RayService", "NetworkPolicy"}
