"""The chart renders to what Kubernetes, KubeRay and Prometheus Operator take, for every preset, without a cluster."""

from __future__ import annotations

import copy
import functools
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
from tests.helm.render import (
    CASES,
    CHART,
    GOLDEN,
    PRESETS,
    chart,
    golden,
    manifests,
    notes,
    objects,
    one,
    pods,
    values_of,
    with_,
)

ROOT = CHART.parents[1]
CRDS = Path(__file__).parent / "crds"
KUBERNETES = ("1.28", "1.35")
"""The oldest and the newest that the chart is checked against."""
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def serving(values: dict[str, Any], path: str, value: Any, index: int = 0) -> dict[str, Any]:
    """A copy with one setting of an application changed, `path` with dots; None takes it away."""
    serve = yaml.safe_load(values["serveConfigV2"])
    changed = with_(serve["applications"][index], path, value)
    *parents, key = path.split(".")
    if value is None:
        functools.reduce(dict.__getitem__, parents, changed).pop(key)
    serve["applications"][index] = changed
    return {**values, "serveConfigV2": yaml.safe_dump(serve)}


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
    templates = {path.name for path in (CHART / "templates").iterdir() if path.name[0] != "_"}
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


def test_a_file_for_one_machine_is_told_what_pods_need() -> None:
    """Each error names the next line to change, and after the last one the file goes through word for word."""
    text = (ROOT / "deployments" / "dspark_cpu.yaml").read_text()
    with pytest.raises(HelmError, match=r"http_options\.host is 127\.0\.0\.1.* write 0\.0\.0\.0"):
        manifests({"serveConfigV2": text})
    text = text.replace("127.0.0.1", "0.0.0.0")
    with pytest.raises(HelmError, match=r"ray_actor_options\.num_cpus is missing"):
        manifests({"serveConfigV2": text})
    text += "      deployment_config: {ray_actor_options: {num_cpus: 2}}\n"
    assert one("RayService", {"serveConfigV2": text})["spec"]["serveConfigV2"] == text


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
        ("image.repository", ""),
        ("worker.replicas", "two"),
        ("worker.maxReplicas", 0),
        ("modelCache.type", "hostPath"),
        ("modelCache.size", "20 GB"),
        ("monitoring.podMonitor.labels", {"release": 1}),
        ("modelCache.accessMode", "ReadWriteOncePod"),  # the head and a worker are two pods
        ("monitoring.podMonitor.interval", "0s"),
        ("apiKeys.secretName", "sk-NotANameOfASecret"),
        ("apiKeys.secretKey", ""),
        ("hubToken.secretKey", ""),
        ("gcsFaultTolerance.redisPassword.secretKey", ""),
        ("podAnnotations", {"rollout": 2}),
        ("upgradeStrategy", "Rolling"),
        ("gcsFaultTolerance.redisAddress", "redis:port"),
        ("head.resources.limits.memory", "lots"),
    ],
)
def test_an_impossible_value_is_refused(path: str, value: Any) -> None:
    with pytest.raises(HelmError, match=path.rpartition(".")[2]):
        chart().validate_schema(with_(values_of("cpu"), path, value))


DEPLOYMENT = "args.deployment_config"
RESERVED = f"{DEPLOYMENT}.ray_actor_options"
KEYS = "/etc/dspark/api-keys/keys"
SCALING = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 16}
CPU, GPU, EVERYTHING = (values_of(case) for case in ("cpu", "qwen3-moe", "everything"))
MONITORED = with_(EVERYTHING, "monitoring.podMonitor.interval", "60s")
SCALED = with_(CPU, "autoscaling.enabled", True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (with_(CPU, "serveConfigV2", ""), "serveConfigV2 is empty"),
        (with_(CPU, "serveConfigV2", "my.yaml\n"), "--set-file serveConfigV2=my.yaml"),
        (with_(CPU, "serveConfigV2", "- a\n- b"), "serveConfigV2 is no mapping in YAML"),
        (with_(CPU, "serveConfigV2", "http_options: {host: 0.0.0.0}"), "no list of applications"),
        (with_(CPU, "serveConfigV2", "applications: [one]"), r"applications\[0\] must be a mapping"),
        (with_(CPU, "serveConfigV2", "{http_options: 8000, applications: [{}]}"), "V2: http_options must be a mapping"),
        (serving(CPU, "args.engine_kwargs", "fast"), r"applications\[0\]\.args\.engine_kwargs must be a mapping"),
        (with_(CPU, "gcsFaultTolerance.enabled", True), r"gcsFaultTolerance\.redisAddress is empty"),
        (with_(CPU, "apiKeys.secretName", "clients"), f"args.http_config.api_keys.file: {KEYS}"),
        (with_(EVERYTHING, "apiKeys.secretName", ""), r"name their secret in apiKeys\.secretName"),
        (serving(CPU, f"{DEPLOYMENT}.autoscaling_config", SCALING), "has num_replicas and autoscaling_config"),
        (serving(CPU, RESERVED, None), r"ray_actor_options\.num_cpus is missing"),
        (serving(CPU, f"{RESERVED}.num_cpus", 2.5), r"limits\.cpu is 2"),
        (
            with_(CPU, "worker.resources.limits.cpu", "900m"),
            r"num_cpus is 2, .* worker\.resources\.limits\.cpu is 900m",
        ),
        (
            serving(CPU, f"{DEPLOYMENT}.num_replicas", 2),
            r"asks for 2 engines \(ranks of each: 1\), .* hold 1: raise worker\.replicas \(1\)",
        ),
        (with_(CPU, "worker.replicas", 0), r"asks for 1 engines .* hold 0: raise worker\.replicas"),
        (serving(SCALED, f"{DEPLOYMENT}.num_replicas", 5), r"asks for 5 .* hold 4: raise worker\.maxReplicas \(4\)"),
        (
            serving(CPU, "args.engine_kwargs.tensor_parallel_size", 2),
            r"asks for 1 engines \(ranks of each: 2\), and the workers hold 0",
        ),
        (
            serving(GPU, "args.engine_kwargs.tensor_parallel_size", 8),
            r"asks for 1 engines \(ranks of each: 8\), and the workers hold 0",
        ),
        (
            with_(GPU, "worker.resources.limits", {"cpu": 16, "nvidia.com/gpu": 3}),
            r"asks for 1 engines \(ranks of each: 4\), and the workers hold 0",
        ),
        (with_(GPU, "worker.resources.limits", {"cpu": 16}), "accelerator_type is H100, and no worker has a GPU"),
        (serving(CPU, f"{DEPLOYMENT}.graceful_shutdown_timeout_s", 60), r"timeout_s is 60, .*PeriodSeconds \(60\)"),
        (
            serving(with_(CPU, "terminationGracePeriodSeconds", 10), f"{DEPLOYMENT}.graceful_shutdown_timeout_s", None),
            "graceful_shutdown_timeout_s is 10",
        ),
        (with_(SCALED, "worker.replicas", 5), r"worker\.replicas \(5\) must lie between"),
        (with_(SCALED, "worker.minReplicas", 2), r"worker\.replicas \(1\) must lie between"),
        (with_(CPU, "modelCache.existingClaim", "shared"), r"modelCache\.existingClaim .* persistentVolumeClaim"),
        (with_(CPU, "modelCache.storageClassName", "shared"), r"modelCache\.storageClassName .* persistentVolumeClaim"),
        (MONITORED, "interval is 60s: .* needs 15s or less"),
    ],
)
def test_values_that_contradict_each_other_say_so(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        manifests(values)


@pytest.mark.parametrize(
    "text",
    [
        f"# http_config: {{api_keys: {{file: {KEYS}}}}}",
        f"    http_config: {{api_keys: {{file: {KEYS}}}}}",  # beside args
        f"      http_config: {{api_keys: {{file: {KEYS}.txt}}}}",
        "      http_config: {api_keys: {environment_variable: KEYS}}",
    ],
)
def test_keys_that_nobody_would_check_are_refused(text: str) -> None:
    """Else an install would print a line with a key, in front of a server that is open to all."""
    values = with_(CPU, "apiKeys.secretName", "clients")
    with pytest.raises(HelmError, match="no application reads the keys"):
        manifests({**values, "serveConfigV2": f"{CPU['serveConfigV2']}{text}\n"})
    manifests(serving(values, "args.http_config", {"api_keys": {"file": KEYS}}))


@pytest.mark.parametrize(
    "values",
    [
        with_(CPU, "worker.replicas", 8),  # maxReplicas is the autoscaler's
        with_(CPU, "worker.resources.limits.cpu", "1500m"),  # Ray counts two
        serving(with_(CPU, "worker.resources.limits.cpu", None), f"{RESERVED}.num_cpus", 64),  # a whole node's
        serving(CPU, f"{RESERVED}.num_cpus", 0.5),
        {**CPU, "serveConfigV2": json.dumps(yaml.safe_load(CPU["serveConfigV2"]), separators=(",", ":"))},
        serving(CPU, "args.engine_kwargs.tensor_parallel_size", "two"),  # wrong, and for the application to say
        serving(with_(CPU, "worker.resources.limits", {"cpu": 8, "amd.com/gpu": 1}), f"{DEPLOYMENT}.num_replicas", 4),
        serving(GPU, RESERVED, None),  # a GPU keeps an engine off the head as well
        serving(serving(CPU, RESERVED, None), "args.placement_group_config", {"bundles": [{"CPU": 2}]}),
        serving(serving(CPU, RESERVED, None), "deployments", [{"name": "Replica", "num_replicas": 1}]),
        serving(serving(CPU, RESERVED, None), "import_path", "mine:app"),
        serving(CPU, "args.http_config", {"api_keys": None}),
        with_(MONITORED, "monitoring.prometheusRule.enabled", False),
    ],
)
def test_what_may_be_right_is_left_alone(values: dict[str, Any]) -> None:
    manifests(values)


def scaling(values: dict[str, Any]) -> dict[str, Any]:
    """One to three engines, as the load wants."""
    return serving(serving(values, f"{DEPLOYMENT}.num_replicas", None), f"{DEPLOYMENT}.autoscaling_config", SCALING)


@pytest.mark.parametrize(
    ("values", "said", "note"),
    [
        (CPU, True, "application dspark asks nobody for an API key"),
        (EVERYTHING, False, "asks nobody for an API key"),
        (EVERYTHING, True, "Bearer $API_KEY"),
        (serving(CPU, "args.http_config", {"api_keys": {"environment_variable": "KEYS"}}), False, "asks nobody"),
        (serving(CPU, "args.http_config", {"api_keys": {"environment_variable": "KEYS"}}), True, "Bearer $API_KEY"),
        (CPU, False, "Bearer"),
        (scaling(CPU), True, "ask for 3 engines (max_replicas), but the workers hold 1: raise worker.replicas, or"),
        (scaling(with_(CPU, "worker.replicas", 3)), False, "max_replicas"),
        (scaling(SCALED), False, "max_replicas"),
        (scaling(with_(SCALED, "worker.maxReplicas", 2)), True, "but the workers hold 2: raise worker.maxReplicas."),
        (SCALED, True, "their number is fixed"),
        (scaling(SCALED), False, "their number is fixed"),
        (with_(CPU, "networkPolicy.enabled", False), True, "No NetworkPolicy"),
        (EVERYTHING, True, "is Prometheus among them?"),
        (with_(EVERYTHING, "networkPolicy.clients", []), False, "is Prometheus among them?"),
        (with_(EVERYTHING, "monitoring.podMonitor.enabled", False), False, "is Prometheus among them?"),
        (with_(CPU, "monitoring.dashboards.enabled", True), True, "set monitoring.runbookUrl"),
        (with_(CPU, "monitoring.prometheusRule.enabled", True), True, "set monitoring.runbookUrl"),
        (EVERYTHING, False, "set monitoring.runbookUrl"),
        (with_(CPU, "worker.replicas", 2), True, "Every worker downloads the model"),
        (GPU, True, "can't do ReadWriteMany: name one that can in modelCache.storageClassName"),
        (EVERYTHING, False, "modelCache.storageClassName"),
        (with_(GPU, "modelCache.existingClaim", "mine"), False, "modelCache.storageClassName"),
    ],
)
def test_an_install_says_what_may_be_forgotten(values: dict[str, Any], said: bool, note: str) -> None:
    assert (note in notes(values)) is said


def test_each_application_without_keys_is_named() -> None:
    serve = yaml.safe_load(EVERYTHING["serveConfigV2"])
    serve["applications"].append({**serve["applications"][0], "name": "open", "route_prefix": "/open"})
    values = serving({**EVERYTHING, "serveConfigV2": yaml.safe_dump(serve)}, "args.http_config", None, index=1)
    said = notes(values)
    assert "The application open asks nobody" in said and "application dspark asks" not in said


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
