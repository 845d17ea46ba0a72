"""Requests that are too hard to draft for: who pays for its place in the draft pass, and who is asked again later.

The budget decides what is verified, and whether anybody drafts. But the pass itself grows with the requests in it, and
one whose drafts hardly ever pass makes all others wait for its rows. So each request's recent return, the drafts that
passed per round that drafted for it, is held against what its place costs: the time by which the pass is longer with
it, in tokens that the engine makes meanwhile. Who doesn't repay that is left out, and gets a few rounds again after a
backoff that doubles each time.

Knows counts of committed tokens that are RETURN_AGE_STEPS old, no confidence, and no clock: outcomes are what count
here, since a head that is wrong about a request is one of the reasons to be here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RETURN_AGE_STEPS = 2
"""Outcomes count from so many steps on, like the reports that the budget rests on."""
RETURN_RATE = 0.05
"""How fast a return follows its rounds."""
TRIAL_ROUNDS = 16
"""So many drafted rounds come before the first verdict."""
PROBE_ROUNDS = 6
"""So many come before each later one, and count as much as all before them."""
FIRST_BACKOFF_STEPS, LONGEST_BACKOFF_STEPS = 32, 1024


@dataclass(slots=True)
class Return:
    """What drafting for one request came to."""

    passed_per_round: float = 0.0
    """Drafts that passed per drafted round: the mean of the first ones, later following the latest."""
    num_rounds: int = 0
    """Drafted rounds so far."""
    rounds_to_verdict: int = TRIAL_ROUNDS
    steps_left_out: int = 0
    """Steps that it is still to be left out; 0: it is drafted for."""
    backoff_steps: int = FIRST_BACKOFF_STEPS

    @property
    def left_out(self) -> bool:
        return self.steps_left_out > 0

    @property
    def expected(self) -> bool:
        """Whether the budget reckons with its drafts: it learns of a return as early as of everything."""
        return self.steps_left_out <= RETURN_AGE_STEPS

    def observe(self, num_passed: int) -> None:
        """One round that drafted."""
        self.num_rounds += 1
        self.rounds_to_verdict -= 1
        rate = max(RETURN_RATE, 1 / self.num_rounds)
        self.passed_per_round += rate * (num_passed - self.passed_per_round)

    def judge(self, share: float) -> None:
        """Once a step, with what a place in the draft pass costs in tokens."""
        if self.left_out:
            self.steps_left_out -= 1
            if not self.left_out:
                self.rounds_to_verdict = PROBE_ROUNDS
                self.num_rounds = min(self.num_rounds, PROBE_ROUNDS)
        elif self.rounds_to_verdict <= 0:
            if self.passed_per_round >= share:
                self.backoff_steps = FIRST_BACKOFF_STEPS
            else:
                self.steps_left_out = self.backoff_steps
                self.backoff_steps = min(2 * self.backoff_steps, LONGEST_BACKOFF_STEPS)


@dataclass(frozen=True, slots=True)
class Round:
    """What one step came to."""

    drafted: tuple[tuple[Return, int], ...]
    """For whom drafts were made, and how many of them passed."""
    num_tokens: int
    """Committed by all that decode."""
    seconds: float
    """What the cost curve expects of the step without its prompts."""


class Returns:
    """The verdicts on all running requests, from rounds as old as they must be."""

    def __init__(self) -> None:
        self._fresh: deque[Round] = deque(maxlen=RETURN_AGE_STEPS)
        self._num_tokens = self._seconds = 0.0

    def observe(self, done: Round) -> None:
        """It counts RETURN_AGE_STEPS later."""
        if len(self._fresh) == RETURN_AGE_STEPS:
            old = self._fresh[0]
            for request, num_passed in old.drafted:
                request.observe(num_passed)
            self._num_tokens += RETURN_RATE * (old.num_tokens - self._num_tokens)
            self._seconds += RETURN_RATE * (old.seconds - self._seconds)
        self._fresh.append(done)

    def judge(self, requests: Sequence[Return], draft_seconds: Callable[[int], float]) -> None:
        """Once a step, all requests that decode. `draft_seconds`: of a pass for so many.

        A place costs the tokens that all make in the time by which it makes the pass longer.
        """
        if not self._seconds:
            return
        num_drafted = sum(not request.left_out for request in requests)
        longer = draft_seconds(num_drafted) - draft_seconds(max(num_drafted - 1, 0))
        share = max(longer, 0.0) * self._num_tokens / self._seconds
        for request in requests:
            request.judge(share)
