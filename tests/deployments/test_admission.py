"""Where requests go: what is promised comes before what is cached, and that before small differences of load."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Request, SamplingParams
from deployments import admission
from deployments.admission import PrefixMemory, ReplicaLoad, Ticket, prompt_key, route
from deployments.config import SlaTierConfig

FAST = 1
CAPACITY = 40
NONE_KNOWN: dict[str, int] = {}


def load(
    name: str, num_requests: int, fast: float | None = None, then: int | None = None, room: int | None = None
) -> ReplicaLoad:
    """`fast`: the speed of the second tier, which promises 20; None: nothing is known."""
    speeds = () if fast is None else (0.0, fast)
    rooms = () if fast is None else (0, (9 if fast >= 20.0 else 0) if room is None else room)
    return ReplicaLoad(name, num_requests, CAPACITY, speeds, rooms, num_requests if then is None else then)


def best(loads: list[ReplicaLoad], tier: int | None = None, known: dict[str, int] = NONE_KNOWN) -> str:
    return loads[route(loads, tier, known, key=7).order[0]].name


def test_a_promise_goes_where_it_is_kept_whatever_the_load() -> None:
    loads = [load("idle", 0, 19.0), load("busy", 9, 20.0), load("fuller", 12, 40.0)]
    assert best(loads, FAST) == "busy"
    assert best(loads) == "idle", "who was promised nothing"
    assert route(loads, FAST, {}, 0).met is True


def test_the_unknown_is_better_than_what_fails_and_worse_than_what_keeps() -> None:
    loads = [load("fails", 0, 5.0), load("new", 3), load("keeps", 9, 25.0)]
    assert [loads[i].name for i in route(loads, FAST, {}, 0).order] == ["keeps", "new", "fails"]
    hopeless = route(loads[:2], FAST, {}, 0)
    assert (loads[hopeless.order[0]].name, hopeless.met) == ("new", None)


def test_where_none_keeps_it_the_fastest_is_next() -> None:
    loads = [load("a", 0, 5.0), load("b", 9, 15.0)]
    chosen = route(loads, FAST, {}, 0)
    assert (loads[chosen.order[0]].name, chosen.met) == ("b", False)


def burst(loads: list[ReplicaLoad], size: int) -> list[int]:
    """How many each gets of requests for which no promise holds, before there is other news."""
    got = [0] * len(loads)
    for _ in range(size):
        best_place = route(loads, FAST, {}, 0).order[0]
        loads = [replace(load, num_leaving=load.num_leaving + (i == best_place)) for i, load in enumerate(loads)]
        got[best_place] += 1
    return got


def test_where_none_keeps_it_a_burst_spreads() -> None:
    assert burst([load("a", 3, 8.0), load("b", 3, 8.0)], 20) == [10, 10]
    assert burst([load("a", 9, 15.0), load("b", 0, 5.0)], 1) == [1, 0]
    assert burst([load("fast", 0, 16.0), load("slow", 0, 8.0)], 24) == [16, 8]
    idle, busy = burst([load("idle", 0, 16.0), load("busy", 30, 8.0)], 32)
    assert idle >= 30, "where one more costs it as little as it costs the busy one"


def test_the_full_come_last_whatever_they_know() -> None:
    near = [load("full", CAPACITY), load("free", CAPACITY - 1)]
    assert best(near, known={"full": 256}) == "free"
    assert best([load("full", CAPACITY - 1), load("free", CAPACITY - 2)], known={"full": 256}) == "full", (
        "else it is best"
    )
    fails = load("fails", 3, 5.0)
    assert best([load("unknown", CAPACITY), fails], FAST) == "fails"
    assert best([load("faster", CAPACITY, 9.0), fails], FAST) == "fails"
    leaving = replace(load("keeps", CAPACITY - 2, 30.0), num_leaving=2)
    chosen = route([leaving, fails], FAST, {}, 0)
    assert (chosen.order, chosen.met) == ((1, 0), False)


def test_requests_since_the_news_take_the_room_that_there_was() -> None:
    assert [load("a", now, 40.0, then=3, room=2).keeps(FAST) for now in (1, 3, 4, 5)] == [True, True, True, False]
    assert load("a", 1).keeps(FAST) is None
    loads = [load("a", 7, 40.0, then=3, room=4), load("b", 30, 30.0)]
    assert best(loads, FAST) == "b"


def test_a_known_prefix_breaks_near_ties_only() -> None:
    known = {"a": 32, "b": 256}
    for ours, theirs, expected in ((8, 8, "b"), (10, 8, "b"), (11, 8, "a"), (1, 0, "b"), (2, 0, "a")):
        assert best([load("a", theirs), load("b", ours)], known=known) == expected, (ours, theirs)
    both_keep = [load("a", 0, 30.0), load("b", 1, 30.0)]
    assert best(both_keep, FAST, known) == "b"
    assert best([load("a", 0, 30.0), load("b", 0, 10.0)], FAST, known) == "a", "the promise comes first"


def test_new_prompts_spread_and_equal_ones_meet() -> None:
    loads = [load(name, 4) for name in "abcd"]

    def place(key: int) -> str:
        return loads[route(loads, None, {}, key).order[0]].name

    assert {place(key) for key in range(64)} == set("abcd")
    mirrored = list(reversed(loads))
    assert all(mirrored[route(mirrored, None, {}, key).order[0]].name == place(key) for key in range(64))


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.floats(0, 100)), min_size=1), st.sampled_from([None, FAST]))
def test_every_replica_is_an_option_once(known: list[tuple[int, float | None]], tier: int | None) -> None:
    loads = [load(f"r{i}", num, fast) for i, (num, fast) in enumerate(known)]
    chosen = route(loads, tier, {}, 3)
    assert sorted(chosen.order) == list(range(len(loads)))
    assert chosen.met is (True if tier is None else loads[chosen.order[0]].keeps(tier))


def test_prefixes_are_remembered_by_their_longest() -> None:
    memory = PrefixMemory()
    prompt = tuple(range(100))
    assert memory.known(prompt) == {}
    memory.served(prompt, "a")
    assert memory.known(prompt) == {"a": 64}
    longer = (*prompt, *range(200))
    memory.served(longer, "b")
    assert memory.known(longer) == {"b": 256}
    assert memory.known(prompt[:40]) == {"b": 32}, "who served it last"
    assert memory.known((5, *prompt)) == memory.known(prompt[:31]) == {}


def test_memory_is_bounded(monkeypatch: object) -> None:
    monkeypatch.setattr(admission, "MAX_PREFIXES", 10)  # type: ignore[attr-defined]
    memory = PrefixMemory()
    for i in range(50):
        memory.served((i, *range(31)), "a")
    assert memory.known((49, *range(31))) and memory.known((40, *range(31)))
    assert not memory.known((39, *range(31)))


def test_prompts_that_begin_alike_have_one_key_in_every_process() -> None:
    assert prompt_key(tuple(range(100))) == prompt_key((*range(32), 5)) == 2_874_266_022
    assert prompt_key((1, 2)) != prompt_key((2, 1))


def ticket(when_unmet: str, wait_until: float = 0.0, must_serve: bool = False) -> Ticket:
    tier = SlaTierConfig.model_validate({"name": "t", "min_tokens_per_second": 1, "when_unmet": when_unmet})
    request = Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    return Ticket(request, tier, wait_until, must_serve, lambda outcome: None)


def test_only_a_promise_known_to_fail_is_held_back_or_refused() -> None:
    for met, holds, sheds in ((True, False, False), (None, False, False), (False, True, True)):
        assert ticket("shed", wait_until=5.0).holds(met, now=4.0) is holds
        assert ticket("shed").sheds(met) is sheds
    assert not ticket("shed", wait_until=5.0).holds(False, now=5.0)
    assert not ticket("serve").sheds(False)


def test_who_had_a_place_is_neither_held_back_nor_refused() -> None:
    moving = ticket("shed", wait_until=5.0, must_serve=True)
    assert not moving.holds(False, now=4.0) and not moving.sheds(False)
