"""Who is verified never depends on the token at stake: the paper's Appendix A, and the leaks that would bring it back.

All on the real draft sampling, admission and acceptance; the toy target and draft are Appendix A's.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.budget import admit, algorithm_1
from cluster.messages import BudgetLease
from drafter.interface import Draft
from drafter.speculative import Purpose, SamplingRows, probabilities, round_seeds, sample, verify

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
TARGET = torch.tensor([0.7, 0.3]).log()
DRAFT = torch.tensor([0.5, 0.5]).log()
STEPS_PER_SECOND = {1: 1.0, 2: 0.5, 3: 0.45}
NUM_TRIALS = 200_000
FOUR_SIGMA = 4 * (0.7 * 0.3 / NUM_TRIALS) ** 0.5


def rows_at(position: int, seeds: Tensor) -> SamplingRows:
    ones = torch.ones(len(seeds))
    zeros = torch.zeros(len(seeds), dtype=torch.int64)
    return SamplingRows(ones, zeros, ones, zeros.float(), seeds, zeros + position, zeros.bool())


def propose(position: int, seeds: Tensor, block: int) -> Draft:
    """Every slot from the same coin."""
    rows = rows_at(position, seeds)
    given = probabilities(DRAFT.expand(len(seeds), -1), rows)
    tokens = torch.stack([sample(given, rows.at(rows.positions + j), Purpose.DRAFT) for j in range(block)], 1)
    return Draft(tokens, tokens, given[:, None].expand(-1, block, -1), torch.ones(len(seeds), block))


def share_of_a(position: int, seeds: Tensor, draft: Draft, lengths: Tensor) -> float:
    """How often the first emitted token is A (id 0)."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (1 + lengths).cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(seeds)), 1 + lengths)
    rows = rows_at(position, seeds).select(owner)
    rows = rows.at(rows.positions + torch.arange(len(owner)) - starts[owner])
    result = verify(TARGET.expand(len(owner), -1), starts, draft, lengths, rows)
    first = torch.where(result.num_accepted > 0, draft.tokens[:, 0], result.next_tokens)
    return float((first == 0).double().mean())


@pytest.mark.parametrize(("search", "expected"), [("retrospective", 0.85), ("causal", 0.7)])
def test_appendix_a(search: Literal["retrospective", "causal"], expected: float) -> None:
    """a_1 = .8; c_2 = .9 if x_1 = A, else 0; SPS = 1, .5, .45. A retrospective argmax outputs A with .85, not .7."""
    seeds = torch.arange(NUM_TRIALS)
    draft = propose(1, seeds, block=2)
    length = {}
    for token, second in ((0, 0.8 * 0.9), (1, 0.0)):
        survival = [0.8, second]
        if search == "causal":
            (length[token],) = algorithm_1([survival], STEPS_PER_SECOND.__getitem__)
        else:
            rates = [(1 + sum(survival[:n])) * STEPS_PER_SECOND[1 + n] for n in range(3)]
            length[token] = int(np.argmax(rates))
    lengths = torch.tensor([length[0], length[1]])[draft.tokens[:, 0]]
    assert share_of_a(1, seeds, draft, lengths) == pytest.approx(expected, abs=FOUR_SIGMA)


@pytest.mark.parametrize(("fresh", "expected"), [(True, 0.7), (False, 0.85)])
def test_old_confidences_leak_nothing_only_because_every_round_has_fresh_seeds(fresh: bool, expected: float) -> None:
    """A slot drafted two steps ago is drafted again now; the confidence behind it saw the OLD token of that slot.

    With numbers keyed by (seed, position) alone the new token equals the old one, so the two-steps-old confidence
    decides about it: Appendix A by the back door.
    """
    seeds, never = torch.arange(NUM_TRIALS), torch.zeros(NUM_TRIALS, dtype=torch.bool)

    def seeds_of(step: int) -> Tensor:
        return round_seeds(seeds, never, step) if fresh else seeds

    old = propose(1, seeds_of(0), block=4)  # positions 1..4; one token a step is committed
    cap = torch.where(old.tokens[:, 2] == 0, 1, 0)  # the slot behind position 3 was confident if that held A
    new = propose(3, seeds_of(2), block=4)
    assert share_of_a(3, seeds_of(2), new, cap) == pytest.approx(expected, abs=FOUR_SIGMA)


def test_the_draft_that_is_verified_may_be_any_as_long_as_nothing_looked_at_it() -> None:
    seeds = torch.arange(NUM_TRIALS)
    lengths = torch.arange(NUM_TRIALS) % 3
    assert share_of_a(1, seeds, propose(1, seeds, block=2), lengths) == pytest.approx(0.7, abs=FOUR_SIGMA)


confidences = st.sampled_from([0.0, 0.2, 0.5, 0.5, 0.9, 0.9, 1.0])


@UNTIMED
@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_changing_a_token_never_changes_whether_its_own_slot_is_admitted(
    data: st.DataObject, num_requests: int, block: int
) -> None:
    """x_j may change every confidence behind slot j of its request, and nothing else: so redraw just those."""

    def table() -> list[list[float]]:
        row = st.lists(confidences, min_size=block, max_size=block)
        return data.draw(st.lists(row, min_size=num_requests, max_size=num_requests))

    before = np.array(table())
    request, slot = data.draw(st.integers(0, num_requests - 1)), data.draw(st.integers(0, block - 1))
    after = before.copy()
    after[request, slot + 1 :] = np.array(table())[request, slot + 1 :]
    limits = data.draw(st.lists(st.integers(0, block), min_size=num_requests, max_size=num_requests))
    lease = BudgetLease(cap=data.draw(st.integers(0, 12)), price=data.draw(st.sampled_from([0.0, 0.1, 0.5])))
    first = admit(before.cumprod(axis=1), limits, lease)
    second = admit(after.cumprod(axis=1), limits, lease)
    assert (first[request] > slot) == (second[request] > slot)
    # Nor whether the slots before it are.
    assert min(first[request], slot + 1) == min(second[request], slot + 1)
