"""The cost curve: monotone, refused when it says nothing, refreshed by real steps."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.messages import CostCurveError
from cluster.sps import CostCurve, DraftSample, Provenance, VerifySample

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
HERE = Provenance(
    model="smollm2", dtype="bfloat16", device="cpu", num_threads=2, versions="torch 2.13.0", date="2026-11-01"
)
MILLISECONDS = {1: 28.0, 2: 27.0, 4: 29.0, 8: 33.0, 16: 40.0, 32: 52.0, 64: 84.0}


def verify_samples(slope: float = 0.0) -> list[VerifySample]:
    """Three sequences' worth of contexts per batch size, as an engine would run them."""
    return [
        VerifySample(tokens, context * tokens, ms / 1000 + slope * context * tokens)
        for tokens, ms in MILLISECONDS.items()
        for context in (64, 256, 768)
    ]


def smollm2_curve() -> CostCurve:
    return CostCurve.fit(verify_samples(), [DraftSample(1, 1, 0.006), DraftSample(16, 1, 0.015)], HERE)


def test_the_grid_is_reproduced_and_noise_is_pooled() -> None:
    curve = smollm2_curve()
    assert curve.step_seconds(8, 500) == pytest.approx(0.033)
    assert curve.step_seconds([1, 2], 500) == pytest.approx([0.0275, 0.0275])  # 28 then 27 ms: their mean
    assert curve.step_seconds(12, 500) == pytest.approx(0.0365)
    assert curve.step_seconds(128, 500) == pytest.approx(0.084 + 64 * 0.001)  # the last slope goes on
    assert curve.draft_seconds(0, 5) == 0
    assert curve.draft_seconds(4, 1) == pytest.approx(0.006 + 3 * 0.009 / 15)


def test_context_has_a_price() -> None:
    curve = CostCurve.fit(verify_samples(slope=1e-6), [], HERE)
    assert curve.step_seconds(8, 8 * 768) - curve.step_seconds(8, 512) == pytest.approx(
        1e-6 * (8 * 768 - 512), rel=0.02
    )
    assert curve.step_seconds(8, 512) == pytest.approx(0.033 + 512e-6, rel=0.02)
    assert curve.draft_seconds(7, 1) == 0


@UNTIMED
@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(0, 4000), st.floats(0.001, 1.0)), min_size=2, max_size=40
    ).filter(lambda rows: len({row[0] for row in rows}) > 1)
)
def test_any_measurement_gives_a_curve_that_never_falls(rows: list[tuple[int, int, float]]) -> None:
    try:
        curve = CostCurve.fit([VerifySample(*row) for row in rows], [], HERE)
    except CostCurveError as error:
        assert "flat" in str(error)
        return
    for context in (0, 10, 1000, 9000):
        seconds = curve.step_seconds(np.arange(1, 300), context)
        assert (seconds > 0).all() and (np.diff(seconds) >= -1e-12).all()
    steeper = curve.step_seconds(np.arange(1, 300), 9000) - curve.step_seconds(np.arange(1, 300), 10)
    assert (steeper >= -1e-12).all()


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "no measurements"),
        ([VerifySample(1, 64, 0.03)], "flat"),
        ([VerifySample(n, 64, 0.03) for n in (1, 8, 64)], "flat"),
        ([VerifySample(1, 64, 0.03), VerifySample(8, 64, 0.0)], "positive"),
        ([VerifySample(1, 64, 0.03), VerifySample(8, 64, float("nan"))], "positive"),
    ],
)
def test_a_curve_that_says_nothing_is_refused(samples: list[VerifySample], reason: str) -> None:
    with pytest.raises(CostCurveError, match=reason):
        CostCurve.fit(samples, [], HERE)


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "curve.json"
    curve = smollm2_curve()
    curve.save(path)
    again = CostCurve.load(path, replace(HERE, date="2027-01-01"))
    sizes = np.arange(1, 100)
    np.testing.assert_allclose(again.step_seconds(sizes, 700), curve.step_seconds(sizes, 700))
    assert again.draft_seconds(9, 1) == pytest.approx(curve.draft_seconds(9, 1))
    assert again.provenance == HERE


def test_a_foreign_broken_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    with pytest.raises(CostCurveError, match="no cost curve"):
        CostCurve.load(path, HERE)
    smollm2_curve().save(path)
    with pytest.raises(CostCurveError, match="num_threads 2 instead of 4.*measure it again"):
        CostCurve.load(path, replace(HERE, num_threads=4))
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "tokens": record["tokens"][:-1]}))
    with pytest.raises(CostCurveError, match="shape"):
        CostCurve.load(path, HERE)
    path.write_text(json.dumps({**record, "verify": [[0.03] * len(row) for row in record["verify"]]}))
    with pytest.raises(CostCurveError, match="flat"):
        CostCurve.load(path, HERE)
    for broken in ("{", json.dumps({**record, "tokens": None}), json.dumps({**record, "verify": [[0.1, 0.2], [0.1]]})):
        path.write_text(broken)
        with pytest.raises(CostCurveError, match="not a cost curve"):
            CostCurve.load(path, HERE)


def test_a_busy_moment_at_start_up_is_no_cost() -> None:
    """One of three passes met a neighbour that took half of the machine."""
    steps = [VerifySample(n, 64 * n, (0.027 + 0.0005 * n) * busy) for n in (1, 8, 16) for busy in (1.0, 2.0, 1.9)]
    curve = CostCurve.fit(steps, [DraftSample(8, 1, seconds) for seconds in (0.006, 0.004, 0.009)], HERE)
    np.testing.assert_allclose(curve.step_seconds([1, 8, 16], 64), [0.0275, 0.031, 0.035], rtol=1e-6)
    assert curve.draft_seconds(8, 1) == pytest.approx(0.004)


STEADY = VerifySample(16, 500, 0.040)


def taught(curve: CostCurve, *steps: VerifySample) -> CostCurve:
    return curve.observed([(step, None) for step in steps])


def test_real_steps_move_the_curve_to_where_they_are() -> None:
    curve = smollm2_curve()
    for number in range(400):
        curve = taught(curve, VerifySample(16, 500, 0.060) if number % 2 else VerifySample(1, 64, 0.0275))
    assert curve.step_seconds(16, 500) == pytest.approx(0.060, rel=0.02)
    assert curve.step_seconds(1, 500) == pytest.approx(0.0275, rel=0.02), "a cell that steps confirm stays"
    assert (np.diff(curve.step_seconds(np.arange(1, 100), 500)) >= 0).all()


@pytest.mark.parametrize("slowdown", [1.5, 1 / 1.5])
def test_a_curve_that_was_measured_wrong_in_a_region_gets_right_without_a_visit_to_each_cell(slowdown: float) -> None:
    """Measured 1.5 times too slow (or too fast) above 8 rows; the steps run at 1, 4, 8, 20 and 40 rows only."""
    wrong = [replace(s, seconds=s.seconds * (slowdown if s.num_tokens > 8 else 1)) for s in verify_samples()]
    curve, truth = CostCurve.fit(wrong, [], HERE), smollm2_curve()
    generator = np.random.default_rng(0)
    for _ in range(600):
        rows = int(generator.choice([1, 4, 8, 20, 40]))
        noise = generator.lognormal(0.0, 0.05) * (3.0 if generator.random() < 0.03 else 1.0)
        curve = taught(curve, VerifySample(rows, 500, float(truth.step_seconds(rows, 500)) * noise))
    sizes = np.array([1, 2, 4, 6, 8, 16, 20, 24, 32, 40, 48, 64])
    for context in (64, 500, 40_000):
        assert curve.step_seconds(sizes, context) == pytest.approx(truth.step_seconds(sizes, context), rel=0.12)
        assert curve.step_seconds(80, context) == pytest.approx(truth.step_seconds(80, context), rel=0.2)
    assert (np.diff(curve.step_seconds(np.arange(1, 100), 500)) >= 0).all()


def test_a_factor_for_all_sizes_is_learned_from_one() -> None:
    curve = smollm2_curve()
    for _ in range(300):
        curve = taught(curve, VerifySample(16, 500, 0.040 * 1.5))
    sizes = np.array([4, 8, 16, 32, 64])
    assert curve.step_seconds(sizes, 500) == pytest.approx(1.5 * smollm2_curve().step_seconds(sizes, 500), rel=0.12)
    assert curve.draft_seconds(8, 1) == pytest.approx(1.5 * smollm2_curve().draft_seconds(8, 1), rel=0.15)


def test_sizes_are_not_compared_by_when_they_were_seen() -> None:
    """Others take 30% of the machine for stretches of forty steps, and always while the wide steps run."""
    curve, truth, generator = smollm2_curve(), smollm2_curve(), np.random.default_rng(0)
    errors = []
    for stretch in range(24):
        rows, pace = (40, 1.3) if stretch % 2 else (8, 1.0)
        for number in range(40):
            others = number % 10 == 9  # now and then the other size, at the same pace
            size = 48 - rows if others else rows
            seconds = float(truth.step_seconds(size, 500)) * pace * generator.lognormal(0.0, 0.05)
            curve = taught(curve, VerifySample(size, 500, seconds))
        narrow, wide = curve.step_seconds([8, 40], 500) / truth.step_seconds([8, 40], 500)
        assert wide == pytest.approx(pace, rel=0.15)
        errors.append(wide / narrow - 1)
    assert np.abs(errors).max() < 0.08


def test_what_is_far_outside_the_grid_teaches_it_little() -> None:
    curve = smollm2_curve()
    for _ in range(100):
        curve = taught(curve, STEADY, VerifySample(512, 500, 2 * float(curve.verify.along_rows(512, 500))))
    assert curve.step_seconds(16, 500) == pytest.approx(0.040, rel=0.05)
    near = smollm2_curve()
    for _ in range(100):
        near = taught(near, STEADY, VerifySample(64, 500, 0.168))
    assert near.step_seconds(64, 500) == pytest.approx(0.168, rel=0.05)
    assert near.step_seconds(16, 500) == pytest.approx(0.040, rel=0.05)


def test_one_outlier_moves_little_and_no_cell_runs_away() -> None:
    curve = smollm2_curve()
    usual = [VerifySample(8, 500, 0.033)] * 7
    for steps in ([VerifySample(8, 500, 30.0), *usual], [*usual, VerifySample(8, 500, 30.0)]):
        assert taught(curve, *steps).step_seconds(8, 500) < 0.033 * 1.05
    for _ in range(500):
        curve = taught(curve, VerifySample(8, 500, 30.0))
    assert 0.033 * 3 < curve.step_seconds(8, 500) <= 0.033 * 4.001
    curve = taught(curve, *usual * 12)
    assert curve.step_seconds(8, 500) < 0.040, "and it comes back"


def test_a_machine_that_becomes_much_slower_is_believed() -> None:
    curve = taught(smollm2_curve(), *[STEADY] * 100)
    slow = [replace(STEADY, seconds=0.120)] * 40
    assert taught(curve, *slow).step_seconds(16, 500) == pytest.approx(0.120, rel=0.1)


def test_what_was_not_seen_for_long_is_not_known_less_than_at_first() -> None:
    curve = taught(smollm2_curve(), *[STEADY] * 3000)
    cells, start = curve.corrections.covariance.diagonal()[:-1], smollm2_curve().corrections.covariance.diagonal()[:-1]
    assert (cells <= start * 1.0001).all() and np.isfinite(curve.corrections.covariance).all()


def test_steps_of_several_sizes_count_for_each() -> None:
    """Together as one after the other, as long as none is beyond what one step may count."""
    steps = [
        (VerifySample(16, 500, 0.050), DraftSample(2, 1, 0.005)),
        (VerifySample(2, 64, 0.030), None),
        (VerifySample(40, 30_000, 0.100), DraftSample(16, 1, 0.012)),
    ]
    together, one_by_one = smollm2_curve().observed(steps), smollm2_curve()
    for step in steps:
        one_by_one = one_by_one.observed([step])
    for context in (64, 500, 30_000):
        rows = [2, 16, 40]
        assert together.step_seconds(rows, context) == pytest.approx(one_by_one.step_seconds(rows, context), rel=0.02)
    assert [float(together.draft_seconds(n, 1)) for n in (2, 16)] == pytest.approx(
        [float(one_by_one.draft_seconds(n, 1)) for n in (2, 16)], rel=0.02
    )
    first = smollm2_curve().observed(steps[:1])
    assert together.step_seconds(2, 64) != pytest.approx(first.step_seconds(2, 64), rel=0.01), "each at its own size"


def test_a_few_steps_correct_a_size_that_was_measured_wrong() -> None:
    """Real batches have other sequences than measured ones, so a third too little is common; noise is a tenth."""
    curve, generator = smollm2_curve(), np.random.default_rng(0)
    truth = 1.33 * smollm2_curve().step_seconds(16, 500)
    steps = [VerifySample(16, 500, float(truth * generator.lognormal(0.0, 0.1))) for _ in range(16)]
    few, more = taught(curve, *steps[:8]), taught(curve, *steps)
    assert few.step_seconds(16, 500) == pytest.approx(truth, rel=0.09)
    assert more.step_seconds(16, 500) == pytest.approx(truth, rel=0.09)


def test_draft_times_are_learned_too() -> None:
    curve = smollm2_curve()
    for _ in range(600):
        curve = curve.observed([(STEADY, DraftSample(1, 1, 0.012))])
    assert curve.draft_seconds(1, 1) == pytest.approx(0.012, rel=0.05)
    assert curve.step_seconds(16, 500) == pytest.approx(0.040, rel=0.05), "it was not the machine"
    assert 0.015 <= curve.draft_seconds(16, 1) < 0.03, "four octaves away, a part of it is believed"
    for _ in range(600):
        curve = curve.observed([(STEADY, DraftSample(16, 1, 0.015))])
    assert curve.draft_seconds(16, 1) == pytest.approx(0.015, rel=0.05)
    for _ in range(600):
        curve = curve.observed([(STEADY, DraftSample(1, 1, 30.0))])
    assert curve.draft_seconds(1, 1) <= curve.draft_seconds(16, 1), "the curve never falls"


def test_beyond_the_grid_the_last_octave_goes_on() -> None:
    """Also where the last two points are the edges of one stair, and where the measured ones fall."""
    stairs = [VerifySample(n, 0, 0.02 + 0.001 * edge) for edge in (16, 32, 64) for n in (edge - 15, edge)]
    curve = CostCurve.fit(stairs, [], HERE)
    assert curve.step_seconds(128, 0) == pytest.approx(0.084 + 64 * 0.032 / 32)
    falling = CostCurve.fit([VerifySample(n, 0, s) for n, s in ((1, 0.02), (12, 0.0400), (16, 0.0395))], [], HERE)
    for _ in range(20):
        falling = taught(falling, VerifySample(512, 0, 0.5))
    assert np.isfinite(falling.step_seconds([1, 16, 512], 0)).all()


def test_a_snapshot_answers_alike_and_is_small() -> None:
    curve = smollm2_curve().observed([(STEADY, DraftSample(2, 1, 0.009))] * 8)
    assert len(pickle.dumps(curve.snapshot)) < 4096
    assert curve.snapshot.step_seconds([1, 20, 99], 700).tolist() == curve.step_seconds([1, 20, 99], 700).tolist()
    assert curve.snapshot.draft_seconds(3, 1) == curve.draft_seconds(3, 1)


def test_a_draft_pass_costs_by_requests_and_by_slots() -> None:
    drafts = [DraftSample(n, k, 0.004 + 0.0002 * n + 0.0001 * n * k) for n, k in product((1, 4, 16), (1, 5))]
    curve = CostCurve.fit(verify_samples(), [d for d in drafts if d.num_requests * d.num_slots < 80], HERE)
    assert curve.draft_seconds(4, [0, 1, 3, 5]).tolist() == pytest.approx([0, 0.0052, 0.0060, 0.0068])
    assert curve.draft_seconds(2, 1) == pytest.approx(0.004 + 0.0002 * 2 + 0.0001 * 2)
    # 16 requests of 5 slots had no room: they cost as much more than of 1 as elsewhere.
    assert curve.draft_seconds(16, 5) == pytest.approx(0.0088 * np.median([0.0047 / 0.0043, 0.0068 / 0.0052]))
    for _ in range(400):
        curve = curve.observed([(STEADY, DraftSample(4, 1, 0.0052)), (STEADY, DraftSample(4, 5, 0.0136))])
    assert curve.draft_seconds(4, [1, 5]).tolist() == pytest.approx([0.0052, 0.0136], rel=0.05)
