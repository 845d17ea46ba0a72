"""The simulator: its inputs are what they claim, policies meet the same requests, results are written whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ops.simulator import __main__ as command
from ops.simulator.inputs import Acceptance, load_hardware
from ops.simulator.policies import Central, EachForItself, Fixed
from ops.simulator.scenarios import Findings, Plot
from ops.simulator.world import Fleet, simulate


def fleet(loads: tuple[tuple[int, ...], ...], num_rounds: int = 60) -> Fleet:
    hardware = load_hardware("v4_flash_tp4_b300")
    return Fleet(curve=hardware.curve, acceptance=hardware.acceptance, loads=loads, num_rounds=num_rounds)


def test_acceptance_has_the_survival_that_it_was_made_from() -> None:
    wanted = (0.9, 0.7, 0.4)
    acceptance = Acceptance.of_survival(wanted)
    generator = np.random.default_rng(5)
    seen = acceptance.confidences(acceptance.ease(40_000, generator), generator).cumprod(axis=1).mean(axis=0)
    assert seen == pytest.approx(wanted, abs=0.01)


def test_plain_decoding_takes_what_the_curve_says() -> None:
    world = fleet(((32,),))
    outcome = simulate(world, Fixed(0))
    assert outcome.tokens_per_second == pytest.approx(32 / float(world.curve.step_seconds(32, 0)))
    assert (outcome.verified_per_request, outcome.accepted_length, outcome.wasted_share) == (1.0, 1.0, 0.0)


def test_alone_and_without_promises_the_fleet_decides_as_each_engine_for_itself() -> None:
    world = fleet(((24,), (7,)))
    assert simulate(world, Central()) == simulate(world, EachForItself())


def test_in_lockstep_uneven_ranks_gain_from_one_row_count() -> None:
    world = fleet(((20, 90, 40, 30),))
    assert simulate(world, Central()).tokens_per_second > 1.03 * simulate(world, EachForItself()).tokens_per_second


def test_a_scenario_is_written_as_json_markdown_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny() -> Findings:
        """Why?"""
        rows = [{"policy": "a", "load": n, "tokens_per_second": 2.0 * n, "wasted_share": 0.5} for n in (1, 2)]
        return Findings(rows, ["So."], [Plot("load", "tokens_per_second")])

    monkeypatch.setitem(command.SCENARIOS, "tiny", tiny)
    monkeypatch.setattr("sys.argv", ["simulator", "--scenario", "tiny", "--results", str(tmp_path)])
    command.main()
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert len(record["rows"]) == 2 and {"commit", "command", "versions"} <= set(record)
    page = (tmp_path / "tiny.md").read_text()
    assert "Why?" in page and "- So." in page and "50%" in page and "tiny.png" in page
    assert (tmp_path / "tiny.png").stat().st_size > 1000
