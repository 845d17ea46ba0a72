"""Speculation never changes the answer: chi-square of both modes against the target, with controls that fail.

The target and the draft are small Markov chains, so the exact distribution of every run of tokens is known; everything
between them (drawing, lengths, acceptance, recovery, bonus) is the real code on hundreds of thousands of ragged rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from drafter.interface import Draft
from drafter.speculative import Purpose, SamplingRows, probabilities, round_seeds, sample, verify

VOCABULARY = 11
BLOCK = 7
NUM_TOKENS = 2
FULL = torch.arange(VOCABULARY)
REDUCED = torch.tensor([0, 2, 3, 5, 7, 10])


@dataclass(frozen=True)
class Kind:
    """One way to sample, as a user would ask for it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


KINDS = (
    Kind(),
    Kind(temperature=0.7),
    Kind(temperature=1.3, top_k=4),
    Kind(top_p=0.8),
    Kind(temperature=0.9, top_k=6, top_p=0.9, min_p=0.08),
    Kind(temperature=0.0),
)


def chain(seed: int, size: int = VOCABULARY) -> Tensor:
    """Logits of the next token given the last one, [V, size]."""
    return 1.5 * torch.randn(VOCABULARY, size, generator=torch.Generator().manual_seed(seed))


TARGET = chain(1)


def reference(logits: Tensor, kind: Kind) -> Tensor:
    """The definition of sampling, one row at a time in plain Python: [V] -> fp64 [V]."""
    if kind.temperature == 0:
        return torch.eye(len(logits), dtype=torch.float64)[int(logits.argmax())]
    weights = (logits.double() / kind.temperature).softmax(0)
    order = sorted(range(len(weights)), key=lambda token: -float(weights[token]))
    keep = order[: kind.top_k] if kind.top_k else order
    mass, nucleus = 0.0, []
    for token in keep:
        if mass >= kind.top_p * float(weights[keep].sum()):
            break
        nucleus.append(token)
        mass += float(weights[token])
    kept = torch.zeros_like(weights)
    kept[nucleus] = weights[nucleus]
    kept[kept < kind.min_p * kept.max()] = 0
    return kept / kept.sum()


def exact_joint(kind: Kind, anchor: int = 0) -> Tensor:
    """P(first NUM_TOKENS tokens), flat over V ** NUM_TOKENS."""
    step = torch.stack([reference(row, kind) for row in TARGET])
    joint = step[anchor]
    for _ in range(NUM_TOKENS - 1):
        joint = (joint.reshape(-1, VOCABULARY)[:, :, None] * step[None]).reshape(-1)
    return joint


def sampling_rows(kinds: Tensor, seeds: Tensor, positions: Tensor, coupled: Tensor) -> SamplingRows:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(kind, name) for kind in KINDS], dtype=dtype)[kinds]

    return SamplingRows(
        column("temperature", torch.float32),
        column("top_k", torch.int64),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        seeds,
        positions,
        coupled,
    )


def propose(chain_logits: Tensor, target_ids: Tensor, anchors: Tensor, rows: SamplingRows) -> Draft:
    """A drafter of BLOCK tokens: the draft chain, sampled as each request samples. rows.positions: the first slots'."""
    tokens, ids, given = [], [], []
    last = anchors
    for slot in range(BLOCK):
        at = rows.at(rows.positions + slot)
        drawn_from = probabilities(chain_logits[last], at)
        draft_ids = sample(drawn_from, at, Purpose.DRAFT, target_ids)
        last = target_ids[draft_ids]
        tokens.append(last)
        ids.append(draft_ids)
        given.append(drawn_from)
    ones = torch.ones(len(anchors), BLOCK)
    return Draft(torch.stack(tokens, 1), torch.stack(ids, 1), torch.stack(given, 1), ones)


@dataclass
class Run:
    """What a simulated engine emitted."""

    tokens: Tensor
    """[R, NUM_TOKENS]."""
    num_rows: int
    num_accepted: int
    num_rounds: int
    """Verify rounds of all requests together."""


def decode(
    kinds: Tensor,
    coupled: Tensor,
    *,
    draft_chain: Tensor | None,
    target_ids: Tensor = FULL,
    told: Callable[[Draft], Draft] = lambda draft: draft,
    told_ids: Tensor | None = None,
    seed: int = 0,
) -> Run:
    """Rounds of draft and verify, lengths drawn from 0..BLOCK, until every request has NUM_TOKENS tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_requests = len(kinds)
    seeds = torch.arange(num_requests) * 3 + 1_000_003 * seed
    tokens = torch.full((num_requests, NUM_TOKENS + BLOCK + 2), -1)
    tokens[:, 0] = 0
    lengths_done = torch.zeros(num_requests, dtype=torch.int64)
    run = Run(tokens, 0, 0, 0)
    for round_number in range(NUM_TOKENS):  # each round emits at least one token
        active = (lengths_done < NUM_TOKENS).nonzero()[:, 0]
        done = lengths_done[active]
        anchors = tokens[active, done]
        lengths = torch.randint(0, BLOCK + 1, (len(active),), generator=generator)
        fresh = round_seeds(seeds[active], coupled[active], round_number)
        first = sampling_rows(kinds[active], fresh, done + 1, coupled[active])
        draft = None if draft_chain is None else propose(draft_chain, target_ids, anchors, first)
        if draft is None:
            lengths = torch.zeros_like(lengths)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), (1 + lengths).cumsum(0)])
        owner = torch.repeat_interleave(torch.arange(len(active)), 1 + lengths)
        slot = torch.arange(int(starts[-1])) - starts[owner]
        before = anchors[:, None] if draft is None else torch.cat([anchors[:, None], draft.tokens], 1)
        logits = TARGET[before[owner, slot]]
        rows = first.select(owner)
        result = verify(
            logits,
            starts,
            draft and told(draft),
            lengths,
            rows.at(rows.positions + slot),
            told_ids if told_ids is not None else None if target_ids is FULL else target_ids,
        )
        accepted = result.num_accepted
        assert bool((accepted <= lengths).all())
        if draft is not None:
            for k in range(BLOCK):
                has = accepted > k
                tokens[active[has], done[has] + 1 + k] = draft.tokens[has, k]
        tokens[active, (done + accepted + 1).clamp(max=tokens.shape[1] - 1)] = result.next_tokens
        lengths_done[active] += accepted + 1
        run.num_rows += len(owner)
        run.num_rounds += len(active)
        run.num_accepted += int(accepted.sum())
    run.tokens = tokens[:, 1 : NUM_TOKENS + 1]
    return run


def p_values(run: Run, kinds: Tensor) -> list[float]:
    """Chi-square of the joint distribution of the first NUM_TOKENS tokens, per kind. Impossible tokens give 0."""
    flat = torch.zeros(len(kinds), dtype=torch.int64)
    for column in run.tokens.T:
        flat = flat * VOCABULARY + column
    values = []
    for number, kind in enumerate(KINDS):
        expected = exact_joint(kind)
        counts = flat[kinds == number].bincount(minlength=len(expected)).double()
        if counts[expected == 0].any():
            values.append(0.0)
            continue
        expected = expected * counts.sum()
        common = expected >= 5  # rarer runs form one cell
        cells = torch.cat([counts[common], counts[~common].sum()[None]])
        wanted = torch.cat([expected[common], expected[~common].sum()[None]])
        present = wanted > 0
        values.append(1.0 if present.sum() < 2 else float(chisquare(cells[present], wanted[present]).pvalue))
    return values


def population(num_requests: int, *, coupled: bool | None) -> tuple[Tensor, Tensor]:
    """Kinds and modes, interleaved; None mixes the modes in one batch."""
    kinds = torch.arange(num_requests) % len(KINDS)
    modes = (
        torch.arange(num_requests) // len(KINDS) % 2 == 0 if coupled is None else torch.full((num_requests,), coupled)
    )
    return kinds, modes


@pytest.mark.parametrize("target_ids", [FULL, REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize("coupled", [False, True, None], ids=["rejection", "coupled", "mixed"])
def test_emitted_runs_follow_the_target(coupled: bool | None, target_ids: Tensor) -> None:
    kinds, modes = population(36_000, coupled=coupled)
    run = decode(
        kinds, modes, draft_chain=0.8 * TARGET[:, target_ids] + 0.4 * chain(2, len(target_ids)), target_ids=target_ids
    )
    assert run.num_rows >= 200_000
    assert run.num_accepted > 10_000  # the drafts are neither hopeless nor the target's own
    assert min(p_values(run, kinds)) > 1e-3


def test_a_hopeless_draft_changes_nothing() -> None:
    kinds, modes = population(36_000, coupled=None)
    run = decode(kinds, modes, draft_chain=-TARGET)
    assert run.num_rows >= 200_000
    assert min(p_values(run, kinds)) > 1e-3


def test_control_a_wrong_draft_distribution_is_detected() -> None:
    """The probabilities handed to verify are not those that the tokens were drawn from: at another temperature."""

    def sharpened(draft: Draft) -> Draft:
        wrong = draft.probabilities**1.5
        wrong = wrong / wrong.sum(-1, keepdim=True)
        return Draft(draft.tokens, draft.draft_ids, wrong, draft.confidences)

    kinds, modes = population(36_000, coupled=False)
    run = decode(kinds, modes, draft_chain=chain(2), told=sharpened)
    sampled = p_values(run, kinds)[:-1]  # greedy verification doesn't depend on p_d
    assert max(sampled) < 1e-6


def test_control_a_shifted_vocabulary_map_is_detected() -> None:
    kinds, modes = population(24_000, coupled=False)
    run = decode(kinds, modes, draft_chain=chain(2, len(REDUCED)), target_ids=REDUCED, told_ids=REDUCED - REDUCED % 2)
    assert min(p_values(run, kinds)[:-1]) < 1e-12


@pytest.mark.parametrize("target_ids", [FULL, REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize("share", [0.0, 0.9], ids=["poor drafts", "good drafts"])
def test_coupled_tokens_are_those_of_plain_decoding(target_ids: Tensor, share: float) -> None:
    kinds, modes = population(12_000, coupled=True)
    plain = decode(kinds, modes, draft_chain=None)
    draft_chain = share * TARGET[:, target_ids] + (1 - share) * chain(3, len(target_ids))
    run = decode(kinds, modes, draft_chain=draft_chain, target_ids=target_ids)
    assert run.num_accepted > 1000
    assert torch.equal(run.tokens, plain.tokens)


def test_coupled_tokens_do_not_depend_on_what_shares_their_batch() -> None:
    kinds, mixed = population(2_400, coupled=None)
    among_others = decode(kinds, mixed, draft_chain=chain(2))
    only_coupled = decode(kinds, torch.ones_like(mixed), draft_chain=None)
    assert torch.equal(among_others.tokens[mixed], only_coupled.tokens[mixed])
    sampled = ~mixed & (kinds < len(KINDS) - 1)
    assert not torch.equal(among_others.tokens[sampled], only_coupled.tokens[sampled])


def test_greedy_tokens_are_those_of_plain_decoding() -> None:
    kinds = torch.full((2_000,), len(KINDS) - 1)
    rejection = torch.zeros(2_000, dtype=torch.bool)
    run = decode(kinds, rejection, draft_chain=TARGET + 0.1 * chain(3))
    assert run.num_accepted > 200
    assert torch.equal(run.tokens, decode(kinds, rejection, draft_chain=None).tokens)


def test_a_perfect_draft_is_always_accepted() -> None:
    kinds, modes = population(6_000, coupled=None)
    run = decode(kinds, modes, draft_chain=TARGET)
    assert run.num_accepted == run.num_rows - run.num_rounds  # all but the bonus rows
