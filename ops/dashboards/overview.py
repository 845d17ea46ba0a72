"""Overview: is it healthy?"""

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
    quantile,
    quantiles,
    rate,
    ratio,
    stat,
)
from ops.slo import OBJECTIVES

TTFT, TPOT = OBJECTIVES


def _slow(threshold_seconds: float) -> tuple[tuple[float | None, str], ...]:
    return (None, GREEN), (threshold_seconds / 2, YELLOW), (threshold_seconds, RED)


NOW = Row(
    "Now",
    (
        stat(
            "Engines",
            "Engines whose process reported in the last seconds. Fewer than deployed: one is loading, dead or stuck.",
            "short",
            f"count(dspark_requests_running{{{ENGINE}}}) or vector(0)",
            thresholds=((None, RED), (1, GREEN)),
            runbook="dsparknoengine",
        ),
        stat("Requests", "Choices finished per second.", "reqps", rate("dspark_requests_total", HTTP)),
        stat("Output", "Tokens generated per second.", "tokens/s", rate("dspark_generated_tokens_total", ENGINE)),
        stat(
            "TTFT p95",
            "Arrival to first token, as clients feel it. Red from the objective's threshold on.",
            "s",
            quantile("dspark_ttft_seconds", HTTP, 0.95),
            thresholds=_slow(TTFT.threshold_seconds),
            runbook="first-tokens-are-slow",
        ),
        stat(
            "TPOT p95",
            "Mean time of an answer's tokens after the first. Red from the objective's threshold on.",
            "s",
            quantile("dspark_tpot_seconds", HTTP, 0.95),
            thresholds=_slow(TPOT.threshold_seconds),
            runbook="dsparkerrorbudgetburn",
        ),
        stat(
            "Refused",
            "Requests per second that no engine took: all were full, none kept a promise, or none was there.",
            "reqps",
            rate("dspark_requests_shed_total", HTTP),
            thresholds=((None, GREEN), (0.01, RED)),
            runbook="dsparkrequestsshed",
        ),
    ),
)

LOAD = Row(
    "Load",
    (
        Panel(
            "Running and waiting",
            "Sequences with a place in the batch, and those in the queue. A queue that never empties is too much load.",
            "short",
            (
                Query(f"sum by (replica) (dspark_requests_running{{{ENGINE}}})", "replica {{replica}}, running"),
                Query(f"sum by (replica) (dspark_requests_waiting{{{ENGINE}}})", "replica {{replica}}, waiting"),
            ),
            runbook="dsparkqueuegrowing",
        ),
        Panel(
            "Output by replica",
            "Tokens per second of each engine. Uneven: requests of very different lengths, or a slow node.",
            "tokens/s",
            (Query(rate("dspark_generated_tokens_total", ENGINE, "replica"), "replica {{replica}}"),),
            stacked=True,
        ),
        Panel(
            "Finished choices",
            "Per second and reason. abort: the client left, or the engine was lost.",
            "reqps",
            (Query(rate("dspark_requests_total", HTTP, "finish_reason"), "{{finish_reason}}"),),
            stacked=True,
        ),
    ),
)

LATENCY = Row(
    "Latency, as clients feel it",
    (
        Panel(
            "Time to first token",
            "Arrival to first token: queue, prefill, one step.",
            "s",
            quantiles("dspark_ttft_seconds", HTTP),
            thresholds=_slow(TTFT.threshold_seconds),
            runbook="first-tokens-are-slow",
        ),
        Panel(
            "Time per output token",
            "Mean over each answer after its first token. Speculation pays here.",
            "s",
            quantiles("dspark_tpot_seconds", HTTP),
            thresholds=_slow(TPOT.threshold_seconds),
            runbook="dsparkerrorbudgetburn",
        ),
        Panel(
            "Request duration",
            "Arrival to last token. Depends on how long the answers are: compare with itself, not with a limit.",
            "s",
            quantiles("dspark_request_seconds", HTTP),
        ),
    ),
)

MEMORY = Row(
    "Keys and values",
    (
        Panel(
            "KV blocks in use",
            "Share of the pool that running sequences hold. Full with preemptions: some are recomputed, not continued.",
            "percentunit",
            (Query(f"max by (replica) (dspark_kv_cache_usage_ratio{{{ENGINE}}})", "replica {{replica}}"),),
            thresholds=((None, GREEN), (0.8, YELLOW), (0.95, RED)),
            runbook="dsparkkvexhausted",
            maximum=1,
        ),
        Panel(
            "Preemptions",
            "Sequences per second that gave up their blocks and will be recomputed. Work done twice.",
            "ops",
            (Query(rate("dspark_preemptions_total", ENGINE, "replica"), "replica {{replica}}"),),
            thresholds=((None, GREEN), (0.1, YELLOW), (1, RED)),
            runbook="dsparkkvexhausted",
        ),
        Panel(
            "Prefix cache",
            "Share of prompt tokens that need no computing because an earlier prompt began the same way.",
            "percentunit",
            (Query(ratio("dspark_prefix_cache_hit_tokens_total", "dspark_prompt_tokens_total", ENGINE), "hits"),),
            runbook="first-tokens-are-slow",
            maximum=1,
        ),
    ),
)

STEPS = Row(
    "Engine steps",
    (
        Panel(
            "Step duration",
            "One forward of the whole batch with drafting and acceptance. Every running request waits for it.",
            "s",
            quantiles("dspark_step_seconds", ENGINE),
        ),
        Panel(
            "Rows per step",
            "Anchors, drafts and prefill tokens of one step. Near max_num_batched_tokens, prefill crowds decoding.",
            "tokens",
            quantiles("dspark_step_tokens", ENGINE, of=(0.5, 0.95)),
        ),
        Panel(
            "Engines lost",
            "Engines that died, hung or lost a rank in the last hour, and were replaced.",
            "short",
            (Query(f"sum(increase(dspark_engines_lost_total{{{HTTP}}}[1h]))", "lost"),),
            thresholds=((None, GREEN), (1, YELLOW), (3, RED)),
            runbook="dsparkenginerestarting",
        ),
    ),
)

DASHBOARD = Dashboard("dspark-overview", "DSpark / Overview", "Is it healthy?", (NOW, LOAD, LATENCY, MEMORY, STEPS))
