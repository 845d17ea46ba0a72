"""The closed loop counts what a stopwatch and a tally would: checked on a backend whose every step is known."""

from __future__ import annotations

from itertools import count

import pytest

from ops.benchmarks.drive import Measurement, OwnClock, Progress, drive, steps, turns


class Countdown:
    """Each request yields one token per step until its length, its only prompt token, is reached."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.in_flight: list[int] = []

    def add(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> None:
        self.left[request_id] = prompt_token_ids[0]

    def step(self) -> list[Progress]:
        self.in_flight.append(len(self.left))
        progress = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            finished = self.left[request_id] == 0
            progress.append(Progress(request_id, 1, finished, num_rounds=4 * finished, num_accepted=6 * finished))
            if finished:
                del self.left[request_id]
        return progress


def test_places_are_refilled_and_the_tail_is_not_counted() -> None:
    backend = Countdown()
    measured = drive(backend, [(3,), (1,), (2,), (4,)], concurrency=2)
    assert backend.in_flight == [2, 2, 2, 1, 1, 1, 1]
    assert measured.num_tokens == 2 * backend.in_flight.count(2)
    assert measured.user_tokens == 2 + 0 + 1 + 3
    assert (measured.num_rounds, measured.num_accepted) == (16, 24)
    assert measured.accepted_length == 2.5


def test_one_at_a_time_counts_every_token() -> None:
    assert drive(Countdown(), [(3,), (1,), (2,)], concurrency=1).num_tokens == 6


def test_fewer_prompts_than_places_measures_nothing() -> None:
    assert drive(Countdown(), [(3,)], concurrency=2).tokens_per_second == 0.0


def test_measurements_add_up_before_rates_are_formed() -> None:
    total = Measurement(num_tokens=10, seconds=1.0) + Measurement(num_tokens=20, seconds=4.0)
    assert total.tokens_per_second == pytest.approx(6.0)
    assert Measurement(num_tokens=5, seconds=1.0).accepted_length == 1.0


def test_a_loop_that_takes_turns_is_measured_on_its_own_clock() -> None:
    measured, clock = Measurement(), count()
    taken = sum(1 for _ in steps(Countdown(), [(3,), (1,), (2,)], 1, measured, lambda: float(next(clock))))
    assert taken == 6 and measured.seconds == 6.0


def test_whoever_had_least_time_is_next_and_clocks_stand_still_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = 0.0, []
    monkeypatch.setattr("ops.benchmarks.drive.time.perf_counter", lambda: now)

    class Slow(Countdown):
        def __init__(self, name: str, seconds: float) -> None:
            super().__init__()
            self.name, self.seconds = name, seconds

        def step(self) -> list[Progress]:
            nonlocal now
            now += self.seconds
            order.append(self.name)
            return super().step()

    clocks, measured = [OwnClock(), OwnClock()], [Measurement(), Measurement()]
    loops = [
        steps(Slow("a", 1.0), [(2,), (1,)], 1, measured[0], clocks[0]),
        steps(Slow("b", 10.0), [(1,)], 1, measured[1], clocks[1]),
    ]
    for _ in turns(loops, clocks):
        now += 100.0
    assert order == ["a", "b", "a", "a"]
    assert [each.seconds for each in measured] == [clock() for clock in clocks] == [3.0, 10.0]
