"""Alignments of the drafter: what a slot sees, which token came before it, and that drafting equals training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.config import DrafterConfig, default_target_layer_ids
from drafter.dspark import DSpark
from drafter.interface import Draft
from tests.drafter.conftest import drafter_config, random_drafter

LENGTH, ANCHOR = 23, 17


def greedy(_slot: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(-1), logits.softmax(-1, dtype=torch.float32)


def teacher_forced(model: DSpark, tokens: Tensor, taps: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
    """Logits [G, V] and confidences [G] of one block by the training path, previous tokens taken from `tokens`."""
    keys, values = model.project_context(taps[None], torch.arange(len(taps))[None])
    visible = (torch.arange(len(taps)) < anchor)[None, None]
    hidden = model.hidden(tokens[anchor].view(1, 1), torch.tensor([[anchor]]), keys, values, visible)[0, 0]
    state = hidden.new_zeros(1, model.config.markov_rank)
    logits, confidences = [], []
    for slot in range(model.block_size):
        previous = model.previous_embedding(tokens[anchor + slot][None])
        row = hidden[slot][None]
        assert model.confidence_head is not None
        confidences.append(torch.sigmoid(model.confidence_head(row, previous)))
        base = row @ model.lm_head.T
        if previous is not None:
            base, state = model.slot_logits(base, row, previous, state)
        logits.append(base[0])
    return torch.stack(logits), torch.cat(confidences)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("draft_vocab_size", [97, 40])
def test_cached_drafting_equals_teacher_forcing_on_the_drafted_tokens(kind: str, draft_vocab_size: int) -> None:
    model = random_drafter(drafter_config(markov_head_type=kind, draft_vocab_size=draft_vocab_size))
    tokens = torch.randint(0, 97, (LENGTH + 8,))
    taps = torch.randn(LENGTH, 5 * 64)
    # Context rows come in pieces and lie in a padded buffer, as an engine keeps them.
    layers, heads, size = model.context_shape
    keys = torch.full((layers, 1, LENGTH + 4, heads, size), 1e4)
    values = keys.clone()
    for start, end in ((0, 5), (5, 6), (6, ANCHOR)):
        keys[:, 0, start:end], values[:, 0, start:end] = model.project_context(
            taps[start:end], torch.arange(start, end)
        )
    draft = model.propose(
        tokens[ANCHOR][None], torch.tensor([ANCHOR]), keys, values, torch.tensor([ANCHOR]), greedy, model.block_size
    )
    tokens[ANCHOR + 1 : ANCHOR + 6] = draft.tokens[0]
    logits, confidences = teacher_forced(model, tokens, taps, ANCHOR)
    torch.testing.assert_close(draft.probabilities[0], logits.softmax(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(draft.confidences[0], confidences, atol=1e-5, rtol=1e-4)
    assert torch.equal(draft.tokens[0], model.target_ids[logits.argmax(-1)])


def test_one_block_alone_equals_the_same_block_among_others() -> None:
    """Drafting attends in one fused call, training packs many blocks: the same numbers."""
    model = random_drafter(drafter_config())
    keys, values = model.project_context(torch.randn(2, LENGTH, 320), torch.arange(LENGTH).expand(2, LENGTH))
    anchors, positions = torch.tensor([[5, 9, 7], [3, 1, 2]]), torch.tensor([[ANCHOR, 4, 0], [9, 1, 20]])
    visible = torch.arange(LENGTH) < positions[..., None]
    together = model.hidden(anchors, positions, keys, values, visible)
    for column in range(3):
        one = slice(column, column + 1)
        alone = model.hidden(anchors[:, one], positions[:, one], keys, values, visible[:, one])
        torch.testing.assert_close(together[:, one], alone, atol=1e-5, rtol=1e-4)


def test_context_is_strictly_before_the_anchor() -> None:
    model = random_drafter(drafter_config())
    tokens = torch.randint(0, 97, (LENGTH + 8,))
    taps = torch.randn(LENGTH, 5 * 64)
    before, _ = teacher_forced(model, tokens, taps, ANCHOR)
    later = taps.clone()
    later[ANCHOR:] = 1e3  # the anchor's own features don't exist yet when drafting
    unchanged, _ = teacher_forced(model, tokens, later, ANCHOR)
    assert torch.equal(before, unchanged)
    earlier = taps.clone()
    earlier[ANCHOR - 1] += 1
    changed, _ = teacher_forced(model, tokens, earlier, ANCHOR)
    assert not torch.allclose(before, changed)


def test_a_slot_depends_on_the_token_before_it_and_on_no_later_one() -> None:
    model = random_drafter(drafter_config())
    tokens = torch.randint(1, 97, (LENGTH + 8,))
    taps = torch.randn(LENGTH, 5 * 64)
    logits, confidences = teacher_forced(model, tokens, taps, ANCHOR)
    for changed in range(1, 5):
        other = tokens.clone()
        other[ANCHOR + changed] = 0
        new_logits, new_confidences = teacher_forced(model, other, taps, ANCHOR)
        same = (new_logits == logits).all(dim=-1)
        # A vanilla Markov head looks one token back: only slot `changed` (0-based) has that token before it.
        assert same.tolist() == [slot != changed for slot in range(5)]
        assert ((new_confidences == confidences) == same).all()


def test_fewer_slots_are_a_prefix_of_the_full_block() -> None:
    model = random_drafter(drafter_config())
    keys, values = (x[:, None] for x in model.project_context(torch.randn(ANCHOR, 5 * 64), torch.arange(ANCHOR)))
    arguments = (torch.tensor([5]), torch.tensor([ANCHOR]), keys, values, torch.tensor([ANCHOR]), greedy)
    full, short = model.propose(*arguments, 5), model.propose(*arguments, 2)
    assert short.tokens.shape == (1, 2)
    assert torch.equal(full.tokens[:, :2], short.tokens)
    torch.testing.assert_close(full.probabilities[:, :2], short.probabilities)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model = random_drafter(drafter_config())
    lengths = torch.tensor([ANCHOR, 4, 0])
    keys, values = torch.randn(2, *model.context_shape[:1], 3, ANCHOR, *model.context_shape[1:])
    anchors = torch.tensor([5, 9, 11])
    together = model.propose(anchors, lengths, keys, values, lengths, greedy, 5)
    for row in range(3):
        one = slice(row, row + 1)
        alone = model.propose(anchors[one], lengths[one], keys[:, one], values[:, one], lengths[one], greedy, 5)
        torch.testing.assert_close(together.probabilities[one], alone.probabilities, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_block_may_reach_past_the_last_position(freeze: bool) -> None:
    """The engine draws only what fits; the slots behind it must not end the step."""
    model = random_drafter(drafter_config(max_position_embeddings=32))
    if freeze:
        model.freeze()
    context = (x[:, None] for x in model.project_context(torch.randn(30, 320), torch.arange(30)))
    anchor = torch.tensor([30])
    assert model.propose(torch.tensor([5]), anchor, *context, anchor, greedy, 1).tokens.shape == (1, 1)


def test_taps_follow_the_paper() -> None:
    assert default_target_layer_ids(36) == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (1, 7)}, "never the last layer"),
        ({"block_size": 0}, "block_size"),
        ({"mask_token_id": 97}, "mask_token_id"),
        ({"draft_vocab_size": 98}, "draft_vocab_size"),
        ({"markov_rank": 0, "markov_head_type": "rnn"}, "markov_head_type"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_config(**changes)


def test_dflash_has_no_heads() -> None:
    config: DrafterConfig = drafter_config(markov_rank=0, enable_confidence_head=False)
    model = random_drafter(config)
    assert model.markov_head is None and model.confidence_head is None
    keys, values = (x[:, None] for x in model.project_context(torch.randn(6, 5 * 64), torch.arange(6)))
    draft = model.propose(torch.tensor([5]), torch.tensor([6]), keys, values, torch.tensor([6]), greedy, 5)
    assert torch.all(draft.confidences == 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_drafter_drafts_the_same(dtype: torch.dtype) -> None:
    model, frozen = (random_drafter(drafter_config(draft_vocab_size=40)).to(dtype) for _ in range(2))
    for each in (model, frozen):
        assert each.confidence_head is not None
        each.confidence_head.float()
    frozen.freeze()
    lengths = torch.tensor([ANCHOR, 1, 3])  # padded rows lie behind the shorter contexts
    taps = torch.randn(3 * ANCHOR, 5 * 64, dtype=dtype)
    positions = torch.arange(ANCHOR).repeat(3)

    def draft(each: DSpark, requests: int) -> Draft:
        context = (x.unflatten(1, (3, ANCHOR))[:, :requests] for x in each.project_context(taps, positions))
        chosen = lengths[:requests]
        ids = torch.zeros(requests, dtype=torch.int64)
        return each.propose(chosen + 5, chosen, *context, chosen, lambda _slot, logits: (ids, logits.float()), 5)

    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.05}
    for requests in (1, 3):
        plain, fast = draft(model, requests), draft(frozen, requests)
        torch.testing.assert_close(plain.probabilities, fast.probabilities, **tolerance)
        torch.testing.assert_close(plain.confidences, fast.confidences, atol=0.05, rtol=0.05)
