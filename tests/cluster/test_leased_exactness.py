"""Leases change speed and never the answer: the whole engine against its target, under leases of every kind.

Each emitted token is put through the target's own conditional distribution, computed by Hugging Face from the whole
text before it: u = P(earlier tokens in a fixed order) + V * P(token), V uniform, is uniform if and only if tokens are
drawn from that distribution. Chi-square of u in 16 bins says so for every position and context at once. Confidences of
the drafter tell what it drafted, so whoever looks at the wrong ones is found out: that is the control.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from test_roster import member
from test_scheduling import curve
from tiny_engine import Outputs, TinyDrafter, make_engine, request, tiny_llama
from torch import Tensor

from cluster.engine import Engine
from cluster.messages import BudgetLease, StepResult
from cluster.roster import Experience, Member, Roster

pytestmark = pytest.mark.usefixtures("known_seeds")
VOCAB = 8
ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
"""Evens first: the drafter is sure of a block that begins with one."""
PROMPT = [1, 2, 3]
NUM_REQUESTS, NUM_WAVES, NUM_TOKENS = 8, 6, 100
STEP_SECONDS = 0.25
"""On the engine's clock: a lease lasts four steps."""
NUM_BINS = 16

Answer = Callable[[Engine, StepResult], None]


class TellingDrafter(TinyDrafter):
    """Of every slot but the first, the confidence says whether the slot before holds an even token."""

    temperatures = (1.0,) * 4

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        """What it says stays what it is."""

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        draft = super().propose(*args, **kwargs)
        draft.confidences[:, 1:] = torch.where(draft.tokens[:, :-1] % 2 == 0, 0.9, 0.3)
        return draft


def telling_drafter() -> TellingDrafter:
    def logits(anchor: int, position: int, slot: int) -> Tensor:
        generator = torch.Generator().manual_seed(anchor * 101 + slot)
        return torch.randn(VOCAB, generator=generator)

    return TellingDrafter(logits, torch.arange(VOCAB))


@pytest.fixture(scope="module")
def octal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model of eight tokens."""
    return tiny_llama(tmp_path_factory.mktemp("octal"), VOCAB)


def make(folder: Path, lockstep: bool = False, learns: bool = False) -> Engine:
    """Its curve is what it is, and unless it `learns` it goes on drafting however little that brings."""
    settings = {"data_parallel_size": 2} if lockstep else {}
    engine = make_engine(folder, telling_drafter(), curve(0.1), speculation="scheduled", **settings)
    engine._scheduler.refresh = lambda result: None  # type: ignore[method-assign]
    if not learns:
        engine._scheduler.learn = lambda *_: None  # type: ignore[method-assign]
    return engine


def serve(engine: Engine, answer: Answer) -> tuple[list[list[int]], Counter[str]]:
    """Waves of equal requests, unseeded; `answer` acts as the scheduler after each step. (texts, steps by mode)."""
    texts, modes = [], Counter[str]()
    now = 0.0
    engine.clock = lambda: now
    for wave in range(NUM_WAVES):
        outputs = Outputs()
        for number in range(NUM_REQUESTS):
            engine.add(request(PROMPT, f"{wave}-{number}", max_tokens=NUM_TOKENS, temperature=1.0))
        while engine.has_work:
            result = engine.step()
            outputs.observe(result)
            answer(engine, result)
            now += STEP_SECONDS
        texts += outputs.tokens.values()
        modes.update(step.mode for step in outputs.steps)
    return texts, modes


def pvalue(model: Any, texts: list[list[int]]) -> float:
    """Of the texts being drawn from the model."""
    ids = torch.tensor(texts)
    with torch.inference_mode():
        logits = model(torch.cat([torch.tensor(PROMPT).expand(len(ids), -1), ids], dim=1)).logits
    given = logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)[..., ORDER]
    places = ORDER.argsort()[ids][..., None]
    below = (given.cumsum(-1) - given).gather(-1, places)
    u = below + given.gather(-1, places) * torch.rand(places.shape, generator=torch.Generator().manual_seed(3))
    counts = (u.flatten() * NUM_BINS).long().clamp(max=NUM_BINS - 1).bincount(minlength=NUM_BINS)
    return float(chisquare(counts.numpy()).pvalue)


class Fleet:
    """The real scheduler's arithmetic, without Ray; it may be killed, and another takes its place."""

    def __init__(self, *, members: tuple[Member, ...], killed_every: int = 0) -> None:
        """members: the engine under test first; the others report what it does, a step late."""
        self._members = members
        self._killed_every = killed_every
        self._num_steps = 0
        self._roster = Roster()

    def __call__(self, engine: Engine, result: StepResult) -> None:
        self._num_steps += 1
        if self._killed_every:
            phase = self._num_steps % self._killed_every
            if phase == 0:
                self._roster = Roster()
            if phase < self._killed_every // 2:
                return  # nobody is there
        for each in self._members:
            self._roster.introduce(each, 0.0)
            self._roster.note(each.engine, result.report, Experience(), 0.0)
        self._roster.allocate()
        lease = self._roster.lease(self._members[0].engine)
        if lease is None:  # nothing of the group runs
            assert not result.report.tiers
            return
        engine.offer(lease, result.report, engine.clock())


def adversary() -> Answer:
    """Any cap, any price, another one for each step."""
    dice = random.Random(1)

    def answer(engine: Engine, result: StepResult) -> None:
        lease = BudgetLease(cap=dice.choice([0, 1, 2, 5, 9, 99]), price=dice.choice([0.0, 0.1, 0.4, 0.8]))
        engine.offer(lease, result.report, engine.clock())

    return answer


ALONE = (member("a", tiers=()), member("b", tiers=()))
GANG = (member("a", "gang", 0, 2, ()), member("b", "gang", 1, 2, ()))


@pytest.mark.parametrize(
    ("lockstep", "learns", "answer"),
    [
        (False, False, Fleet(members=ALONE)),
        (False, True, Fleet(members=ALONE)),
        (True, False, Fleet(members=GANG)),
        (False, False, adversary()),
        (True, False, Fleet(members=GANG, killed_every=24)),
    ],
    ids=["fleet", "learning", "lockstep group", "adversarial leases", "scheduler killed again and again"],
)
def test_the_answer_is_the_targets(octal: tuple[Path, Any], lockstep: bool, learns: bool, answer: Answer) -> None:
    texts, modes = serve(engine := make(octal[0], lockstep, learns), answer)
    assert (engine._scheduler._passing != 1) == learns
    assert {len(text) for text in texts} == {NUM_TOKENS}
    assert modes["lease"] > 0.3 * sum(modes.values()), modes
    if isinstance(answer, Fleet) and answer._killed_every:
        assert modes["local"] > 0.2 * sum(modes.values()), modes
    assert pvalue(octal[1], texts) > 1e-3


def test_a_lease_that_knew_the_current_drafts_would_be_found_out(octal: tuple[Path, Any]) -> None:
    """The control: a budget made from the very confidences that it decides about."""
    engine = make(octal[0])

    def peeking(plan: Any, lease: BudgetLease) -> list[int]:
        return [len(c.proposed) if max(c.sequence.confidences[1:], default=0.0) > 0.5 else 0 for c in plan.drafted]

    engine._scheduler.admit = peeking  # type: ignore[method-assign]
    texts, _ = serve(engine, Fleet(members=ALONE))
    assert pvalue(octal[1], texts) < 1e-6
