"""ADMIT in the running engine: the curve decides on reports two steps old; drafting is skipped and probed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import TinyDrafter, make_engine, prompts, random_drafter, request, run
from torch import Tensor

from cluster import profiler
from cluster.budget import encode_survival, paces, survival
from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.local_scheduler import FIRST_PROBE_STEPS, LONGEST_PROBE_STEPS, LOOK_EVERY_STEPS
from cluster.messages import BudgetLease, CostCurveError, InvalidRequestError, SlaTier, StepResult
from cluster.models.loader import load_decoder
from cluster.shard import Shard
from cluster.sla import START_PACE
from cluster.sps import CostCurve, DraftSample, Provenance, VerifySample

HERE = Provenance(model="tiny", dtype="float32", device="test", num_threads=1, versions="none", date="2026-01-01")
VOCAB = 96


def curve(seconds_per_token: float, base: float = 1.0, draft: float = 1e-3) -> CostCurve:
    samples = [VerifySample(n, 100, base + n * seconds_per_token) for n in (1, 2, 4, 8, 16, 32, 64)]
    return CostCurve.fit(samples, [DraftSample(1, 1, draft), DraftSample(16, 1, draft)], HERE)


def frozen(engine: Engine) -> Engine:
    """A curve that stands still: real step times must not decide what these tests see."""
    engine._scheduler.refresh = lambda result: None  # type: ignore[method-assign]
    return engine


def scheduled(folder: Path, drafter: TinyDrafter, cost: CostCurve) -> Engine:
    return frozen(make_engine(folder, drafter, cost, speculation="scheduled"))


def test_when_tokens_are_nearly_free_all_drafts_are_verified_without_a_search(tiny: tuple[Path, Any]) -> None:
    outputs = run(scheduled(tiny[0], random_drafter(VOCAB), curve(1e-3)), [request(p) for p in prompts(4)])
    rounds = [r for step in outputs.steps for r in step.rounds]
    assert {step.mode for step in outputs.steps} == {"bypass"}
    assert all(r.num_verified == r.num_proposed for r in rounds)


def test_when_tokens_are_dear_drafting_stops_and_is_probed(tiny: tuple[Path, Any]) -> None:
    drafter = random_drafter(VOCAB)
    drafter._confidence = 0.1
    cost = curve(10.0, base=0.1)
    engine = frozen(make_engine(tiny[0], drafter, cost, speculation="scheduled", max_model_len=256))
    outputs = run(engine, [request([1, 2, 3], max_tokens=250)])
    drafted = [step.step for step in outputs.steps if step.report.drafted]
    skipped = [step for step in outputs.steps if not step.report.drafted and step.rounds]
    assert len(skipped) > 80
    assert {step.mode for step in skipped} == {"local"}
    assert {step.cap for step in skipped} == {0}
    gaps = [later - earlier for earlier, later in zip(drafted, drafted[1:], strict=False)]
    probes = [gap - 1 for gap in gaps if gap > 1]
    assert probes == [FIRST_PROBE_STEPS, 2 * FIRST_PROBE_STEPS], "one step drafts again, and more and more rarely"


@pytest.mark.parametrize(("per_token", "is_near"), [(0.4, True), (0.01, False)])
def test_where_plain_decoding_comes_near_a_step_is_plain_now_and_then(
    tiny: tuple[Path, Any], per_token: float, is_near: bool
) -> None:
    """A machine that drafts in all steps never learns what a plain one takes."""
    cost = curve(per_token, base=0.5)
    engine = frozen(make_engine(tiny[0], random_drafter(VOCAB), cost, speculation="scheduled", max_model_len=256))
    engine._scheduler._returns.judge = lambda *_: None  # type: ignore[method-assign]
    outputs = run(engine, [request([1, 2, 3], max_tokens=250)])
    steps = [step for step in outputs.steps if step.rounds][:-5]
    plain = [number for number, step in enumerate(steps) if not step.report.drafted]
    assert len(steps) > 70
    assert plain == (list(range(LOOK_EVERY_STEPS, len(steps), LOOK_EVERY_STEPS + 1)) if is_near else [])


@pytest.mark.parametrize(("per_token", "is_near"), [(0.35, True), (10.0, False)])
def test_where_drafting_comes_near_a_step_drafts_now_and_then(
    tiny: tuple[Path, Any], per_token: float, is_near: bool
) -> None:
    """It would be a mistake of 5% about the times that keeps an engine from drafting for a thousand steps."""
    drafter = random_drafter(VOCAB)
    drafter._confidence = 0.7 if is_near else 0.1
    engine = frozen(make_engine(tiny[0], drafter, curve(per_token), speculation="scheduled", max_model_len=256))
    engine._scheduler._returns.judge = lambda *_: None  # type: ignore[method-assign]
    outputs = run(engine, [request(prompt, max_tokens=120) for prompt in prompts(8)])
    steps = [step for step in outputs.steps if len(step.rounds) == 8][3:]
    drafted = [number for number, step in enumerate(steps) if step.report.drafted]
    assert len(steps) > 100
    every = LOOK_EVERY_STEPS if is_near else FIRST_PROBE_STEPS
    assert drafted and drafted[0] <= every
    if is_near:
        assert np.diff(drafted).tolist() == [every + 1] * (len(drafted) - 1) and len(drafted) >= 3
        assert engine._scheduler._probe_after_steps == FIRST_PROBE_STEPS
    else:
        assert len(drafted) == 1


def test_looking_at_plain_steps_leaves_the_probes_alone(tiny: tuple[Path, Any]) -> None:
    cost = curve(0.4, base=0.5)
    engine = frozen(make_engine(tiny[0], random_drafter(VOCAB), cost, speculation="scheduled", max_model_len=256))
    engine._scheduler._returns.judge = lambda *_: None  # type: ignore[method-assign]
    engine._scheduler._probe_after_steps = LONGEST_PROBE_STEPS
    run(engine, [request([1, 2, 3], max_tokens=120)])
    assert engine._scheduler._probe_after_steps == FIRST_PROBE_STEPS, "it pays again"


def test_the_cap_follows_the_curve_and_survivals_rank(tiny: tuple[Path, Any]) -> None:
    # Survival .7, .49, .34, .24 per request; a step of 8 sequences costs 1 + .1 per token.
    engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.1))
    outputs = run(engine, [request(p, max_tokens=40) for p in prompts(8)])
    first = next(step.step for step in outputs.steps if step.report.drafted)
    for step in outputs.steps[first : first + 2]:
        assert all(r.num_verified == r.num_proposed for r in step.rounds), "nothing is known yet: all get their chance"
    local = [step for step in outputs.steps[first + 2 :] if len(step.rounds) == 8]
    assert len(local) > 10
    assert {step.mode for step in local} == {"local"}
    assert {step.cap for step in local[:10]} == {8}, "the first drafts say what to expect of the next, at once"
    for step in local:
        lengths = [r.num_verified for r in step.rounds]
        assert sum(lengths) <= step.cap < 32
        assert max(lengths) - min(lengths) <= 1, "equal survivals share the cap evenly"
        assert max(r.num_proposed for r in step.rounds) <= 2, "one slot deeper than those that are worth it"
    assert {r.num_proposed for r in local[0].rounds} == {2}


def test_time_that_goes_to_prompts_is_no_time_to_decode(tiny: tuple[Path, Any]) -> None:
    """Steps take just what the curve expects."""
    engine = make_engine(tiny[0], random_drafter(VOCAB), curve(0.1), speculation="scheduled", max_model_len=256)
    refresh = engine._scheduler.refresh

    def on_time(result: StepResult) -> None:
        assert result.predicted is not None
        refresh(replace(result, seconds=result.predicted.step_seconds))

    engine._scheduler.refresh = on_time  # type: ignore[method-assign]
    run(engine, [request([1, 2, 3], max_tokens=60)])
    assert engine.last_report.decode_share == pytest.approx(1.0, abs=0.1)
    engine.add(request([1, 2, 3], max_tokens=150))
    for first in range(40):  # a prompt in every step, and none that the cache knows
        engine.add(request([first, *range(50)], max_tokens=1))
        engine.step()
    assert engine.last_report.decode_share < 0.6


def test_a_prompt_alone_is_no_decoding(tiny: tuple[Path, Any]) -> None:
    """Plain decoding would have taken as long for it, and nothing of it is the time of a token."""
    engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.1))
    engine.add(request([1, 2, 3], max_tokens=4))
    alone, decoding = engine.step().predicted, engine.step().predicted
    assert alone is not None and decoding is not None
    assert alone.anchors_seconds == 0.0 and alone.prompts_seconds == alone.step_seconds > 1.0
    assert decoding.anchors_seconds > 1.0 and decoding.prompts_seconds == 0.0


def test_steps_in_which_nobody_decodes_say_nothing_about_drafting(tiny: tuple[Path, Any]) -> None:
    engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.02))
    engine.add(request([1, 2, 3], max_tokens=60))
    for _ in range(10):
        engine.step()
    num_drafted = engine._scheduler._num_steps_drafted
    assert num_drafted > 5
    engine.abort(engine.request_ids()[0])
    for _ in range(FIRST_PROBE_STEPS + 1):  # as an idle rank of a lockstep group steps
        engine.step()
    assert engine._scheduler._num_steps_undrafted == 0
    assert engine._scheduler._num_steps_drafted == num_drafted


def test_who_was_promised_a_speed_gets_more_of_the_same_budget(tiny: tuple[Path, Any]) -> None:
    tiers = (SlaTier("standard"), SlaTier("fast", min_tokens_per_second=1.2, weight=50.0))
    cost = curve(0.1)
    engine = frozen(make_engine(tiny[0], random_drafter(VOCAB), cost, tiers, speculation="scheduled"))
    now = 0.0
    engine.clock = lambda: now
    requests = [request(p, max_tokens=40) for p in prompts(8)]
    for index, each in enumerate(requests):
        engine.add(replace(each, tier=1 if index == 5 else 0))
    verified = []
    for _ in range(24):
        rounds = engine.step().rounds
        now += 3.0  # what steps take by the curve, about: too slow to keep the promise
        if len(rounds) == 8:
            verified.append([r.num_verified for r in rounds])
    settled = verified[6:]
    assert len(settled) > 8
    assert all(row[5] > max(row[:5] + row[6:]) for row in settled), "equal survivals, but one has a promise"
    with pytest.raises(InvalidRequestError, match="tier: 2"):
        engine.add(replace(requests[0], request_id="x", tier=2))


def test_a_promise_begins_alike_where_nobody_ran_before(tiny: tuple[Path, Any]) -> None:
    tiers = (SlaTier("standard"), SlaTier("fast", min_tokens_per_second=1.2, weight=50.0))
    engine = frozen(make_engine(tiny[0], random_drafter(VOCAB), curve(0.1), tiers, speculation="scheduled"))
    run(engine, [request([1, 2, 3], max_tokens=8)])
    engine.add(replace(request([4, 5, 6], max_tokens=40), tier=1))
    engine.step()
    assert engine._scheduler._reports[0].paces == b"", "nobody ran"
    assert paces(engine._scheduler._current_load(engine._batcher, 0)).tolist() == [START_PACE]


def test_drafts_that_pay_beside_a_prompt_only_end_with_it(tiny: tuple[Path, Any]) -> None:
    """Rows get cheap behind the thirtieth, where only a prompt brings a step: the very first one without is plain."""
    samples = [VerifySample(n, 0, 0.5 * min(n, 30) + 0.001 * n) for n in (1, 30, 64)]
    cost = CostCurve.fit(samples, [DraftSample(1, 1, 0.01), DraftSample(16, 1, 0.01)], HERE)
    engine = scheduled(tiny[0], random_drafter(VOCAB), cost)
    engine.add(request([1, 2, 3], max_tokens=60))
    for _ in range(20):
        engine.step()
    engine.add(request(list(range(1, 95)), max_tokens=1))
    steps = [engine.step() for _ in range(6)]
    with_prompts = [step.report.num_prefill_tokens > 0 for step in steps]
    drafted = [step.report.drafted for step in steps]
    assert with_prompts == [True, True, False, False, False, False] and drafted == with_prompts


def test_a_report_says_what_is_expected_now(tiny: tuple[Path, Any]) -> None:
    """Also of those that come, end, or are near their end: rows are made ahead of reports, where they change."""
    engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.02))
    seen = set()
    for index, prompt in enumerate(prompts(6)):
        engine.add(request(prompt, max_tokens=8 + 3 * index))
        for _ in range(4):
            engine.step()
            running = engine._batcher.running
            drafted = [s.num_pending == 1 and s.draft_return.expected for s in running]
            limits = [engine._batcher.draft_limit(s) if yes else 0 for s, yes in zip(running, drafted, strict=True)]
            others = engine._scheduler._expected_confidences  # who was never drafted for will do as others do
            expected = [(s.expected_confidences or others)[:limit] for s, limit in zip(running, limits, strict=True)]
            rows = np.frombuffer(engine.last_report.survival, np.uint8).reshape(len(running), -1)
            told = np.frombuffer(encode_survival(list(map(survival, expected)), engine.max_drafts), np.uint8)
            assert rows.tobytes() == told.tobytes()
            seen.add(engine.last_report.survival)
    assert len(seen) > 12


def test_the_budget_learns_what_drafts_yield_and_forgets_it_where_there_are_none(tiny: tuple[Path, Any]) -> None:
    """Three of four that are expected to pass do, however often that is: rows, prices and newcomers reckon with it."""
    engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.02))
    scheduler = engine._scheduler
    engine.add(request([1, 2, 3], max_tokens=60))
    for _ in range(4):
        engine.step()
    [sequence] = engine._batcher.running
    drafted = SimpleNamespace(confidences=[0.8, 0.5, 0.5, 0.5], request=SimpleNamespace(request_id="x", tier=0))
    chunk: Any = SimpleNamespace(sequence=drafted, proposed=[7, 7, 7, 7])
    for _ in range(400):
        scheduler.learn([chunk] * 10, [2] * 10, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0])  # of 1.2 expected each
    scheduler.drafted([sequence], 4)
    confident = encode_survival([survival(sequence.expected_confidences)], 4)
    told = scheduler._survivals([sequence], engine._batcher, b"")
    np.testing.assert_allclose(list(told), 0.77 * np.array(list(confident)), rtol=0.02)
    plan: Any = SimpleNamespace(drafted=[chunk], max_drafts=99)
    assert scheduler.admit(plan, BudgetLease(cap=99, price=0.5)) == [1]
    assert scheduler.admit(plan, BudgetLease(cap=99, price=0.65)) == [0], ".8 say so, of which .62 pass"
    for _ in range(6000):
        scheduler.drafted([], 0)
    assert scheduler.admit(plan, BudgetLease(cap=99, price=0.65)) == [1]


def test_a_slot_never_drafted_keeps_its_chance(tiny: tuple[Path, Any]) -> None:
    """With eight requests and a cap of 8 only two slots are drafted; the others must not be forgotten."""
    engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.1))
    requests = [request(p, max_tokens=40) for p in prompts(8)]
    run(engine, requests[:1])  # whole blocks: nothing is known yet
    engine.add(replace(requests[1], request_id="again"))
    for _ in range(3):
        engine.step()
    known = list(engine._scheduler._expected_confidences)
    assert known[3] == pytest.approx(0.7, abs=0.02)
    outputs = run(engine, requests)
    assert any(r.num_proposed == 2 for step in outputs.steps[20:] for r in step.rounds)
    assert engine._scheduler._expected_confidences == pytest.approx(known, abs=0.02)


def test_a_newcomer_is_expected_to_accept_what_others_do(tiny: tuple[Path, Any]) -> None:
    """Were it taken for sure to pass, a stream of short requests would be drafted for whatever it costs."""
    dear = curve(10.0, base=0.1)  # a second token costs a second step: survivals of .7 never repay it
    engine = scheduled(tiny[0], random_drafter(VOCAB), dear)
    run(engine, [request([1, 2, 3 + number], max_tokens=6) for number in range(40)])
    outputs = run(engine, [request([5, 6], max_tokens=12)])
    assert {step.cap for step in outputs.steps if step.rounds} == {0}
    assert not any(step.report.drafted for step in outputs.steps)


def test_what_a_newcomer_is_expected_to_accept_is_two_steps_old(tiny: tuple[Path, Any]) -> None:
    """It ends its prompt beside a request that drafts: what that one said of its latest block must not count yet."""
    told = []
    for latest in (0.1, 0.9):
        engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.1))
        engine.add(request([1, 2, 3], max_tokens=60))
        for _ in range(6):
            engine.step()
        engine.add(request([4, 5, 6], "late", max_tokens=60))
        drafter = engine._shard.drafter
        assert isinstance(drafter, TinyDrafter)
        drafter._confidence = latest
        engine.step()  # the newcomer's prompt, beside a block of which this is said
        load = engine._scheduler._current_load(engine._batcher, 0)
        assert load.request_ids[1].startswith("late") and any(load.survival[4:])
        told.append(load.survival)
    assert told[0] == told[1]


def test_who_asks_for_no_drafts_has_no_place_in_the_draft_pass(tiny: tuple[Path, Any]) -> None:
    """One request drafts and the others don't want to: the whole pass is its own to repay."""
    engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.02))
    returns, judged = engine._scheduler._returns, set[int]()
    judge = returns.judge

    def noted(requests: Any, draft_seconds: Any) -> None:
        judged.add(len(requests))
        judge(requests, draft_seconds)

    returns.judge = noted  # type: ignore[method-assign]
    engine.add(request([1, 2, 3], max_tokens=40))
    for prompt in prompts(5):
        engine.add(request(prompt, max_tokens=40, max_draft_tokens=0))
    for _ in range(10):
        engine.step()
    assert engine.num_running == 6
    assert judged == {1}


def test_a_pause_of_all_requests_is_no_probe(tiny: tuple[Path, Any]) -> None:
    """Nobody could be drafted for meanwhile: that says nothing about whether drafting pays."""
    engine = scheduled(tiny[0], random_drafter(VOCAB), curve(0.02))
    run(engine, [request([1, 2, 3], max_tokens=20)])
    run(engine, [request([1, 2, 4], max_tokens=2 * FIRST_PROBE_STEPS, max_draft_tokens=0)])
    assert engine._scheduler._num_steps_undrafted > FIRST_PROBE_STEPS
    run(engine, [request([1, 2, 5], max_tokens=20)])
    assert engine._scheduler._num_steps_undrafted < 3, "it drafts again, up to its last token"
    assert engine._scheduler._probe_after_steps == FIRST_PROBE_STEPS


def test_scheduling_without_a_curve_is_refused(tiny: tuple[Path, Any]) -> None:
    with pytest.raises(CostCurveError):
        make_engine(tiny[0], random_drafter(VOCAB), None, speculation="scheduled")


def test_too_many_speculative_tokens_are_refused_by_name(tiny: tuple[Path, Any]) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is 9"):
        make_engine(tiny[0], random_drafter(VOCAB), num_speculative_tokens=9)


def test_num_speculative_tokens_bounds_the_draft(tiny: tuple[Path, Any]) -> None:
    engine = make_engine(tiny[0], random_drafter(VOCAB), num_speculative_tokens=2)
    outputs = run(engine, [request([1, 2, 3])])
    assert {r.num_proposed for step in outputs.steps for r in step.rounds} == {0, 1, 2}


def test_the_measured_curve_is_kept_and_found_again(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    config = EngineConfig(
        model_source=str(tiny[0]),
        drafter_source="tiny",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_block_size=4,
        num_kv_blocks=512,
        cost_curve_path=str(tmp_path / "curve.json"),
    )
    drafter = random_drafter(VOCAB)
    shard = Shard(load_decoder(tiny[0], torch.float32), drafter, config)
    steps = profiler.measure(shard, config)
    assert {(len(step.rounds), step.num_tokens) for step in steps} >= {(1, 1), (1, 2), (1, 5), (2, 4), (2, 10), (4, 20)}
    assert all(step.report.num_prefill_tokens == 0 for step in steps)
    first = profiler.cost_curve(config, shard)
    assert first.verify.rows.tolist() == sorted({step.num_tokens for step in steps}), "no stairs: fp32 is not padded"
    drafts = len(drafter.seen)
    again = profiler.cost_curve(config, shard)
    assert len(drafter.seen) == drafts, "nothing was measured again"
    assert again.verify.seconds.tolist() == first.verify.seconds.tolist()
    other = profiler.cost_curve(config.model_copy(update={"num_threads": 7}), shard)
    assert len(drafter.seen) > drafts, "a curve of another engine is not used"
    assert other.provenance.num_threads == 7
    smaller = profiler.cost_curve(config.model_copy(update={"num_threads": 7, "max_num_seqs": 4}), shard)
    assert smaller.draft and other.draft and smaller.draft.rows[-1] < other.draft.rows[-1], (
        "nor one that was measured for other sizes"
    )
    with pytest.raises(ValueError, match="max_model_len is 16; scheduling this drafter needs 21"):
        profiler.measure(shard, config.model_copy(update={"max_model_len": 16}))


def test_token_dependent_confidence_is_no_leak(tiny: tuple[Path, Any]) -> None:
    """Slot 1's confidence says what slot 0 holds; whether slot 0 is verified may not follow from it."""

    class Telling(TinyDrafter):
        def propose(self, *args: Any, **kwargs: Any) -> Any:
            draft = super().propose(*args, **kwargs)
            confidences: Tensor = draft.confidences
            confidences[:, 1:] = (draft.tokens[:, :-1] % 2).float() * 0.98 + 0.01
            return draft

    honest = random_drafter(VOCAB)
    engine = scheduled(tiny[0], Telling(honest._logits, honest.target_ids), curve(0.2))
    for prompt in prompts(8):
        engine.add(request(prompt, max_tokens=60, temperature=1.0))
    for _ in range(20):
        verified = [r.num_verified for r in engine.step().rounds if r.num_proposed]
        assert all(length >= 1 for length in verified) or not any(verified), "slot 0 is equal for all: .7"
