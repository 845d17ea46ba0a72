"""Who belongs to the fleet: groups are complete or get nothing, the silent are forgotten, and leases are allocate's."""

from __future__ import annotations

import dataclasses
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_scheduling import curve

import cluster
from cluster import fleet
from cluster.accounts import account
from cluster.budget import encode_survival
from cluster.calibration import Evidence
from cluster.fleet import Group
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.roster import SILENT_SECONDS, Answer, Experience, Member, Roster

TIERS = (SlaTier("standard"), SlaTier("fast", min_tokens_per_second=1.5, weight=8.0))
COST = curve(0.1)


def member(name: str, group: str = "", rank: int = 0, size: int = 1, tiers: tuple[SlaTier, ...] = TIERS) -> Member:
    return Member(
        engine=name,
        replica=name,
        group=group,
        rank=rank,
        group_size=size,
        max_num_seqs=32,
        tiers=tiers,
        curve=COST,
    )


def load(num_requests: int, survival: float = 0.7, num_tiers: int = 2) -> LoadReport:
    row = [survival**k for k in range(1, 5)]
    return LoadReport(
        step=1,
        survival=encode_survival([row] * num_requests, 4),
        tiers=bytes(r % num_tiers for r in range(num_requests)),
        num_prefill_tokens=0,
        context_tokens=50 * num_requests,
        num_waiting=0,
        drafted=True,
        newcomer=encode_survival([row], 4),
    )


def say(roster: Roster, who: Member, report: LoadReport, now: float = 0.0) -> None:
    roster.introduce(who, now)
    assert roster.note(who.engine, report, Experience(), now)


def decided(lease: BudgetLease | None) -> tuple[int, float, int, tuple[float, ...]]:
    assert lease is not None
    return lease.cap, lease.price, lease.padded_tokens, lease.floors


def test_an_unknown_engine_is_asked_who_it_is() -> None:
    roster = Roster()
    assert not roster.note("a", load(3), Experience(), 0.0)
    assert roster.allocate() == 0
    assert roster.lease("a") is None


def test_leases_are_those_of_the_fleets_allocate() -> None:
    roster = Roster()
    reports = {"a": load(4), "b": load(9, 0.5), "g0": load(2), "g1": load(8)}
    say(roster, member("a"), reports["a"])
    say(roster, member("g1", "gang", 1, 2), reports["g1"])
    say(roster, member("b"), reports["b"])
    say(roster, member("g0", "gang", 0, 2), reports["g0"])
    assert roster.allocate() == 4
    groups = [[reports["a"]], [reports["b"]], [reports["g0"], reports["g1"]]]
    expected = fleet.allocate([Group(group, COST) for group in groups], TIERS)
    found = [[roster.lease("a")], [roster.lease("b")], [roster.lease("g0"), roster.lease("g1")]]
    assert [[decided(x) for x in row] for row in found] == [[decided(x) for x in row] for row in expected]
    tokens = {lease.padded_tokens for lease in found[2] if lease}
    assert len(tokens) == 1
    assert tokens.pop() >= 8, "the ranks of a group share one number of rows"


def test_hysteresis_and_epochs_follow_the_engine_and_begin_anew_with_the_scheduler() -> None:
    roster = Roster()
    epochs = []
    for _ in range(3):
        say(roster, member("a"), load(6))
        roster.allocate()
        lease = roster.lease("a")
        assert lease is not None
        epochs.append(lease.epoch)
    assert epochs == [0, 1, 2]
    successor = Roster()
    say(successor, member("a"), load(6))
    successor.allocate()
    assert decided(successor.lease("a")) == decided(roster.lease("a")), "nothing else was worth remembering"


def test_a_group_of_which_somebody_is_missing_gets_no_lease_and_the_others_do() -> None:
    roster = Roster()
    say(roster, member("g0", "gang", 0, 2), load(2))
    say(roster, member("a"), load(4))
    assert roster.allocate() == 1
    assert roster.lease("g0") is None
    assert roster.lease("a") is not None
    say(roster, member("g1", "gang", 1, 2), load(3))
    assert roster.allocate() == 2
    assert roster.lease("g0") is not None
    roster.entries.pop("g1")
    roster.allocate()
    assert roster.lease("g0") is None, "a lease of a group that has come apart is taken back"


def test_who_is_silent_is_forgotten_and_who_is_replaced_stands_in_nobodys_way() -> None:
    roster = Roster()
    for name, rank in (("old0", 0), ("old1", 1)):
        say(roster, member(name, "gang-1", rank, 2), load(2), now=0.0)
    for name, rank in (("new0", 0), ("new1", 1)):
        say(roster, member(name, "gang-2", rank, 2), load(3), now=SILENT_SECONDS / 2)
    roster.forget_silent(SILENT_SECONDS - 0.01)
    assert roster.allocate() == 4
    roster.forget_silent(SILENT_SECONDS)
    assert set(roster.entries) == {"new0", "new1"}
    assert not roster.note("old0", load(1), Experience(), SILENT_SECONDS), "it must introduce itself again"


def test_only_what_was_reported_is_searched_again() -> None:
    roster = Roster()
    for name in ("a", "b"):
        say(roster, member(name), load(4))
    assert roster.allocate() == 2
    assert roster.allocate() == 0
    kept = roster.lease("a")
    roster.note("b", load(12), Experience(), 0.0)
    assert roster.allocate() == 1
    assert roster.lease("a") is kept is not None

    for rank in (0, 1):
        say(roster, member(f"rank{rank}", "group", rank, 2), load(4))
    assert roster.allocate() == 2
    roster.note("rank1", load(12), Experience(), 0.0)
    assert roster.allocate() == 2, "a group shares its rows"


def test_all_ranks_of_a_group_wait_for_the_prompts_of_one() -> None:
    roster = Roster()
    for rank, share in ((0, 1.0), (1, 0.5)):
        say(roster, member(f"rank{rank}", "group", rank, 2), replace(load(4), decode_share=share))
    roster.allocate()
    first, second = roster.lease("rank0"), roster.lease("rank1")
    assert first is not None
    assert second is not None
    assert first.floors == second.floors
    assert first.floors[1] > 0


def test_idle_engines_are_members_and_people_are_told_how_fast_a_request_would_be() -> None:
    roster = Roster()
    say(roster, member("idle"), load(0))
    say(roster, member("busy"), load(12))
    roster.allocate()
    roster.note("idle", load(0), Experience("lease", 100, 1.0), 0.0)
    roster.note("busy", load(12), Experience("lease", 100, 1.0), 0.0)
    busy, idle = account(roster, 0.0, 0.0).engines
    assert (busy.measured_tokens_per_second, idle.measured_tokens_per_second) == (100.0, 0.0)
    assert len(idle.speeds) == len(busy.speeds) == len(TIERS)
    assert min(idle.speeds) > max(busy.speeds) > 0


def test_engines_that_promise_different_tiers_are_served_apart() -> None:
    roster = Roster()
    say(roster, member("a"), load(4))
    say(roster, member("b", tiers=()), load(4, num_tiers=1))
    assert roster.allocate() == 2
    a, b = roster.lease("a"), roster.lease("b")
    assert a is not None
    assert b is not None
    assert (len(a.floors), len(b.floors)) == (2, 0)


def evidence(num_slots: int, passing: float) -> Evidence:
    """2000 tested first slots whose confidence was 0.5, most of which pass or don't."""
    one = np.full((2000, num_slots), 0.5)
    passed = (np.arange(2000) < 2000 * passing).astype(np.int64)
    return Evidence.of_step(one * 1.4, [1.0] * num_slots, np.ones(2000), passed, np.zeros(2000))


def test_temperatures_follow_everybodys_evidence_and_come_back_with_the_lease() -> None:
    roster = Roster()
    for name in ("a", "b"):
        say(roster, replace(member(name), temperatures=(1.0, 1.0), evidence=evidence(2, 0.99)), load(4))
    say(roster, member("no head"), load(4))
    roster.allocate()
    leases = [roster.lease(name) for name in ("a", "b", "no head")]
    assert all(leases)
    temperatures = [lease.temperatures for lease in leases if lease]
    assert temperatures[0] == temperatures[1]
    assert temperatures[0][0] < 1.0, "what said 0.7 passes almost always, so it is to say more"
    assert temperatures[0][1] == 1.0, "nothing was seen of the second slot"
    assert temperatures[2] == ()
    assert all(entry.member.evidence is None for entry in roster.entries.values())
    successor = Roster()
    say(successor, replace(member("a"), temperatures=temperatures[0], evidence=Evidence.none(2)), load(4))
    successor.allocate()
    lease = successor.lease("a")
    assert lease is not None
    assert lease.temperatures == temperatures[0], "a new scheduler goes on from what engines have"


def test_a_report_of_a_full_engine_fits_four_kilobytes() -> None:
    report = replace(load(256), survival=bytes(range(256)) * 7, paces=bytes(256))
    assert len(pickle.dumps((report, Experience()))) < 4096


@pytest.mark.parametrize("message", [LoadReport, BudgetLease, Answer, Experience, Member])
def test_no_message_of_the_scheduler_holds_a_time_of_day(message: type) -> None:
    """Clocks of nodes differ. A message may hold durations and speeds; a moment only its own process knows."""
    names = {field.name for field in dataclasses.fields(message)}
    assert not {
        name for name in names if re.search(r"(^|_)(at|time|timestamp|date|now|deadline|expiry|until)($|_)", name)
    }


def test_no_wall_clock_is_read_where_leases_are_made_or_used() -> None:
    folder = Path(cluster.__file__).parent
    for name in ("confidence_scheduler", "roster", "leases", "local_scheduler", "speeds", "fleet", "budget", "sla"):
        source = (folder / f"{name}.py").read_text()
        assert not re.search(r"time\.time\(|datetime|time_ns|CLOCK_REALTIME", source), name


def test_a_group_where_nothing_runs_gets_no_lease_that_would_hold_its_next_request_back() -> None:
    roster = Roster()
    for rank in range(2):
        say(roster, member(f"g{rank}", "g", rank, 2), load(0))
    assert roster.allocate() == 0 and roster.lease("g0") is None
    say(roster, member("g1", "g", 1, 2), load(1))
    assert roster.allocate() == 2 and roster.lease("g0") is not None


def test_a_group_is_sized_by_the_curve_of_its_fullest_rank() -> None:
    """The others wait for it, so their steps teach them nothing."""
    roster, steep = Roster(), curve(3.0)
    say(roster, member("g0", "g", 0, 2), load(1))
    say(roster, replace(member("g1", "g", 1, 2), curve=steep), load(6))
    roster.allocate()
    [[first, _]] = fleet.allocate([Group([load(1), load(6)], steep)], TIERS)
    [[other, _]] = fleet.allocate([Group([load(1), load(6)], COST)], TIERS)
    assert decided(roster.lease("g0")) == decided(first) != decided(other)
