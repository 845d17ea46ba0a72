"""The rule file is what the code says, Prometheus takes it, and every alert fires, stays silent and is explained."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.metrics import ServiceMetrics
from ops import slo
from ops.rules.__main__ import FILE, text
from ops.rules.alerts import ALERTS
from tests.ops.metric_names import known, named, recorded

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "ops" / "rules" / "alerts.test.yaml"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True)


def test_the_file_and_the_page_are_in_step_with_the_code() -> None:
    assert FILE.read_text() == text(), "run: make generate"
    assert (ROOT / "ops" / "slo.md").read_text() == slo.page(), "run: make generate"


def test_rules_name_only_metrics_that_exist() -> None:
    rules = [rule for group in yaml.safe_load(text())["groups"] for rule in group["rules"]]
    assert recorded(text()) == {rule["record"] for rule in rules if "record" in rule}
    assert named(text()) <= known()


def test_thresholds_are_bounds_of_the_buckets_they_count() -> None:
    exposed = ServiceMetrics().text()
    for objective in slo.OBJECTIVES:
        assert f'{objective.histogram}_bucket{{le="{objective.threshold_seconds}"}}' in exposed


def test_every_window_of_an_alert_is_recorded() -> None:
    assert {length for window in slo.BURN_WINDOWS for length in (window.long, window.short)} <= set(slo.WINDOWS)


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    result = promtool("check", "rules", "--lint-fatal", str(FILE))
    assert result.returncode == 0, result.stderr


@needs_promtool
def test_each_alert_fires_when_it_must_and_only_then() -> None:
    result = promtool("test", "rules", str(CASES))
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_a_broken_rule_does_not_pass(tmp_path: Path) -> None:
    """The negative control: with its limit moved, the stuck engine's test must fail."""
    broken = text().replace("(dspark_requests_running) > 0 and", "(dspark_requests_running) > 3 and")
    assert broken != text()
    (tmp_path / FILE.name).write_text(broken)
    cases = yaml.safe_load(CASES.read_text())
    cases["rule_files"] = [FILE.name]
    cases["tests"] = [case for case in cases["tests"] if "steps stand still" in case["name"]]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    result = promtool("test", "rules", str(tmp_path / "cases.yaml"))
    assert result.returncode != 0 and "DSparkEngineStuck" in result.stdout + result.stderr


def test_each_alert_has_both_kinds_of_test() -> None:
    outcomes: dict[str, set[bool]] = {}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for check in case.get("alert_rule_test", []):
            outcomes.setdefault(check["alertname"], set()).add(bool(check["exp_alerts"]))
    assert outcomes == {alert.name: {True, False} for alert in ALERTS}


@pytest.mark.parametrize("alert", {alert.name: alert for alert in ALERTS}.values(), ids=lambda alert: alert.name)
def test_each_alert_says_how_bad_it_is_and_what_to_do(alert: object) -> None:
    rule = alert.rule()  # type: ignore[attr-defined]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["runbook_url"] == f"ops/runbook.md#{rule['alert'].lower()}"
    section = re.search(rf"^## {rule['alert']}\n(.*?)(?=^#|\Z)", (ROOT / "ops/runbook.md").read_text(), re.M | re.S)
    assert section is not None, f"the runbook has no section {rule['alert']}"
    assert all(word in section[1] for word in ("**Means.**", "**See.**", "**Do.**"))
