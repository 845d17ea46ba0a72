"""The table of `python -m ops.explain`, from what the scheduler really says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from cluster.accounts import Binding, account
from cluster.budget import encode_survival
from cluster.calibration import Evidence
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.roster import Experience, Member, Roster
from cluster.sps import CostCurve, DraftSample, Provenance, VerifySample
from ops.explain import main, table

HERE = Provenance(model="tiny", dtype="float32", device="test", num_threads=1, versions="none", date="2026-01-01")
TIERS = (SlaTier("standard"), SlaTier("fast", min_tokens_per_second=0.7, weight=20.0))


def curve(dear: float) -> CostCurve:
    samples = [VerifySample(n, 100, 1 + n * dear) for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    return CostCurve.fit(samples, [DraftSample(1, 1, 1e-3), DraftSample(32, 1, 1e-3)], HERE)


def member(name: str, dear: float = 0.1, group: str = "", rank: int = 0, tiers: tuple[SlaTier, ...] = ()) -> Member:
    return Member(
        engine=name,
        replica=name,
        group=group,
        rank=rank,
        group_size=2 if group else 1,
        max_num_seqs=32,
        tiers=tiers,
        curve=curve(dear),
    )


def load(num_requests: int, num_slots: int = 4, most: int = 999) -> LoadReport:
    row = [0.7**k for k in range(1, num_slots + 1)]
    return LoadReport(
        step=1,
        survival=encode_survival([row] * num_requests, 4),
        tiers=bytes(num_requests),
        num_prefill_tokens=0,
        context_tokens=0,
        num_waiting=2,
        drafted=True,
        newcomer=encode_survival([[0.7] * 4], 4),
        max_draft_tokens=most,
    )


def attainment(*counts: tuple[int, int]) -> list[dict[str, object]]:
    """As the ingress tells it, by tier: (kept, judged)."""
    return [{"tier": t.name, "num_kept": c[0], "num_judged": c[1]} for t, c in zip(TIERS, counts, strict=False)]


@pytest.mark.parametrize(
    ("who", "report", "expected"),
    [
        (member("a"), load(0), "idle"),
        (member("a"), load(3, num_slots=0), "undrafted"),
        (member("a", dear=1e-3), load(3), "load"),
        (member("a", dear=1e-3), load(8, most=9), "rows"),
        (member("a"), load(8), "cost"),
        (member("a", tiers=TIERS), replace(load(8), tiers=bytes([0, 1] * 4)), "promises"),
        (member("a", tiers=TIERS), load(8), "cost"),
        (member("a", group="gang"), load(8), "alone"),
    ],
)
def test_what_binds(who: Member, report: LoadReport, expected: Binding) -> None:
    roster = Roster()
    roster.introduce(who, 0.0)
    roster.note("a", report, Experience("lease", 30, 10.0), 0.0)
    roster.allocate()
    [engine] = account(roster, 0.5, 60.0).engines
    assert engine.binding == expected
    assert engine.report_age_seconds == 0.5
    assert engine.measured_tokens_per_second == (0.0 if expected == "idle" else 3.0)
    assert (engine.cap is None) == (expected == "alone")


def test_calibration_and_attainment_are_told_where_something_was_seen() -> None:
    roster = Roster()
    roster.introduce(replace(member("0"), tiers=TIERS), 0.0)
    told = {**asdict(account(roster, 0.0, 1.0)), "attainment": attainment((0, 0), (0, 0))}
    assert "calibration error: too few drafts seen yet" in table(told).splitlines()
    assert "tier standard: best effort; none judged yet" in table(told).splitlines()
    # 1000 first slots said 0.7, and half of them passed; 100 of the second are too few.
    seen = Evidence.of_step(np.full((1000, 2), 0.7), (1.0, 1.0), [2] * 100 + [1] * 900, [1, 0] * 500, [False] * 1000)
    roster.introduce(replace(member("0"), tiers=TIERS, temperatures=(1.0, 1.0), evidence=seen), 1.0)
    told = {**asdict(account(roster, 1.0, 1.0)), "attainment": attainment((2, 2), (3, 4))}
    lines = table(told).splitlines()
    assert "calibration error, rejection: 0: 0.200" in lines
    assert "tier standard: best effort; kept 100.0% of 2" in lines
    assert "tier fast: >= 0.7 tok/s (weight 20); kept 75.0% of 4" in lines


def test_a_tier_that_no_setting_names_promises_nothing() -> None:
    roster = Roster()
    judged = [{"tier": "default", "num_kept": 1, "num_judged": 1}]
    told = {**asdict(account(roster, 0.0, 1.0)), "attainment": judged}
    assert "tier default: no engine is there; kept 100.0% of 1" in table(told).splitlines()
    roster.introduce(replace(member("0"), tiers=()), 0.0)
    roster.note("0", load(1), Experience("local"), 0.0)
    told = {**asdict(account(roster, 0.0, 1.0)), "attainment": judged}
    assert "tier default: best effort; kept 100.0% of 1" in table(told).splitlines()


def test_the_table_has_a_line_for_each_engine_and_says_why() -> None:
    roster = Roster()
    for rank, (name, count) in enumerate((("0", 3), ("1", 9))):
        roster.introduce(member(name, group="gang", rank=rank), 0.0)
        roster.note(name, load(count), Experience("lease", 30, 10.0), 0.0)
    roster.introduce(replace(member("2"), tiers=TIERS), 0.0)
    roster.note("2", load(5), Experience("local"), 0.0)
    roster.allocate()
    told = json.loads(json.dumps(asdict(account(roster, 0.2, 61.0)) | {"attainment": []}))
    lines = table(told).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "2"]
    assert ["load" in lines[2], "group" in lines[3], "cost" in lines[4]] == [True, True, True]
    leases = [roster.lease(name) for name in ("0", "1")]
    assert all(isinstance(lease, BudgetLease) and f"of {lease.padded_tokens} rows" in lines[2] for lease in leases)
    assert "3 engines, a scheduler of 61 s" in lines
    for engine in told["engines"]:
        assert np.isfinite(engine["predicted_tokens_per_second"])
        assert engine["predicted_tokens_per_second"] >= engine["predicted_plain_tokens_per_second"] > 0


NOBODY: dict[str, list[object]] = {"tiers": [], "engines": [], "calibration": [], "attainment": []}


class Fleet(BaseHTTPRequestHandler):
    """Answers who shows the first key."""

    def do_GET(self) -> None:
        accepted = self.headers["Authorization"] == "Bearer first"
        body = json.dumps({**NOBODY, "scheduler_age_seconds": 1.0} if accepted else {}).encode()
        self.send_response(200 if accepted else 401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_servers_own_key_file_will_do_and_mistakes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fleet)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    keys, empty = tmp_path / "keys", tmp_path / "empty"
    keys.write_text("first\nsecond\n")
    empty.write_text("\n")

    def explain(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["explain", *arguments])
        return main()

    try:
        assert explain("--url", url, "--api-key-file", str(keys)) == 0
        assert "0 engines, a scheduler of 1 s" in capsys.readouterr().out
        for arguments, told in (
            (("--url", url), "401"),
            (("--url", url, "--api-key-file", str(empty)), "holds no key"),
            (("--url", url, "--api-key-file", str(tmp_path / "none")), "No such file"),
            (("--url", "127.0.0.1:8000"), "127.0.0.1:8000"),
        ):
            assert explain(*arguments) == 1
            assert told in capsys.readouterr().err
    finally:
        server.shutdown()
        server.server_close()
