"""Scheduler: who decides how much is verified, and is it right?"""

from __future__ import annotations

from ops.dashboards.model import (
    ENGINE,
    GREEN,
    HTTP,
    RED,
    YELLOW,
    Dashboard,
    Panel,
    Query,
    Row,
    Threshold,
    quantiles,
    rate,
    ratio,
    stat,
)
from ops.rules.alerts import CALIBRATION_LIMIT

MEASURED = "dspark_step_measured_seconds_total"
PREDICTED = "dspark_step_predicted_seconds_total"
STEPS = "dspark_step_measured_over_predicted_count"
"""Those with a prediction."""
VERIFIED = "dspark_draft_tokens_verified_total"
CURVE: tuple[Threshold, ...] = ((None, RED), (0.67, YELLOW), (0.8, GREEN), (1.25, YELLOW), (1.5, RED))
"""Measured over predicted step time. The alert's limits are the red ones."""
CALIBRATED: tuple[Threshold, ...] = ((None, GREEN), (0.05, YELLOW), (CALIBRATION_LIMIT, RED))


def _mode(mode: str) -> str:
    selected = f'{ENGINE}, mode="{mode}"'
    return f"{rate('dspark_steps_total', selected)} / {rate('dspark_steps_total', ENGINE)}"


NOW = Row(
    "Now",
    (
        stat(
            "Decided by the fleet",
            "Share of the steps that followed a lease of the fleet's scheduler.",
            "percentunit",
            _mode("lease"),
            runbook="dsparkschedulerstale",
        ),
        stat(
            "Decided by the engine",
            "Share of the steps whose budget the engine's own search set: requests came or left, or there is no lease.",
            "percentunit",
            _mode("local"),
            runbook="dsparkschedulerstale",
        ),
        stat(
            "Nothing to decide",
            "Share of the steps where all that was proposed fitted, so that no search was needed.",
            "percentunit",
            _mode("bypass"),
        ),
        stat(
            "Measured / predicted",
            "Step time over what the cost curve expected. Budgets are as good as this is close to 1.",
            "x",
            ratio(MEASURED, PREDICTED, ENGINE),
            thresholds=CURVE,
            runbook="dsparkcostcurveoff",
        ),
        stat(
            "Calibration error",
            "How far the predicted survival of drafts is from what happens, at the worst position of any engine.",
            "percentunit",
            f"max(dspark_calibration_error_ratio{{{ENGINE}}})",
            thresholds=CALIBRATED,
            runbook="dsparkcalibrationoff",
        ),
        stat(
            "Budget used",
            "Share of the granted verify budget that steps used.",
            "percentunit",
            ratio("dspark_budget_used_tokens_total", "dspark_budget_granted_tokens_total", ENGINE),
        ),
    ),
)

WHO = Row(
    "Who decides",
    (
        Panel(
            "Steps by mode",
            "plain: no drafter. fixed: always the whole block. bypass: all fits. local: the engine. lease: the fleet.",
            "ops",
            (Query(rate("dspark_steps_total", ENGINE, "mode"), "{{mode}}"),),
            stacked=True,
            runbook="dsparkschedulerstale",
        ),
        Panel(
            "Steps without a draft pass",
            "Per second and replica: the budget was 0. Right when saturated; ends by itself.",
            "ops",
            (Query(rate("dspark_drafter_skipped_steps_total", ENGINE, "replica"), "replica {{replica}}"),),
            runbook="dsparkdrafterproposesnothing",
        ),
        Panel(
            "Load that the budget answers to",
            "Running sequences of each replica: budgets should fall as this rises.",
            "short",
            (Query(f"sum by (replica) (dspark_requests_running{{{ENGINE}}})", "replica {{replica}}"),),
        ),
    ),
)

FLEET = Row(
    "The fleet's scheduler",
    (
        Panel(
            "Engines that the scheduler knows",
            "Those that reported within three seconds. No line: the scheduler is dead, and engines decide themselves.",
            "short",
            (
                Query(f"max(dspark_scheduler_engines{{{HTTP}}})", "known"),
                Query(f"count(sum by (replica) (dspark_requests_running{{{ENGINE}}}))", "there are"),
            ),
            runbook="dsparkschedulerstale",
            width=6,
        ),
        Panel(
            "Age of the leases that engines hold",
            "At each step, since the engine asked for the newest one. A lease ends after a second.",
            "s",
            quantiles("dspark_lease_age_seconds", ENGINE),
            runbook="dsparkschedulerstale",
            width=6,
        ),
        Panel(
            "Time of one search over the fleet",
            "A round answers all engines that asked within 25 ms.",
            "s",
            quantiles("dspark_scheduler_allocate_seconds", HTTP),
            runbook="dsparkschedulerstale",
            width=6,
        ),
        Panel(
            "Reports and leases",
            "Per second, all engines. Fewer leases than reports: a lockstep group is not complete.",
            "ops",
            (
                Query(rate("dspark_scheduler_reports_total", HTTP), "reports"),
                Query(rate("dspark_scheduler_leases_total", HTTP), "leases"),
            ),
            runbook="dsparkschedulerstale",
            width=6,
        ),
    ),
)

BUDGET = Row(
    "The verify budget",
    (
        Panel(
            "Granted and used",
            "Draft tokens per step that could be verified, and that were.",
            "tokens",
            (
                Query(ratio("dspark_budget_granted_tokens_total", "dspark_steps_total", ENGINE), "granted"),
                Query(ratio("dspark_budget_used_tokens_total", "dspark_steps_total", ENGINE), "used"),
            ),
        ),
        Panel(
            "Used per round",
            "Draft tokens verified per request and step. Falls smoothly as load rises.",
            "tokens",
            (
                Query(
                    ratio("dspark_budget_used_tokens_total", "dspark_accepted_length_count", ENGINE, "replica"),
                    "replica {{replica}}",
                ),
            ),
        ),
        Panel(
            "Trimmed of proposed",
            "Share of the drafts that were paid for and not verified. High at low load: the cost curve is wrong.",
            "percentunit",
            (
                Query(
                    ratio("dspark_draft_tokens_trimmed_total", "dspark_draft_tokens_proposed_total", ENGINE, "replica"),
                    "replica {{replica}}",
                ),
            ),
            thresholds=((None, GREEN), (0.7, YELLOW), (0.9, RED)),
            runbook="many-drafts-are-trimmed",
            maximum=1,
        ),
    ),
)

RIGHT = Row(
    "Is the cost curve right",
    (
        Panel(
            "Measured over predicted step time",
            "Near 1: budgets are set by what steps cost. Away from 1: a neighbour, another machine, other threads.",
            "x",
            (Query(ratio(MEASURED, PREDICTED, ENGINE, "replica"), "replica {{replica}}"), Query("vector(1)", "right")),
            thresholds=CURVE,
            runbook="dsparkcostcurveoff",
        ),
        Panel(
            "Spread of measured over predicted",
            "Quantiles over steps. A wide spread with a right middle: noise, not a wrong curve.",
            "x",
            quantiles("dspark_step_measured_over_predicted", ENGINE, of=(0.1, 0.5, 0.9)),
            thresholds=CURVE,
            runbook="dsparkcostcurveoff",
        ),
        Panel(
            "Predicted and measured step time",
            "Mean of the steps, as the curve expected and as it came.",
            "s",
            (Query(ratio(PREDICTED, STEPS, ENGINE), "predicted"), Query(ratio(MEASURED, STEPS, ENGINE), "measured")),
            runbook="dsparkcostcurveoff",
        ),
    ),
)

TRUE = Row(
    "Are confidences true",
    (
        Panel(
            "Calibration error by position",
            "Predicted survival against what happened, lately, of the worst engine. A step that lasts: traffic or "
            "drafter changed, and refits are on their way.",
            "percentunit",
            (Query(f"max by (position) (dspark_calibration_error_ratio{{{ENGINE}}})", "position {{position}}"),),
            thresholds=CALIBRATED,
            runbook="dsparkcalibrationoff",
        ),
        Panel(
            "Calibration error by mode",
            "The worst position of each way to verify. coupled: requests with a seed; no data until enough came.",
            "percentunit",
            (Query(f"max by (mode) (dspark_calibration_error_ratio{{{ENGINE}}})", "{{mode}}"),),
            thresholds=CALIBRATED,
            runbook="dsparkcalibrationoff",
        ),
        Panel(
            "Confidence temperatures",
            "What each position's logits are divided by: refits move them by at most a fifth at a time. Above 1 the "
            "drafter was too sure of itself.",
            "x",
            (Query(f"avg by (position) (dspark_confidence_temperature{{{ENGINE}}})", "position {{position}}"),),
            runbook="dsparkcalibrationoff",
        ),
    ),
)

TIERS = Row(
    "SLA tiers",
    (
        Panel(
            "Verified drafts by tier",
            "Per second: who gets the verify budget.",
            "tokens/s",
            (Query(rate(VERIFIED, ENGINE, "tier"), "{{tier}}"),),
            stacked=True,
            runbook="a-tiers-promises-are-broken",
            width=12,
        ),
        Panel(
            "Verified of proposed by tier",
            "Share of each tier's drafts that the budget let through. Under load, promised speeds should get more.",
            "percentunit",
            (Query(ratio(VERIFIED, "dspark_draft_tokens_proposed_total", ENGINE, "tier"), "{{tier}}"),),
            runbook="a-tiers-promises-are-broken",
            maximum=1,
            width=12,
        ),
    ),
)

DASHBOARD = Dashboard(
    "dspark-scheduler",
    "DSpark / Scheduler",
    "Who decides the budget, and is it right?",
    (NOW, WHO, FLEET, BUDGET, TIERS, RIGHT, TRUE),
)
