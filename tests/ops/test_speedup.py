"""The comparison's arithmetic: fair order, honest intervals, no cell without repeats."""

from __future__ import annotations

import numpy as np
import pytest

from ops.benchmarks.drive import Measurement
from ops.benchmarks.engines import MODES
from ops.benchmarks.prompts import Dataset
from ops.benchmarks.report import speedup_table
from ops.benchmarks.speedup import MIN_BATCHES, make_cells, parse_options, ratio_interval, rows_of

DATASET = Dataset("x", tuple((index,) for index in range(50)))


def test_cells_hold_enough_prompts_and_batches() -> None:
    cells = make_cells([DATASET], [1.0, 0.0], [1, 4, 16], num_prompts=16)
    assert [(cell.temperature, cell.concurrency) for cell in cells] == [
        (temperature, concurrency) for temperature in (1.0, 0.0) for concurrency in (1, 4, 16)
    ]
    for cell in cells:
        assert len(cell.batches) >= MIN_BATCHES
        assert sum(map(len, cell.batches)) >= 16
        assert all(len(batch) >= cell.concurrency for batch in cell.batches)
    assert len({prompt for batch in cells[0].batches for prompt in batch}) == 16


def test_a_speed_up_is_inside_its_interval_and_noise_widens_it() -> None:
    rng = np.random.default_rng(1)

    def runs(speed: float, noise: float) -> list[Measurement]:
        return [Measurement(num_tokens=100, seconds=100 / speed * rng.lognormal(0, noise)) for _ in range(20)]

    low, high = ratio_interval(runs(60, 0.02), runs(40, 0.02))
    assert low < 1.5 < high and high - low < 0.1
    wide_low, wide_high = ratio_interval(runs(60, 0.3), runs(40, 0.3))
    assert wide_high - wide_low > 2 * (high - low)
    assert ratio_interval(runs(60, 0.0), runs(40, 0.0)) == pytest.approx((1.5, 1.5))


def test_a_slow_minute_that_hits_both_sides_leaves_the_ratio_alone() -> None:
    pace = [1.0, 1.0, 5.0, 1.0]
    ours = [Measurement(num_tokens=100, seconds=1.0 * factor) for factor in pace]
    theirs = [Measurement(num_tokens=100, seconds=2.0 * factor) for factor in pace]
    assert ratio_interval(ours, theirs) == pytest.approx((2.0, 2.0))


def test_rows_carry_rates_and_ratios() -> None:
    (cell,) = make_cells([DATASET], [1.0], [2], num_prompts=4)
    speeds = {"plain": 40, "fixed": 50, "scheduled": 60}
    measured = {
        mode: [Measurement(speed, 1.0, speed, 2.0, num_rounds=10, num_accepted=5)] * len(cell.batches)
        for mode, speed in speeds.items()
    }
    rows = rows_of(cell, measured)
    assert [row["mode"] for row in rows] == list(MODES)
    assert [row["speedup"] for row in rows] == [1.0, 1.25, 1.5]
    assert rows[2]["tokens_per_second"] == 60 and rows[2]["tokens_per_second_per_user"] == 30
    assert rows[2]["accepted_length"] == 1.5
    line = speedup_table(rows).splitlines()[-1]
    assert "1.25x (1.25-1.25)" in line and "1.50x (1.50-1.50)" in line and "1.20x" in line


def test_quick_changes_only_what_was_not_said() -> None:
    assert parse_options([]).concurrency == [1, 2, 4, 8, 16]
    assert parse_options(["--quick"]).concurrency == [1, 4]
    assert parse_options(["--quick", "--concurrency", "2"]).concurrency == [2]
    with pytest.raises(SystemExit):
        parse_options(["--concurrency", "0"])
