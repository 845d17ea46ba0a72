"""The chart renders to what Kubernetes, KubeRay and Prometheus Operator take, for every preset, without a cluster."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python import lint
from helm_python.errors import HelmError
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from deployments.config import parse_config
from ops.chart import SCHEMA, schema
from ops.chart import text as schema_text
from tests.helm.render import CASES, CHART, GOLDEN, PRESETS, chart, golden, manifests, objects, one, pods, values_of
from tests.ops.metric_names import known, named

ROOT = CHART.parents[1]
CRDS = Path(__file__).parent / "crds"
KUBERNETES = ("1.28", "1.35")
"""The oldest and the newest that the chart is checked against."""
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def with_(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value set, `path` with dots."""
    changed = copy.deepcopy(values)
    *parents, key = path.split(".")
    section = changed
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return changed


def validate(document: dict[str, Any], version: str) -> None:
    """Against Kubernetes' strict schemas, or the custom resource's that refers to them."""
    crd = CRDS / f"{document['kind'].lower()}.json"
    if not crd.exists():
        kubernetes_validate.validate(document, version, strict=True)
        return
    shared = schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json", version)
    registry = Resource.from_contents(shared) @ Registry()
    jsonschema.Draft202012Validator(json.loads(crd.read_text()), registry=registry).validate(document)


@pytest.mark.parametrize("case", CASES)
def test_lint_is_clean(case: str) -> None:
    report = lint(CHART, values_of(case), strict=True, namespace="llm")
    assert report["errors"] == [] and all(message["severity"] < 2 for message in report["messages"])


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid(case: str, version: str) -> None:
    for document in objects(values_of(case)):
        validate(document, version)


def test_the_validators_see_a_typo() -> None:
    """The negative control of the test above, in each kind of schema."""
    for document in objects(values_of("everything")):
        spoilt = copy.deepcopy(document)
        section = spoilt["data"] if document["kind"] == "ConfigMap" else spoilt["spec"]
        section["replcias"] = 1
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(spoilt, KUBERNETES[-1])
    service = one("RayService", values_of("cpu"))
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imagePulPolicy"):
        validate(service, KUBERNETES[-1])


def test_everything_renders_every_template() -> None:
    templates = {path.name for path in (CHART / "templates").iterdir()} - {"_helpers.tpl"}
    assert set(manifests(values_of("everything"))) == templates


@pytest.mark.parametrize("case", CASES)
def test_the_output_is_the_golden_one(case: str) -> None:
    assert golden(case) == (GOLDEN / f"{case}.yaml").read_text(), "read the difference; python -m tests.helm.accept"


@pytest.mark.parametrize("case", CASES)
def test_the_serve_configuration_arrives_word_for_word(case: str) -> None:
    values = values_of(case)
    text = one("RayService", values)["spec"]["serveConfigV2"]
    assert text == values["serveConfigV2"]
    (application,) = yaml.safe_load(text)["applications"]
    config = parse_config(application["args"])
    assert config.deployment_config.ray_actor_options.num_cpus > 0, "else engines start on the head"
    grace = pods(values)["worker"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > config.deployment_config.graceful_shutdown_timeout_s


def test_the_shipped_file_can_be_passed_as_it_is_but_for_its_address() -> None:
    text = (ROOT / "deployments" / "dspark_cpu.yaml").read_text()
    with pytest.raises(HelmError, match=r"http_options.host must be 0\.0\.0\.0"):
        manifests({"serveConfigV2": text})
    reachable = text.replace("127.0.0.1", "0.0.0.0")
    assert one("RayService", {"serveConfigV2": reachable})["spec"]["serveConfigV2"] == reachable


@pytest.mark.parametrize("case", PRESETS)
def test_a_worker_has_room_for_an_engine(case: str) -> None:
    values = values_of(case)
    (application,) = yaml.safe_load(values["serveConfigV2"])["applications"]
    (container,) = pods(values)["worker"]["spec"]["containers"]
    config, limits = parse_config(application["args"]), container["resources"]["limits"]
    engine, ranks = config.engine_kwargs, config.engine_kwargs.tensor_parallel_size
    reserved = config.deployment_config.ray_actor_options.num_cpus
    assert reserved >= engine.num_threads
    assert float(limits["cpu"]) >= ranks * reserved
    assert limits.get("nvidia.com/gpu", 0) >= (ranks if config.accelerator_type else 0)


# --- values ---


def test_the_schema_is_in_step_with_the_values() -> None:
    assert SCHEMA.read_text() == schema_text(), "run: make generate"
    assert len((CHART / "values.yaml").read_text().splitlines()) <= 200


def _sections(values: dict[str, Any], described: dict[str, Any], prefix: str = "") -> list[str]:
    """Paths of all mappings that the chart, not Kubernetes, gives a meaning."""
    found = [prefix]
    for key, value in values.items():
        inner = described["properties"][key]
        if isinstance(value, dict) and inner.get("additionalProperties") is False and inner.get("properties"):
            found += _sections(value, inner, f"{prefix}{key}.")
    return found


@pytest.mark.parametrize("section", _sections(DEFAULTS, schema()))
def test_a_typo_in_any_section_is_refused(section: str) -> None:
    with pytest.raises(HelmError, match="tpyo"):
        chart().validate_schema(with_(values_of("cpu"), f"{section}tpyo", 1))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("worker.replicas", "two"),
        ("worker.maxReplicas", 0),
        ("modelCache.type", "hostPath"),
        ("modelCache.size", "20 GB"),
        ("monitoring.podMonitor.labels", {"release": 1}),
        ("apiKeys.secretName", "sk-NotANameOfASecret"),
        ("upgradeStrategy", "Rolling"),
        ("gcsFaultTolerance.redisAddress", "redis:port"),
        ("head.resources.limits.memory", "lots"),
    ],
)
def test_an_impossible_value_is_refused(path: str, value: Any) -> None:
    with pytest.raises(HelmError, match=path.rpartition(".")[2]):
        chart().validate_schema(with_(values_of("cpu"), path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("serveConfigV2", "", "serveConfigV2 is empty"),
        ("apiKeys.secretName", "clients", "has no http_config.api_keys.file"),
        ("gcsFaultTolerance.enabled", True, "gcsFaultTolerance.redisAddress is empty"),
    ],
)
def test_values_that_contradict_each_other_say_so(path: str, value: Any, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        manifests(with_(values_of("cpu"), path, value))
    with pytest.raises(HelmError, match=r"name their secret in apiKeys\.secretName"):
        manifests(with_(values_of("everything"), "apiKeys.secretName", ""))


# --- what the pods are ---


def test_versions_agree_with_the_pins() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert DEFAULTS["rayVersion"] == pins["ray"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart().metadata["appVersion"] == project["version"]


@pytest.mark.parametrize("component", ["head", "worker"])
@pytest.mark.parametrize("case", CASES)
def test_pods_may_do_little(case: str, component: str) -> None:
    spec = pods(values_of(case))[component]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"]
    (container,) = spec["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/var/cache/dspark"}
    assert container["livenessProbe"] and container["readinessProbe"]
    assert container["resources"]["requests"] and container["resources"]["limits"]
    may_talk_to_kubernetes = component == "head" and case == "everything"
    assert spec.get("automountServiceAccountToken", True) is may_talk_to_kubernetes


def test_secrets_are_named_never_shown() -> None:
    for pod in pods(values_of("everything")).values():
        (container,) = pod["spec"]["containers"]
        (token,) = [variable for variable in container["env"] if variable["name"] == "HF_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}} and "value" not in token
        (keys,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "api-keys"]
        assert keys["secret"] == {"secretName": "clients", "items": [{"key": "api-keys", "path": "keys"}]}
    cluster = one("RayService", values_of("everything"))["spec"]["rayClusterConfig"]
    assert set(cluster["gcsFaultToleranceOptions"]["redisPassword"]) == {"valueFrom"}
    assert not [document for document in objects(values_of("everything")) if document["kind"] == "Secret"]


def test_selectors_find_the_pods_they_mean() -> None:
    values = values_of("everything")
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(values).items()}

    def selected(selector: dict[str, Any]) -> set[str]:
        return {name for name, has in labels.items() if selector["matchLabels"].items() <= has.items()}

    assert selected(one("PodDisruptionBudget", values)["spec"]["selector"]) == {"worker"}
    assert selected(one("NetworkPolicy", values)["spec"]["podSelector"]) == {"head", "worker"}
    (spread,) = pods(values)["worker"]["spec"]["topologySpreadConstraints"]
    assert selected(spread["labelSelector"]) == {"worker"}
    monitor = one("PodMonitor", values)["spec"]
    assert selected(monitor["selector"]) == {"head"}, "one target: its /metrics speaks for the whole fleet"
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in pods(values)["head"]["spec"]["containers"][0]["ports"]}
    assert ports[endpoint["port"]] == 9000


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


# --- the image ---


def test_the_image_file_copies_what_exists_and_what_the_configuration_needs() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    let_in = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    assert set(copied) == let_in
    (application,) = yaml.safe_load(values_of("cpu")["serveConfigV2"])["applications"]
    assert application["args"]["engine_kwargs"]["drafter_source"].split("/")[0] in copied
    assert application["import_path"].split(".")[0] in copied
    assert f"USER {DEFAULTS['podSecurityContext']['runAsUser']}:{DEFAULTS['podSecurityContext']['runAsGroup']}" in lines
