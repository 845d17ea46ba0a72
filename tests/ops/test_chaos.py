"""The chaos run's arithmetic: conditions are compared within a round, and a failed request can't hide."""

from __future__ import annotations

from typing import Any

import pytest
from processes import eventually

from ops.benchmarks.chaos import CONDITIONS, Load, summary, table
from tests.ops.streaming import CUT, DONE, ERROR, streaming


def row(condition: str, speed: float, failures: tuple[str, ...] = ()) -> dict[str, Any]:
    kills = 60 if condition == "killed" else 0
    modes = {"lease": 0.8, "local": 0.2} if condition == "lease" else {"local": 1.0}
    return {
        "condition": condition,
        "tokens_per_second": speed,
        "modes": modes,
        "kills": kills,
        "failures": list(failures),
    }


def test_a_slow_round_leaves_the_ratio_alone_and_failures_add_up() -> None:
    rows = [row("lease", 105.0), row("local", 100.0), row("killed", 98.0)]
    rows += [row("killed", 49.0, ("lost",)), row("lease", 52.5), row("local", 50.0)]
    lines = {line["condition"]: line for line in summary(rows)}
    assert tuple(lines) == CONDITIONS
    assert lines["killed"]["over_local"] == pytest.approx(0.98)
    assert lines["lease"]["over_local_range"] == pytest.approx([1.05, 1.05])
    assert (lines["killed"]["kills"], lines["killed"]["failures"]) == (120, 1)
    assert lines["lease"]["lease_steps"] == pytest.approx(0.8)
    assert "0.980x (0.980-0.980)" in table(list(lines.values()))


@pytest.mark.parametrize("ending", [ERROR, CUT], ids=["error", "cut"])
def test_a_stream_that_fails_is_told_and_the_load_goes_on(ending: bytes) -> None:
    with streaming(ending) as url, Load(url, "m", concurrency=1, max_tokens=1) as load:
        eventually(lambda: len(load.failures) > 1, "it asks again")
    assert load.num_finished == 0


def test_a_stream_that_ends_well_has_finished() -> None:
    with streaming(DONE) as url, Load(url, "m", concurrency=1, max_tokens=1) as load:
        eventually(lambda: load.num_finished > 1, "it asks again")
    assert load.failures == []
