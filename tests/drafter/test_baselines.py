"""EAGLE-3, MTP, prompt look-up and trees: what a row sees, that drafting equals training, and that files keep it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter.baselines.chain import ChainDrafter
from drafter.baselines.ddtree import best_first_tree, walk
from drafter.baselines.ngram import NgramDrafter, look_up
from drafter.checkpoint import build_drafter, load_drafter, save_checkpoint
from drafter.config import DrafterConfig, Family, TrainConfig
from drafter.data import Response
from drafter.initial import adapted_drafter, initial_drafter
from drafter.presets import PRESETS, preset_config
from drafter.supervision import FeatureMemory
from drafter.target import Target
from drafter.train import Trainer
from tests.drafter.conftest import VOCABULARY, drafter_config

LENGTH, ANCHOR = 23, 17


def chain_config(family: Family, **changes: object) -> DrafterConfig:
    taps = {"target_layer_ids": (7,)} if family == "mtp" else {}
    chain = {"family": family, "num_hidden_layers": 1, "markov_rank": 0, "enable_confidence_head": False}
    return drafter_config(**{**chain, **taps, **changes})


def random_chain(config: DrafterConfig) -> ChainDrafter:
    torch.manual_seed(0)
    target_ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    model = build_drafter(config, embedding, embedding[target_ids], target_ids)
    assert isinstance(model, ChainDrafter)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def greedy(_slot: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(-1), logits.softmax(-1, dtype=torch.float32)


def sequence(model: ChainDrafter) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    num_taps = len(model.target_layer_ids)
    return torch.randint(1, VOCABULARY, (LENGTH + 8,)), torch.randn(LENGTH + 8, num_taps * 64)


def forced_logits(model: ChainDrafter, tokens: Tensor, taps: Tensor, anchor: int = ANCHOR) -> Tensor:
    hidden = model.teacher_forced(tokens[None], taps[None], torch.tensor([[anchor]]))
    return model.base_logits(hidden[0, 0])


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
@pytest.mark.parametrize("draft_vocab_size", [97, 40])
def test_cached_drafting_equals_teacher_forcing_on_the_drafted_tokens(family: Family, draft_vocab_size: int) -> None:
    model = random_chain(chain_config(family, draft_vocab_size=draft_vocab_size))
    tokens, taps = sequence(model)
    layers, heads, size = model.context_shape
    keys = torch.full((layers, 1, LENGTH + 4, heads, size), 1e4)  # padded, and filled in pieces
    values = keys.clone()
    for start, end in ((0, 5), (5, 6), (6, ANCHOR)):
        rows = slice(start, end)
        keys[:, 0, rows], values[:, 0, rows] = model.project_context(
            taps[rows], torch.arange(start, end), tokens[start + 1 : end + 1]
        )
    at = torch.tensor([ANCHOR])
    draft = model.propose(tokens[ANCHOR][None], at, keys, values, at, greedy, model.block_size)
    tokens[ANCHOR + 1 : ANCHOR + 6] = draft.tokens[0]
    logits = forced_logits(model, tokens, taps)
    torch.testing.assert_close(draft.probabilities[0], logits.softmax(-1), atol=1e-5, rtol=1e-4)
    assert torch.equal(draft.tokens[0], model.target_ids[logits.argmax(-1)])


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_context_is_strictly_before_the_anchor(family: Family) -> None:
    model = random_chain(chain_config(family))
    tokens, taps = sequence(model)
    before = forced_logits(model, tokens, taps)
    later = taps.clone()
    later[ANCHOR:] = 1e3  # the anchor's own features don't exist yet when drafting
    assert torch.equal(before, forced_logits(model, tokens, later))
    for row in (ANCHOR - 1, ANCHOR - 2):
        earlier = taps.clone()
        earlier[row] += 1
        assert not torch.allclose(before, forced_logits(model, tokens, earlier))


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_a_slot_depends_on_the_tokens_up_to_the_one_before_it(family: Family) -> None:
    model = random_chain(chain_config(family))
    tokens, taps = sequence(model)
    logits = forced_logits(model, tokens, taps)
    for changed in range(5):
        other = tokens.clone()
        other[ANCHOR + changed] = 0
        same = (forced_logits(model, other, taps) == logits).all(dim=-1)
        assert same.tolist() == [slot < changed for slot in range(5)]


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_blocks_and_rows_of_a_batch_do_not_see_each_other(family: Family) -> None:
    model = random_chain(chain_config(family))
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    taps = torch.randn(2, LENGTH, len(model.target_layer_ids) * 64)
    anchors = torch.tensor([[ANCHOR, 4, 1], [9, 2, 12]])
    together = model.teacher_forced(tokens, taps, anchors)
    for row in range(2):
        for column in range(3):
            alone = model.teacher_forced(tokens[row, None], taps[row, None], anchors[row, column].view(1, 1))
            torch.testing.assert_close(together[row, column], alone[0, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_the_features_of_a_row_survive_the_cache(family: Family) -> None:
    model = random_chain(chain_config(family))
    hidden = torch.randn(3, 4, 64)
    assert torch.equal(model._unpack(*model._pack(hidden)), hidden)


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_chains_learn(family: Family, tiny_target: Target, tiny_responses: list[Response]) -> None:
    torch.manual_seed(0)
    model = initial_drafter(tiny_target, chain_config(family), torch.arange(VOCABULARY))
    config = TrainConfig(slots=8_000, anchors_per_sequence=24, learning_rate=5e-3, distillation_fraction=1.0)
    trainer = Trainer(model, FeatureMemory(tiny_target, model.target_layer_ids, 2**28), tiny_responses, config)
    before = trainer.train_step().overlap
    while trainer.slots < config.slots:
        after = trainer.train_step().overlap
    assert 1 - after < 0.9 * (1 - before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_takes_a_step_and_keeps_its_shape(
    name: str, tiny_target: Target, tiny_responses: list[Response], tmp_path: Path
) -> None:
    shape = preset_config(PRESETS[name], tiny_target, VOCABULARY, 0)
    model = initial_drafter(tiny_target, shape, torch.arange(VOCABULARY))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    config = TrainConfig(anchors_per_sequence=4, warmup_fraction=0, decay_fraction=0, distillation_fraction=0)
    memory = FeatureMemory(tiny_target, model.target_layer_ids, 0)
    trainer = Trainer(model, memory, tiny_responses, config)
    for _ in range(3):  # the sequential heads start at zero, so what feeds them moves from the second step on
        trainer.train_step()
    unchanged = [key for key, value in model.state_dict().items() if torch.equal(value, start[key])]
    assert not unchanged
    save_checkpoint(model, tmp_path, torch.float32)
    loaded = adapted_drafter(tiny_target, tmp_path, None)
    assert loaded.config == shape
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_a_chain_needs_the_tokens_behind_its_context(family: Family, tmp_path: Path) -> None:
    model = random_chain(chain_config(family))
    save_checkpoint(model, tmp_path)
    weights = model.embed_tokens, model.embed_tokens
    assert isinstance(load_drafter(tmp_path, *weights), ChainDrafter)
    with pytest.raises(ValueError, match="next_tokens"):
        model.project_context(torch.randn(3, len(model.target_layer_ids) * 64), torch.arange(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"target_layer_ids": (3,)}, "last layer alone"),
        ({"enable_confidence_head": True}, "enable_confidence_head"),
    ],
)
def test_impossible_chains_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_config("mtp", **changes)


def test_prompt_look_up_by_hand() -> None:
    assert look_up([5, 6, 7, 8, 5, 6, 7], 3, 3) == [8, 5, 6]
    assert look_up([5, 1, 7, 5, 2, 8, 5], 2, 3) == [2, 8]  # the latest occurrence wins
    assert look_up([1, 2, 9, 3, 2, 9, 4, 1, 2, 9], 1, 3) == [3]  # a longer match wins
    assert look_up([1, 2, 3], 4, 3) == []
    assert look_up([], 4, 3) == []


def test_prompt_look_up_reads_tokens_out_of_any_cache() -> None:
    drafter = NgramDrafter(4, 49_152)
    tokens = torch.tensor([7, 40_001, 33_333, 128, 40_001, 33_333])
    keys, values = drafter.project_context(torch.zeros(5, 2, dtype=torch.bfloat16), torch.arange(5), tokens[1:])
    at = torch.tensor([5])
    draft = drafter.propose(tokens[-1:], at, keys[:, None], values[:, None], at, greedy, 4)
    assert draft.tokens.tolist() == [[128, 40_001, 33_333, 33_333]]  # the last slot has nothing: the anchor
    assert draft.confidences.tolist() == [[1, 1, 1, 0]]
    assert draft.probabilities.gather(2, draft.tokens[..., None]).unique().tolist() == [1]


def test_the_tree_is_the_best_one() -> None:
    """Against all prefixes, sorted."""
    torch.manual_seed(0)
    marginals = torch.randn(3, 5).mul(2).softmax(-1)
    ids = torch.tensor([1, 3, 4, 8, 9])
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    for slot in range(3):
        longer = {p: score for p, score in prefixes.items() if len(p) == slot}
        prefixes |= {
            (*p, int(ids[i])): score * float(marginals[slot, i]) for p, score in longer.items() for i in range(5)
        }
    del prefixes[()]
    best = sorted(prefixes, key=lambda prefix: -prefixes[prefix])[:20]
    tree = best_first_tree(2, marginals, ids, 20)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == set(best) and len(paths) == 21
    assert tree.depths == [len(path) for path in paths]
    for node, path in enumerate(paths):
        seen = {paths[other] for other in tree.seen()[node].nonzero()[:, 0].tolist()}
        assert seen == {path[:end] for end in range(len(path) + 1)}
    deep = max(range(21), key=lambda node: tree.depths[node])
    chosen = [0] * 21
    for node in range(21):
        if tree.seen()[deep, node] and node != deep:
            chosen[node] = paths[deep][tree.depths[node]]
    chosen[deep] = 77
    path, last = walk(tree, chosen)
    assert [tree.tokens[node] for node in path] == list(paths[deep]) and last == 77
    filled = tree.filled(25)
    assert walk(filled, [*chosen, 0, 0, 0, 0]) == (path, last) and filled.seen()[24].sum() == 1


def test_a_node_of_a_tree_sees_what_its_path_would(tiny_target: Target) -> None:
    torch.manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (2, 6))
    cache = tiny_target.row_cache(2, 32)
    rows, start = torch.arange(2), torch.tensor([6, 4])  # the second prompt counts 4 tokens
    layers = (1, 5)
    tiny_target.cached_features(prompts, torch.arange(6).expand(2, 6), cache, rows, layers)
    trees = [
        best_first_tree(9 + row, torch.randn(4, VOCABULARY).softmax(-1), torch.arange(VOCABULARY), 12) for row in rows
    ]
    tokens = torch.tensor([tree.tokens for tree in trees])
    depths = torch.tensor([tree.depths for tree in trees])
    seen = torch.stack([tree.seen() for tree in trees])
    features, hidden = tiny_target.tree_features(tokens, depths, seen, start, cache, rows, layers)
    for row, tree in enumerate(trees):
        for node in range(13):
            path = [tree.tokens[other] for other in seen[row, node].nonzero()[:, 0].tolist()]
            whole = torch.tensor([[*prompts[row, : start[row]].tolist(), *path]])
            expected = tiny_target.features(whole, layers)
            torch.testing.assert_close(features[row, node], expected[0][0, -1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(hidden[row, node], expected[1][0, -1], atol=1e-4, rtol=1e-4)
