"""The recording rules: what dashboards and alerts ask again and again, computed once.

Names follow level:metric:operation. Rates come before sums, so a restarted engine's counters don't fall. Ratios divide
by what is above 0 only: idle time records nothing, where the NaN of 0 / 0 would spoil every mean over it.
"""

from __future__ import annotations

from typing import Any

from ops.slo import GROUP, OBJECTIVES, TIERS, WINDOWS, Objective, TierObjective

Rule = dict[str, Any]
"""One rule as Prometheus' YAML has it."""

ACCEPTANCE = "model:dspark_first_draft:acceptance30m"
"""Share of the verified drafts at position 0 that passed. Unlike the accepted length it doesn't fall with load."""
ACCEPTED_LENGTH = "model:dspark_accepted_length:mean5m"
COST_CURVE = "model_replica:dspark_step_seconds:measured_over_predicted15m"
SPEEDUP = "model:dspark_speedup:ratio5m"


def error_ratio_name(window: str) -> str:
    """Share of bad events over `window`, by `slo`."""
    return f"slo:dspark_errors:ratio{window}"


def burn_rate_name(window: str) -> str:
    """How many times faster than allowed the budget goes, over `window`, by `slo`."""
    return f"slo:dspark_burn_rate:ratio{window}"


def groups() -> list[dict[str, Any]]:
    """The rule groups, in the order of their evaluation."""
    return [
        {"name": "dspark-speculation", "rules": _speculation()},
        {
            "name": "dspark-slo",
            "rules": [rule for o in (*OBJECTIVES, TIERS) for window in WINDOWS for rule in _slo(o, window)],
        },
    ]


def _speculation() -> list[Rule]:
    def ratio(numerator: str, denominator: str, window: str, by: str = GROUP) -> str:
        return f"sum by ({by}) (rate({numerator}[{window}])) / (sum by ({by}) (rate({denominator}[{window}])) > 0)"

    first = '{position="0"}'
    return [
        {
            "record": ACCEPTED_LENGTH,
            "expr": ratio("dspark_accepted_length_sum", "dspark_accepted_length_count", "5m"),
        },
        {
            "record": ACCEPTANCE,
            "expr": ratio(
                f"dspark_draft_tokens_accepted_total{first}", f"dspark_draft_tokens_verified_total{first}", "30m"
            ),
        },
        {
            "record": SPEEDUP,
            "expr": ratio("dspark_step_plain_seconds_total", "dspark_step_measured_seconds_total", "5m"),
        },
        {
            "record": COST_CURVE,
            "expr": ratio(
                "dspark_step_measured_seconds_total",
                "dspark_step_predicted_seconds_total",
                "15m",
                by=f"{GROUP}, replica",
            ),
        },
    ]


def _slo(objective: Objective | TierObjective, window: str) -> list[Rule]:
    selected = f'{error_ratio_name(window)}{{slo="{objective.name}"}}'
    return [
        {
            "record": error_ratio_name(window),
            "labels": {"slo": objective.name},
            "expr": f"1 - {objective.good(window)} / ({objective.total(window)} > 0)",
        },
        {
            "record": burn_rate_name(window),
            "labels": {"slo": objective.name},
            "expr": f"{selected} / {objective.budget}",
        },
    ]
