"""The alerts: when a person must look, how soon, and where to read on.

Each has a section of the same name in ops/runbook.md. `critical` means now, `warning` means today. Every expression
stands still on an idle service: no traffic is no alarm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ops.rules.recording import ACCEPTANCE, COST_CURVE, burn_rate_name
from ops.slo import BURN_WINDOWS, GROUP, BurnWindow

RUNBOOK = "ops/runbook.md"
"""Where the runbook is; the chart puts a URL in its place."""
REPLICA = f"{GROUP}, replica"
CALIBRATION_LIMIT = 0.15
"""A few hundred drafts, the least that an error is told of, can come out at 0.1 by chance."""


@dataclass(frozen=True, slots=True)
class Alert:
    """`hold`: how long the expression must be true."""

    name: str
    expression: str
    hold: str
    severity: str
    summary: str
    labels: dict[str, str] = field(default_factory=dict)

    def rule(self) -> dict[str, Any]:
        """The alert as Prometheus' YAML has it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.hold,
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {"summary": self.summary, "runbook_url": f"{RUNBOOK}#{self.name.lower()}"},
        }


def _burn(window: BurnWindow) -> Alert:
    return Alert(
        "DSparkErrorBudgetBurn",
        f"{burn_rate_name(window.long)} > {window.factor:g} and {burn_rate_name(window.short)} > {window.factor:g}",
        window.hold,
        window.severity,
        f"{{{{ $labels.model }}}}: the {{{{ $labels.slo }}}}{{{{ with $labels.tier }}}} {{{{ . }}}}{{{{ end }}}} error "
        f"budget burns {{{{ $value | humanize }}}} times too "
        f"fast ({window.long} and {window.short} windows); {window.budget_spent} of a month's is gone",
        {"window": window.long},
    )


ALERTS = (
    *(_burn(window) for window in BURN_WINDOWS),
    Alert(
        "DSparkNoEngine",
        f"(count by ({GROUP}) (dspark_requests_shed_total) unless count by ({GROUP}) (dspark_requests_running))"
        " or absent(dspark_requests_shed_total)",
        "2m",
        "critical",
        '{{ or $labels.model "the service" }}: no engine reports; requests are answered with 503 or not at all',
    ),
    Alert(
        "DSparkEngineStuck",
        f"max by ({REPLICA}) (dspark_requests_running) > 0"
        f" and sum by ({REPLICA}) (increase(dspark_steps_total[45s])) == 0",
        "0s",
        "critical",
        "{{ $labels.model }}: replica {{ $labels.replica }} has work and finishes no step",
    ),
    Alert(
        "DSparkEngineRestarting",
        f"sum by ({GROUP}) (increase(dspark_engines_lost_total[30m])) >= 2",
        "0s",
        "critical",
        '{{ $labels.model }}: {{ $value | printf "%.0f" }} engines were lost in half an hour',
    ),
    Alert(
        "DSparkQueueGrowing",
        f"min by ({REPLICA}) (min_over_time(dspark_requests_waiting[10m])) > 0"
        f" and sum by ({REPLICA}) (deriv(dspark_requests_waiting[10m])) > 0",
        "5m",
        "warning",
        "{{ $labels.model }}: the queue of replica {{ $labels.replica }} has not been empty for 10 minutes and grows",
    ),
    Alert(
        "DSparkRequestsShed",
        f"sum by ({GROUP}) (rate(dspark_requests_shed_total[5m])) > 0",
        "5m",
        "critical",
        "{{ $labels.model }}: {{ $value | humanize }} requests per second are refused",
    ),
    Alert(
        "DSparkKVExhausted",
        f"min by ({REPLICA}) (min_over_time(dspark_kv_cache_usage_ratio[5m])) > 0.9"
        f" and sum by ({REPLICA}) (rate(dspark_preemptions_total[5m])) > 0",
        "5m",
        "warning",
        "{{ $labels.model }}: replica {{ $labels.replica }} has no KV blocks left and recomputes sequences",
    ),
    Alert(
        "DSparkAcceptanceFell",
        f"{ACCEPTANCE} < 0.6 * avg_over_time({ACCEPTANCE}[1d] offset 1h) or {ACCEPTANCE} < 0.1",
        "15m",
        "warning",
        "{{ $labels.model }}: {{ $value | humanizePercentage }} of the first draft tokens pass, far below the usual",
    ),
    Alert(
        "DSparkDrafterProposesNothing",
        f"sum by ({REPLICA}) (rate(dspark_accepted_length_count[15m])) > 0"
        f" and sum by ({REPLICA}) (rate(dspark_draft_tokens_proposed_total[15m])) == 0"
        f' unless sum by ({REPLICA}) (rate(dspark_steps_total{{mode="plain"}}[15m])) > 0',
        "5m",
        "warning",
        "{{ $labels.model }}: replica {{ $labels.replica }} decodes, has a drafter, and drafts nothing",
    ),
    Alert(
        "DSparkCostCurveOff",
        f"{COST_CURVE} > 1.5 or {COST_CURVE} < 0.67",
        "15m",
        "warning",
        "{{ $labels.model }}: steps of replica {{ $labels.replica }} take {{ $value | humanize }} times what the cost "
        "curve expects, so verify budgets are wrong",
    ),
    Alert(
        "DSparkCalibrationOff",
        f"max by ({REPLICA}) (dspark_calibration_error_ratio) > {CALIBRATION_LIMIT:g}"
        f" and sum by ({REPLICA}) (rate(dspark_draft_tokens_verified_total[15m])) > 0",
        "15m",
        "warning",
        "{{ $labels.model }}: drafts of replica {{ $labels.replica }} survive {{ $value | humanizePercentage }} more "
        "or less often than predicted, so the wrong ones are verified",
    ),
    Alert(
        "DSparkSchedulerStale",
        f'sum by ({GROUP}) (rate(dspark_steps_total{{mode=~"local|bypass|lease"}}[5m])) > 0'
        f" unless sum by ({GROUP}) (rate(dspark_scheduler_leases_total[5m])) > 0",
        "5m",
        "warning",
        "{{ $labels.model }}: the fleet's scheduler has made no lease for 5 minutes; engines decide for themselves",
    ),
)


def group() -> dict[str, Any]:
    """The rule group of all alerts."""
    return {"name": "dspark-alerts", "rules": [alert.rule() for alert in ALERTS]}
