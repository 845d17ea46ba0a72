"""Which metrics the code exposes, and which ones a text asks for."""

from __future__ import annotations

import re

from cluster.metrics import EngineMetrics, ServiceMetrics


def known() -> set[str]:
    """Every sample name of a scrape."""
    registries = (EngineMetrics(num_kv_blocks=1, block_size=1).registry, ServiceMetrics().registry)
    return {sample.name for registry in registries for family in registry.collect() for sample in family.samples}


def named(text: str) -> set[str]:
    """Every metric name in PromQL, YAML or JSON."""
    return set(re.findall(r"\bdspark_[a-z_]+", text))
