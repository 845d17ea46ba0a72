"""Metrics say what happened: identities between counters, one scrape for many processes, and a page in step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cluster.exposition import Exposition, merge
from cluster.messages import LoadReport, StepPrediction, StepResult, TokenEvent, VerifyRound
from cluster.metrics import EXPERT_LOAD_CHOICES, EngineMetrics, ServiceMetrics
from ops.metrics_reference import reference

REPORT = LoadReport(step=0, num_prefill_tokens=0, context_tokens=0, num_waiting=3, drafted=True)
STEP = StepResult(step=0, events=(), report=REPORT, num_tokens=8, seconds=0.03, draft_seconds=0.004, mode="local")


def values(text: str) -> dict[tuple[str, ...], float]:
    """(sample name, label values...) -> value."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@st.composite
def rounds(draw: st.DrawFn) -> VerifyRound:
    proposed = draw(st.integers(0, 7))
    verified = draw(st.integers(0, proposed))
    return VerifyRound(proposed, verified, draw(st.integers(0, verified)))


@settings(deadline=None)  # a registry takes what it takes on a busy machine
@given(st.lists(st.lists(rounds(), max_size=5), max_size=5))
def test_accepted_length_is_one_plus_the_sum_over_positions(steps: list[list[VerifyRound]]) -> None:
    metrics = EngineMetrics(num_kv_blocks=10, block_size=7)
    for step in steps:
        metrics.observe_step(replace(STEP, rounds=tuple(step)))
    seen = values(metrics.text())

    def total(name: str) -> float:
        return sum(value for key, value in seen.items() if key[0] == name)

    num_rounds = seen["dspark_accepted_length_count",]
    assert num_rounds == sum(len(step) for step in steps)
    assert seen["dspark_accepted_length_sum",] == num_rounds + total("dspark_draft_tokens_accepted_total")
    assert total("dspark_draft_tokens_verified_total") == seen["dspark_budget_used_tokens_total",]
    assert total("dspark_draft_tokens_proposed_total") == (
        total("dspark_draft_tokens_verified_total") + seen["dspark_draft_tokens_trimmed_total",]
    )


def test_the_load_of_experts_is_judged_by_what_is_recent() -> None:
    """Nothing is said from few choices, and an imbalance that has gone leaves no trace."""
    load = {3: [0, 0, 0, 0], 5: [0, 0, 0, 0]}
    metrics = EngineMetrics(num_kv_blocks=10, block_size=4, expert_load=lambda: {k: [*v] for k, v in load.items()})
    load[5][0] = EXPERT_LOAD_CHOICES - 1
    assert "dspark_expert_load_ratio{" not in metrics.text()
    load[3] = [EXPERT_LOAD_CHOICES * share // 8 for share in (4, 2, 1, 1)]
    seen = values(metrics.text())
    assert seen["dspark_expert_load_ratio", "3"] == 2
    assert ("dspark_expert_load_ratio", "5") not in seen
    load[3] = [count + EXPERT_LOAD_CHOICES // 4 for count in load[3]]
    assert values(metrics.text())["dspark_expert_load_ratio", "3"] == 1


def test_a_prefix_counts_once_at_each_of_its_positions() -> None:
    metrics = EngineMetrics(num_kv_blocks=10, block_size=4)
    metrics.observe_step(replace(STEP, rounds=(VerifyRound(4, 3, 1), VerifyRound(4, 2, 2)), cap=6))
    seen = values(metrics.text())
    assert [seen["dspark_draft_tokens_proposed_total", str(k), "default"] for k in range(4)] == [2, 2, 2, 2]
    assert [seen["dspark_draft_tokens_verified_total", str(k), "default"] for k in range(4)] == [2, 2, 1, 0]
    assert [seen["dspark_draft_tokens_accepted_total", str(k), "default"] for k in range(4)] == [2, 1, 0, 0]
    assert seen["dspark_budget_granted_tokens_total",] == 6
    assert seen["dspark_draft_tokens_trimmed_total",] == 3


def test_load_and_step_times() -> None:
    metrics = EngineMetrics(num_kv_blocks=10, block_size=1)
    event = TokenEvent("a", (5, 6, 7))
    step = replace(
        STEP,
        events=(event,),
        num_running=2,
        num_free_kv_blocks=4,
        num_preempted=1,
        predicted=StepPrediction(0.02, 0.01, 0.0),
    )
    metrics.observe_step(replace(step, num_prompt_tokens=30, num_cached_prompt_tokens=16))
    seen = values(metrics.text())
    assert seen["dspark_requests_running",] == 2
    assert seen["dspark_requests_waiting",] == 3
    assert seen["dspark_preemptions_total",] == 1
    assert seen["dspark_kv_cache_usage_ratio",] == pytest.approx(0.6)
    assert (seen["dspark_prompt_tokens_total",], seen["dspark_prefix_cache_hit_tokens_total",]) == (30, 16)
    assert seen["dspark_generated_tokens_total",] == 3
    assert seen["dspark_steps_total", "local"] == 1 and seen["dspark_steps_total", "bypass"] == 0
    assert seen["dspark_step_measured_over_predicted_sum",] == pytest.approx(1.5)
    assert seen["dspark_step_seconds_bucket", "0.03"] == 1 and seen["dspark_step_seconds_bucket", "0.02"] == 0


def test_plain_decoding_needs_one_step_for_each_token_of_a_round() -> None:
    metrics = EngineMetrics(num_kv_blocks=10, block_size=4)
    step = replace(STEP, predicted=StepPrediction(0.05, 0.02, 0.01))
    metrics.observe_step(replace(step, rounds=(VerifyRound(4, 4, 3), VerifyRound(4, 4, 0))))  # 5 tokens of 2 requests
    # A prompt alone takes as long without speculation.
    metrics.observe_step(replace(STEP, predicted=StepPrediction(0.02, 0.0, 0.02)))
    metrics.observe_step(STEP)  # no curve, no opinion
    seen = values(metrics.text())
    assert seen["dspark_step_plain_seconds_total",] == pytest.approx(0.02 * 2.5 + 0.01 + 0.02)
    assert seen["dspark_step_measured_seconds_total",] == pytest.approx(0.06)


def test_a_step_that_could_draft_and_did_not_is_counted_as_skipped() -> None:
    idle = replace(STEP, report=replace(REPORT, drafted=False))
    metrics = EngineMetrics(num_kv_blocks=10, block_size=1)
    for step in (idle, replace(idle, rounds=(VerifyRound(0, 0, 0),)), replace(STEP, rounds=(VerifyRound(1, 1, 1),))):
        metrics.observe_step(step)
    metrics.observe_step(replace(idle, rounds=(VerifyRound(0, 0, 0),), mode="plain"))  # no drafter: nothing to skip
    seen = values(metrics.text())
    assert seen["dspark_drafter_skipped_steps_total",] == 1
    assert seen["dspark_draft_seconds_count",] == 1


def test_requests_as_clients_feel_them() -> None:
    metrics = ServiceMetrics()
    metrics.observe_request("stop", ttft_seconds=0.2, request_seconds=1.2, num_tokens=11)
    metrics.observe_request("length", ttft_seconds=0.2, request_seconds=0.2, num_tokens=1)
    metrics.observe_request("abort", ttft_seconds=None, request_seconds=0.1, num_tokens=0)
    metrics.observe_shed("default", "queue_full")
    seen = values(metrics.text())
    assert [seen["dspark_requests_total", reason] for reason in ("stop", "length", "abort")] == [1, 1, 1]
    assert seen["dspark_requests_shed_total", "queue_full", "default"] == 1  # labels stand in order of their names
    assert seen["dspark_ttft_seconds_count",] == 2
    assert seen["dspark_tpot_seconds_count",] == 1 and seen["dspark_tpot_seconds_sum",] == pytest.approx(0.1)
    assert seen["dspark_request_seconds_count",] == 3


def test_drafts_and_promises_are_counted_by_tier() -> None:
    engine = EngineMetrics(num_kv_blocks=10, block_size=2, tiers=["slow", "fast"])
    engine.observe_step(replace(STEP, rounds=(VerifyRound(2, 2, 1, tier=1), VerifyRound(1, 1, 0))))
    seen = values(engine.text())
    assert [seen["dspark_draft_tokens_verified_total", position, "fast"] for position in "01"] == [1, 1]
    assert [seen["dspark_draft_tokens_verified_total", position, "slow"] for position in "01"] == [1, 0]
    service = ServiceMetrics(["slow", "fast"])
    service.observe_sla("fast", [])
    service.observe_sla("fast", ["ttft", "speed"])
    service.observe_admission("fast", "waited")
    seen = values(service.text())
    assert (seen["dspark_sla_requests_total", "fast"], seen["dspark_sla_requests_good_total", "fast"]) == (2, 1)
    assert (seen["dspark_sla_requests_total", "slow"], seen["dspark_sla_requests_good_total", "slow"]) == (0, 0)
    broken = {key[1]: value for key, value in seen.items() if key[0] == "dspark_sla_promises_broken_total"}
    assert broken.keys() == {"ttft", "speed", "answer"}
    assert seen["dspark_sla_promises_broken_total", "speed", "fast"] == 1
    assert seen["dspark_sla_admissions_total", "waited", "fast"] == 1


def test_merge_gives_one_scrape_with_each_family_declared_once() -> None:
    engines = [EngineMetrics(num_kv_blocks=10, block_size=2) for _ in range(2)]
    for engine, num_accepted in zip(engines, (1, 2), strict=True):
        engine.observe_step(replace(STEP, rounds=(VerifyRound(2, 2, num_accepted),)))
    texts = [Exposition("a", 0, engines[0].text()), Exposition("b", 0, engines[1].text())]
    text = merge([*texts, Exposition("a", 0, ServiceMetrics().text())], "m")
    declared = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    assert "_created" not in text
    assert 'dspark_accepted_length_sum{model="m",rank="0",replica="a"} 2.0' in text
    assert 'dspark_accepted_length_sum{model="m",rank="0",replica="b"} 3.0' in text
    assert 'dspark_draft_tokens_accepted_total{model="m",position="1",rank="0",replica="b",tier="default"} 1.0' in text
    assert "# TYPE dspark_draft_tokens_accepted_total counter" in text
    assert merge([], "m") == ""


def test_every_name_carries_the_prefix_and_says_what_it_means() -> None:
    for metrics in (EngineMetrics(num_kv_blocks=1, block_size=1), ServiceMetrics()):
        for family in metrics.registry.collect():
            assert family.name.startswith("dspark_") and family.documentation


def test_the_page_is_in_step_with_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == reference(), "run: python -m ops.metrics_reference > docs/metrics.md"
