"""SLA: is what was promised kept? Burn rates are those that the recording rules of ops/rules record."""

from __future__ import annotations

from ops.dashboards.model import GREEN, HTTP, RED, WINDOW, YELLOW, Dashboard, Panel, Query, Row, quantiles, rate, stat
from ops.rules.recording import burn_rate_name, error_ratio_name
from ops.slo import BURN_WINDOWS, OBJECTIVES, Objective

RUNBOOK = "dsparkerrorbudgetburn"


def _attained(objective: Objective) -> str:
    good = f'{objective.histogram}_bucket{{{HTTP}, le="{objective.threshold_seconds}"}}'
    total = rate(f"{objective.histogram}_count", HTTP)
    if objective.refusals:
        total = f"({total} + {rate(objective.refusals, HTTP)})"
    return f"sum(rate({good}[{WINDOW}])) / {total}"


def _budget_left(objective: Objective) -> str:
    spent = f'max({error_ratio_name("3d")}{{{HTTP}, slo="{objective.name}"}}) / {objective.budget}'
    return f"1 - {spent}"


def _now() -> Row:
    panels = []
    for objective in OBJECTIVES:
        name, target = objective.name.upper(), objective.target
        panels += [
            stat(
                f"{name} attained",
                f"Share of good events now. The promise, for {target:.0%} of them: {objective.meaning}.",
                "percentunit",
                _attained(objective),
                thresholds=((None, RED), (target, YELLOW), ((1 + target) / 2, GREEN)),
                runbook=RUNBOOK,
            ),
            stat(
                f"{name} burn",
                "How many times too fast the error budget goes, over an hour. At 1 it lasts exactly its month.",
                "x",
                f'max({burn_rate_name("1h")}{{{HTTP}, slo="{objective.name}"}})',
                thresholds=((None, GREEN), (1, YELLOW), (6, RED)),
                runbook=RUNBOOK,
            ),
            stat(
                f"{name} 3-day budget",
                "What is left of the errors that three days may have. Below 0 the promise was broken over them.",
                "percentunit",
                _budget_left(objective),
                thresholds=((None, RED), (0, YELLOW), (0.5, GREEN)),
                runbook=RUNBOOK,
                minimum=None,
            ),
        ]
    return Row("Now", tuple(panels))


def _attainment() -> Row:
    attained = tuple(Query(_attained(objective), objective.name) for objective in OBJECTIVES)
    targets = tuple(Query(f"vector({o.target})", f"{o.name} target") for o in OBJECTIVES)
    distributions = [
        Panel(
            f"{objective.name.upper()} against its limit",
            f"Good: {objective.meaning}.",
            "s",
            (
                *quantiles(objective.histogram, HTTP, of=(0.5, objective.target)),
                Query(f"vector({objective.threshold_seconds})", "limit"),
            ),
            thresholds=((None, GREEN), (objective.threshold_seconds, RED)),
            runbook=RUNBOOK,
        )
        for objective in OBJECTIVES
    ]
    share = Panel(
        "Attainment",
        "Share of good events of each objective, and the share that was promised.",
        "percentunit",
        (*attained, *targets),
        thresholds=((None, RED), (min(o.target for o in OBJECTIVES), GREEN)),
        runbook=RUNBOOK,
        maximum=1,
    )
    return Row("Attainment", (share, *distributions))


def _burn() -> Row:
    panels = []
    for severity in ("critical", "warning"):
        windows = [window for window in BURN_WINDOWS if window.severity == severity]
        limits = ", ".join(f"{w.factor:g} over {w.long} and {w.short}" for w in windows)
        queries = [
            Query(f"max by (slo) ({burn_rate_name(length)}{{{HTTP}}})", f"{{{{slo}}}}, {length}")
            for window in windows
            for length in (window.long, window.short)
        ]
        panels.append(
            Panel(
                f"Burn rate, {severity} windows",
                f"The {severity} alert comes at {limits}. Short and long must agree, so that a spike pages nobody.",
                "x",
                tuple(queries),
                thresholds=((None, GREEN), (1, YELLOW), (min(w.factor for w in windows), RED)),
                runbook=RUNBOOK,
                width=12,
            )
        )
    return Row("Error budget", tuple(panels))


def _refusals() -> Row:
    refused = Panel(
        "Refused",
        "Requests per second answered with 429. Each counts as a late first token.",
        "reqps",
        (Query(rate("dspark_requests_shed_total", HTTP), "refused"),),
        thresholds=((None, GREEN), (0.01, RED)),
        runbook="dsparkrequestsshed",
        width=12,
    )
    finished = Panel(
        "Finished",
        "Choices per second that ended, for scale.",
        "reqps",
        (Query(rate("dspark_requests_total", HTTP), "finished"),),
        width=12,
    )
    return Row("What it is measured on", (finished, refused))


DASHBOARD = Dashboard(
    "dspark-sla", "DSpark / SLA", "Is the promise kept?", (_now(), _attainment(), _burn(), _refusals())
)
