"""What the service promises: the objectives, and the windows in which a broken promise raises an alarm.

Rules, the SLA dashboard and ops/slo.md come from these two tables: after a change, run `make generate`.
Thresholds are bounds of the histograms' buckets, else nothing could be counted against them.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "namespace, model"
"""What objectives are kept for. On one machine `namespace` is empty."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A share of events that must be good, over BUDGET_WINDOW."""

    name: str
    target: float
    threshold_seconds: float
    histogram: str
    refusals: str = ""
    """A counter whose events count as bad ones that no histogram saw."""
    meaning: str = ""

    def good(self, window: str) -> str:
        """PromQL: good events per second."""
        return f'sum by ({GROUP}) (rate({self.histogram}_bucket{{le="{self.threshold_seconds}"}}[{window}]))'

    def total(self, window: str) -> str:
        """PromQL: all events per second."""
        served = f"sum by ({GROUP}) (rate({self.histogram}_count[{window}]))"
        if not self.refusals:
            return served
        return f"({served} + sum by ({GROUP}) (rate({self.refusals}[{window}])))"

    @property
    def budget(self) -> float:
        """The share that may be bad."""
        return round(1 - self.target, 6)


@dataclass(frozen=True, slots=True)
class TierObjective:
    """A share of choices for which all that their SLA tier promises must be kept, for each tier by itself."""

    name: str
    target: float
    meaning: str

    def good(self, window: str) -> str:
        """PromQL: choices per second whose promises were kept, by tier."""
        return f"sum by ({GROUP}, tier) (rate(dspark_sla_requests_good_total[{window}]))"

    def total(self, window: str) -> str:
        """PromQL: all choices per second, by tier."""
        return f"sum by ({GROUP}, tier) (rate(dspark_sla_requests_total[{window}]))"

    @property
    def budget(self) -> float:
        """The share that may be bad."""
        return round(1 - self.target, 6)


@dataclass(frozen=True, slots=True)
class BurnWindow:
    """Alarm when the budget burns `factor` times as fast as it may, over `long` and, still, over `short`."""

    severity: str
    long: str
    short: str
    factor: float
    hold: str
    """How long it must last, as Prometheus writes durations."""

    @property
    def budget_spent(self) -> str:
        """Share of BUDGET_WINDOW's budget that is gone when the alarm comes."""
        hours = {"1h": 1, "6h": 6, "1d": 24, "3d": 72}[self.long]
        return f"{self.factor * hours / BUDGET_WINDOW_HOURS:.0%}"


BUDGET_WINDOW_HOURS = 30 * 24

OBJECTIVES = (
    Objective(
        name="ttft",
        target=0.95,
        threshold_seconds=2.0,
        histogram="dspark_ttft_seconds",
        refusals="dspark_requests_shed_total",
        meaning="the first token comes within 2 s; a refused request counts as late",
    ),
    Objective(
        name="tpot",
        target=0.95,
        threshold_seconds=0.1,
        histogram="dspark_tpot_seconds",
        meaning="the tokens after it come at 10 per second or faster, on average over the answer",
    ),
)

TIERS = TierObjective(
    name="tier",
    target=0.95,
    meaning="the first token and the speed that the request's tier promises are kept; no answer is a broken promise",
)
"""Tiers that promise nothing never break it."""

BURN_WINDOWS = (
    BurnWindow("critical", long="1h", short="5m", factor=14.4, hold="2m"),
    BurnWindow("critical", long="6h", short="30m", factor=6.0, hold="15m"),
    BurnWindow("warning", long="1d", short="2h", factor=3.0, hold="1h"),
    BurnWindow("warning", long="3d", short="6h", factor=1.0, hold="3h"),
)

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
"""Every window that a burn rate is recorded for."""


def page() -> str:
    """ops/slo.md, from the tables."""
    lines = [
        "# What is promised",
        "",
        "Made by `python -m ops.slo > ops/slo.md` from the tables in `ops/slo.py`; don't edit.",
        "",
        "| objective | of all events, in 30 days | good is |",
        "|---|---|---|",
        *(f"| {o.name} | {o.target:.0%} | {o.meaning} |" for o in (*OBJECTIVES, TIERS)),
        "",
        "An alert comes when the error budget burns this many times faster than it may, over both windows:",
        "",
        "| severity | long window | short window | factor | gone by then | must last |",
        "|---|---|---|---|---|---|",
        *(
            f"| {w.severity} | {w.long} | {w.short} | {w.factor:g} | {w.budget_spent} of a month's budget | {w.hold} |"
            for w in BURN_WINDOWS
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
