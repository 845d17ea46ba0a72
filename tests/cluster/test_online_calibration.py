"""Temperatures refitted in production: towards the truth, by bounded steps, on evidence only; answers never change."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import TinyDrafter, dspark_drafter, greedy_truth, make_engine, prompts, random_drafter, request, run
from torch import Tensor

from cluster import calibrator as calibrator_module
from cluster.batcher import Chunk, Sequence
from cluster.calibration import LARGEST_STEP, MIN_TESTED, Blocks, Evidence, errors, refit
from cluster.calibrator import Calibrator
from cluster.engine import _known_and_passed
from cluster.verifier import Outcome
from drafter.dspark import DSpark

NUM_SLOTS = 4
TRUE = np.array([2.0, 0.5, 1.4, 1.0])
"""What the logits of each slot should be divided by."""


def traffic(
    temperatures: tuple[float, ...], num_requests: int, seed: int, admit_above: float = 0.3, true: Any = TRUE
) -> Evidence:
    """The evidence of a step of `blocks`."""
    step = blocks(temperatures, num_requests, seed, admit_above, true)
    return Evidence.of_step(step.confidences, temperatures, step.num_known, step.num_passed, step.coupled)


def blocks(
    temperatures: tuple[float, ...], num_requests: int, seed: int, admit_above: float = 0.3, true: Any = TRUE
) -> Blocks:
    """A step of requests whose slots pass with sigmoid(logit / true), admitted as long as their survival is good."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(1.0, 2.0, (num_requests, NUM_SLOTS))
    confidences = 1 / (1 + np.exp(-logits / np.array(temperatures)))
    passes = generator.random(logits.shape) < 1 / (1 + np.exp(-logits / true))
    known = (confidences.cumprod(axis=1) >= admit_above).sum(axis=1)
    passed = np.minimum(passes.cumprod(axis=1).sum(axis=1), known)
    coupled = generator.random(num_requests) < 0.3
    return Blocks(confidences, known.tolist(), passed.tolist(), coupled.tolist())


def worst_error(temperatures: tuple[float, ...]) -> float:
    return max(found.error for found in errors(traffic(temperatures, 40_000, seed=99), temperatures))


def test_a_drafter_that_drifted_becomes_calibrated_again_by_bounded_steps() -> None:
    """Although only confident slots are admitted, and by confidences that are wrong at first."""
    temperatures: tuple[float, ...] = (1.0,) * NUM_SLOTS
    assert worst_error(temperatures) > 0.08
    for number in range(12):
        before = temperatures
        temperatures, left = refit(traffic(temperatures, 6_000, seed=number), temperatures)
        assert all(new / old * 1.0001 >= 1 / LARGEST_STEP for new, old in zip(temperatures, before, strict=True))
        assert all(new / old <= LARGEST_STEP * 1.0001 for new, old in zip(temperatures, before, strict=True))
        assert not left.num_tested.any(), "evidence counts once"
    assert temperatures == pytest.approx(TRUE, rel=0.15)
    assert worst_error(temperatures) < 0.03


def test_without_enough_evidence_or_with_nothing_to_gain_nothing_changes() -> None:
    true = tuple(TRUE.tolist())
    assert refit(Evidence.none(NUM_SLOTS), true)[0] == true
    few = traffic((1.0,) * NUM_SLOTS, MIN_TESTED - 1, seed=1)
    kept, left = refit(few, (1.0,) * NUM_SLOTS)
    assert kept == (1.0,) * NUM_SLOTS and (left.num_tested == few.num_tested).all(), "kept for the next time"
    moved = [refit(traffic(true, 3_000, seed=seed), true)[0] for seed in range(40)]
    assert np.mean([new != old for fitted in moved for new, old in zip(fitted, true, strict=True)]) < 0.02


def test_how_much_is_admitted_does_not_bias_the_fit() -> None:
    """The same drafter under a mean and under a generous budget: conditional outcomes give the same temperature."""
    fits = []
    for admit_above in (0.7, 0.0):
        temperatures: tuple[float, ...] = (1.0,) * NUM_SLOTS
        for number in range(8):
            temperatures, _ = refit(traffic(temperatures, 40_000, number, admit_above), temperatures)
        fits.append(temperatures)
    assert fits[0] == pytest.approx(fits[1], rel=0.1)


def test_evidence_adds_up_and_travels() -> None:
    parts = [traffic((1.0,) * NUM_SLOTS, 50, seed) for seed in range(3)]
    whole = sum((pickle.loads(pickle.dumps(part)) for part in parts), start=Evidence.none(NUM_SLOTS))
    assert whole.tested.sum() == sum(part.tested.sum() for part in parts) > 0
    assert whole.predicted.sum() == pytest.approx(sum(part.predicted.sum() for part in parts))
    assert (whole.passed <= whole.tested).all() and (whole.survived <= whole.covered).all()
    assert len(pickle.dumps(Evidence.none(7))) < 16_000
    with pytest.raises(ValueError, match="7 slots"):
        whole + Evidence.none(7)


def test_outcomes_land_where_they_belong() -> None:
    """One block of each kind: rejected at slot 1, ended by a token that passed in slot 1, left out."""
    evidence = Evidence.of_step(
        [[0.9, 0.8, 0.7]] * 3, (1.0, 1.0, 1.0), num_known=[3, 2, 0], num_passed=[1, 2, 0], coupled=[False, True, True]
    )
    assert evidence.tested.sum(axis=2).tolist() == [[1, 1, 0], [1, 1, 0]]
    assert evidence.passed.sum(axis=2).tolist() == [[1, 0, 0], [1, 1, 0]]
    assert evidence.covered.sum(axis=2).tolist() == [[1, 1, 1], [1, 1, 0]]
    assert evidence.survived.sum(axis=2).tolist() == [[1, 0, 0], [1, 1, 0]]
    assert evidence.predicted.sum(axis=2)[0] == pytest.approx([0.9, 0.72, 0.504])


@pytest.mark.parametrize(("asked", "answered"), [(False, False), (True, False), (True, True)])
def test_an_engine_that_nobody_answers_refits_itself_and_loses_no_evidence(
    monkeypatch: pytest.MonkeyPatch, asked: bool, answered: bool
) -> None:
    monkeypatch.setattr(calibrator_module, "PATIENCE_STEPS", 20)
    monkeypatch.setattr(calibrator_module, "REFIT_EVERY_STEPS", 10)
    one = Calibrator((1.0,) * NUM_SLOTS)
    for number in range(80):
        one.due()
        one.observe(blocks(one.temperatures, 400, number))
        if asked and number % 8 == 0:
            taken = one.take()
            assert taken.num_tested[0] > 0 == one.take().num_tested[0]
            if answered:
                one.offer((1.0,) * NUM_SLOTS)
            else:
                one.give_back(taken)
                returned = one.take()
                np.testing.assert_array_equal(returned.tested, taken.tested)
                one.give_back(returned)
    assert (one.temperatures == (1.0,) * NUM_SLOTS) == answered
    one.offer((3.0,) * NUM_SLOTS)
    assert one.due() == (3.0,) * NUM_SLOTS == one.temperatures
    assert one.due() is None, "only what changed"
    with pytest.raises(ValueError, match="temperatures: 2 for a drafter that has 4"):
        one.offer((1.0, 1.0))
    with pytest.raises(ValueError, match="positive"):
        one.offer((1.0, 1.0, -1.0, 1.0))


@pytest.mark.parametrize("temperatures_change", [False, True])
def test_blocks_that_are_counted_together_count_like_one_after_the_other(temperatures_change: bool) -> None:
    """Steps of any width, temperatures that change between them, and nobody left behind when evidence is taken."""
    one, total = Calibrator((1.0,) * NUM_SLOTS), Evidence.none(NUM_SLOTS)
    for number in range(40):
        if temperatures_change:
            one.offer((1.0 + number / 20,) * NUM_SLOTS)
        one.due()
        step = blocks(one.temperatures, 1 + number % 20, number)
        width = 1 + number % NUM_SLOTS
        known = [min(each, width) for each in step.num_known]
        passed = [min(each, width) for each in step.num_passed]
        one.observe(Blocks(step.confidences[:, :width], known, passed, step.coupled))
        total += Evidence.of_step(step.confidences[:, :width], one.temperatures, known, passed, step.coupled)
    taken = one.take()
    assert total.num_tested.all()
    for name in ("tested", "passed", "covered", "survived"):
        assert (getattr(taken, name) == getattr(total, name)).all(), name
    assert taken.predicted == pytest.approx(total.predicted)
    assert not one.take().num_tested.any()


# --- the running engine ---


class Doubtful(TinyDrafter):
    """A tiny drafter with a temperature: its logit is 2 in every slot."""

    temperatures = (1.0,) * 4

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        self.temperatures = temperatures

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        draft = super().propose(*args, **kwargs)
        confidences: Tensor = draft.confidences
        confidences[:] = torch.sigmoid(2.0 / torch.tensor(self.temperatures[: confidences.shape[1]]))
        return draft


def test_an_engine_gathers_evidence_from_all_but_edited_requests(tiny: tuple[Path, Any]) -> None:
    honest = random_drafter(96)
    engine = make_engine(tiny[0], Doubtful(honest._logits, honest.target_ids))
    free = [request(p, temperature=1.0) for p in prompts(3)] + [request([5], temperature=1.0, seed=3)]
    edited = [request([1, 2], logit_bias=((4, -100.0),)), request([3], presence_penalty=0.5, temperature=1.0)]
    outputs = run(engine, free)
    counted = engine.take_evidence()
    rounds = [r for step in outputs.steps for r in step.rounds]
    assert counted.covered[:, 0].sum() == sum(r.num_verified > 0 for r in rounds) > 0
    assert counted.passed.sum() == sum(r.num_accepted for r in rounds)
    assert counted.tested[1].sum() > 0, "the seeded request is counted apart"
    run(engine, edited)
    assert engine.take_evidence().tested.sum() == 0


@pytest.mark.parametrize(
    ("delivered", "expected"),
    [
        ([7, 8, 40], (4, 2)),  # the third draft was replaced
        ([7, 8, 9, 10, 40], (4, 4)),  # all passed, and one came for free
        ([7, 8], (2, 2)),  # the second draft is an end token: nothing is known of those behind it
        ([40], (4, 0)),
    ],
)
def test_what_is_known_of_a_block(delivered: list[int], expected: tuple[int, int]) -> None:
    sequence = Sequence(request([1, 2, 3]), seed=0)
    sequence.num_computed = 2
    chunk = Chunk(sequence, 1, max_drafts=5, proposed=[7, 8, 9, 10, 11], num_admitted=4)
    assert _known_and_passed(chunk, Outcome(delivered, None, None)) == expected
    edited = Sequence(request([1, 2, 3], logit_bias=((4, -100.0),)), seed=0)
    edited.num_computed = 2
    assert _known_and_passed(Chunk(edited, 1, proposed=[7], num_admitted=1), Outcome([7, 8], None, None)) == (0, 0)


def test_a_real_drafter_adopts_temperatures_between_steps_and_answers_stay(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    drafter: DSpark = dspark_drafter(model, 48)
    assert drafter.confidence_head is not None
    torch.nn.init.constant_(drafter.confidence_head.proj.bias, 3.0)
    engine = make_engine(folder, drafter)
    prompt = prompts(1)[0]
    wanted = request(prompt, max_tokens=24)
    engine.add(wanted)
    tokens, seen = [], []
    for temperature in [1.0] * 4 + [4.0] * 30:
        if not engine.has_work:
            break
        engine.calibrate((temperature,) * drafter.block_size)
        result = engine.step()
        tokens += [token for event in result.events for token in event.token_ids]
        seen += [list(s.confidences) for s in engine._batcher.running if result.report.drafted]
    assert drafter.temperatures == (4.0,) * drafter.block_size
    assert tokens == greedy_truth(model, prompt, 24)
    assert seen[2][0] == pytest.approx(0.953, abs=1e-3) and seen[-1][0] == pytest.approx(0.679, abs=1e-3)
    with pytest.raises(ValueError, match="temperatures"):
        engine.calibrate((1.0,))


def test_a_drafter_without_confidences_has_nothing_to_calibrate(tiny: tuple[Path, Any]) -> None:
    engine = make_engine(tiny[0], random_drafter(96))
    run(engine, [request([1, 2, 3])])
    assert engine.take_evidence().tested.size == 0
