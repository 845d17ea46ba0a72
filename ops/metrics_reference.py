"""Writes docs/metrics.md from cluster/metrics.py: `python -m ops.metrics_reference > docs/metrics.md`."""

from __future__ import annotations

from typing import Any

from cluster.metrics import EXPERT_LOAD_CHOICES, EngineMetrics, HubMetrics, SchedulerMetrics, ServiceMetrics

HEADER = """# Metrics

Made by `python -m ops.metrics_reference > docs/metrics.md`; don't edit.

`/metrics` on the serving port gives all of them. Each sample also carries `model`, `replica` and `rank`.
Position 0 is the first draft token after the last committed one. These hold by construction:

- accepted length = 1 + the sum over positions of accepted tokens per round
- proposed = verified + trimmed, budget used = verified, at every moment
- prefix-cache ratio: `rate(dspark_prefix_cache_hit_tokens_total[5m]) / rate(dspark_prompt_tokens_total[5m])`
- speed-up over plain decoding, by the cost curve:
  `rate(dspark_step_plain_seconds_total[5m]) / rate(dspark_step_measured_seconds_total[5m])`
- the cost curve is right while measured over predicted seconds stays near 1:
  `rate(dspark_step_measured_seconds_total[5m]) / rate(dspark_step_predicted_seconds_total[5m])`
"""


def engine_metrics() -> EngineMetrics:
    """An engine's, each with at least one series."""
    metrics = EngineMetrics(num_kv_blocks=1, block_size=1, expert_load=lambda: {0: [EXPERT_LOAD_CHOICES]})
    metrics.text()  # asks for the load
    return metrics


def reference() -> str:
    """The whole page, Markdown."""
    sections = [
        ("An engine", engine_metrics()),
        ("The HTTP side", ServiceMetrics()),
        ("The fleet's scheduler", SchedulerMetrics()),
        ("Engines that are gone", HubMetrics()),
    ]
    lines = [HEADER]
    for title, metrics in sections:
        lines += [f"## {title}", "", "| name | type | labels | meaning |", "|---|---|---|---|"]
        families = [family for family in metrics.registry.collect() if not family.name.endswith("_created")]
        lines += [_row(family) for family in families]
        if histograms := [family for family in families if family.type == "histogram"]:
            lines += ["", "Buckets:", "", *(f"- `{family.name}`: {_buckets(family)}" for family in histograms)]
        lines.append("")
    return "\n".join(lines)


def _row(family: Any) -> str:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    return f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |"


def _buckets(family: Any) -> str:
    bounds = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
    return ", ".join(bound.removesuffix(".0") for bound in bounds)


if __name__ == "__main__":
    print(reference(), end="")
