"""Which metrics the code exposes, and which ones a text asks for."""

from __future__ import annotations

import re

from cluster.metrics import HubMetrics, SchedulerMetrics, ServiceMetrics
from ops.metrics_reference import engine_metrics


def known() -> set[str]:
    """Every sample name of a scrape."""
    processes = (engine_metrics(), ServiceMetrics(), SchedulerMetrics(), HubMetrics())
    return {sample.name for each in processes for family in each.registry.collect() for sample in family.samples}


def named(text: str) -> set[str]:
    """Every metric name in PromQL, YAML or JSON. What rules record (level:metric:operation) is not one of ours."""
    return set(re.findall(r"(?<![\w:])dspark_[a-z_]+(?![\w:])", text))


def recorded(text: str) -> set[str]:
    """Every name of a recording rule that a text asks for or defines."""
    return set(re.findall(r"\b\w+:dspark\w*:\w+", text))
