"""SLA: is what was promised kept? Burn rates are those that the recording rules of ops/rules record."""

from __future__ import annotations

from ops.dashboards.model import (
    GREEN,
    HTTP,
    RED,
    WINDOW,
    YELLOW,
    Dashboard,
    Panel,
    Query,
    Row,
    quantiles,
    rate,
    ratio,
    stat,
)
from ops.rules.recording import burn_rate_name, error_ratio_name
from ops.slo import BURN_WINDOWS, OBJECTIVES, TIERS, BurnWindow, Objective

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


def _burns(window: BurnWindow) -> str:
    """The smaller one of its two rates, by objective; the worst tier counts."""
    long, short = (f"max by (slo) ({burn_rate_name(length)}{{{HTTP}}})" for length in (window.long, window.short))
    return f"{long} < {short} or {short}"


def _burn() -> Row:
    panels = []
    for severity in ("critical", "warning"):
        windows = [window for window in BURN_WINDOWS if window.severity == severity]
        limits = ", ".join(f"{w.factor:g} over {w.long} and {w.short}" for w in windows)
        queries = [Query(_burns(w), f"{{{{slo}}}}, {w.long} and {w.short}") for w in windows]
        panels.append(
            Panel(
                f"Burn rate, {severity} windows",
                f"The smaller one of a long and a short window, since both must agree: a spike pages nobody. The "
                f"{severity} alert comes at {limits}.",
                "x",
                tuple(queries),
                thresholds=((None, GREEN), (1, YELLOW), (min(w.factor for w in windows), RED)),
                runbook=RUNBOOK,
                width=12,
            )
        )
    return Row("Error budget", tuple(panels))


def _tiers() -> Row:
    kept = Panel(
        "Promises kept by tier",
        f"Share of the choices for which {TIERS.meaning}. A tier that promises nothing is always at 100%.",
        "percentunit",
        (
            Query(ratio("dspark_sla_requests_good_total", "dspark_sla_requests_total", HTTP, "tier"), "{{tier}}"),
            Query(f"vector({TIERS.target})", "target"),
        ),
        thresholds=((None, RED), (TIERS.target, GREEN)),
        runbook="a-tiers-promises-are-broken",
        maximum=1,
    )
    broken = Panel(
        "Promises broken",
        "Per second: ttft, a late first token; speed, tokens too slow; answer, refused or failed.",
        "ops",
        (Query(rate("dspark_sla_promises_broken_total", HTTP, "tier, promise"), "{{tier}}, {{promise}}"),),
        stacked=True,
        runbook="a-tiers-promises-are-broken",
    )
    admitted = Panel(
        "How promised speeds found a replica",
        "Choices per second. met: one that keeps it; waited: so, after a wait; unmet: none could, served all the same; "
        "unknown: no engine had said.",
        "ops",
        (Query(rate("dspark_sla_admissions_total", HTTP, "tier, outcome"), "{{tier}}, {{outcome}}"),),
        stacked=True,
        runbook="a-tiers-promises-are-broken",
    )
    return Row("SLA tiers", (kept, broken, admitted))


def _refusals() -> Row:
    refused = Panel(
        "Refused",
        "Requests per second that no engine took, and why. Each counts as a late first token.",
        "reqps",
        (Query(rate("dspark_requests_shed_total", HTTP, "tier, reason"), "{{tier}}, {{reason}}"),),
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
    "dspark-sla", "DSpark / SLA", "Is the promise kept?", (_now(), _attainment(), _burn(), _tiers(), _refusals())
)
