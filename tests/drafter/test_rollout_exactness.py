"""Every drafter leaves the answer alone, end to end: real target, real cache, real rounds.

At temperature 0 the text is the target's own. At temperature 1 the first tokens follow the target's exact joint
distribution (chi-square), and two controls that bend verification are found.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafter import tree_rollout
from drafter.baselines.ngram import NgramDrafter
from drafter.dspark import DSpark
from drafter.initial import initial_drafter
from drafter.interface import Drafter
from drafter.presets import PRESETS, preset_config
from drafter.rollout import Conversation, Lane, Rollout, Rounds
from drafter.target import Target
from drafter.tree_rollout import TreeRollout

SMALL = 7
NUM_TOKENS = 3
PROMPT = (1, 4, 2)
SEED = 11
"""The same samples in every run: chance fails no test."""
DRAFTERS = [*PRESETS, "ngram", "ddtree"]


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Seven tokens, none of which ends a text: every joint distribution can be written down."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=SMALL,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    folder = tmp_path_factory.mktemp("small-target")
    model.save_pretrained(folder)
    return Target(model, SimpleNamespace(eos_token_id=None, chat_template=""), folder)


def make(name: str, target: Target, temperature: float, max_new_tokens: int, num_nodes: int = 9) -> Rollout:
    """num_nodes: of ddtree's trees."""
    if name == "ngram":
        return Rollout(target, NgramDrafter(5, target.config.vocab_size), temperature, max_new_tokens, seed=SEED)
    preset = PRESETS["dflash" if name == "ddtree" else name]
    torch.manual_seed(0)
    vocabulary = torch.arange(0, target.config.vocab_size) if name != "dspark-rnn" else torch.tensor([0, 2, 3, 5])
    shape = preset_config(preset, target, len(vocabulary), 0)
    drafter = initial_drafter(target, shape, vocabulary).eval()
    drafter.freeze()
    if name != "ddtree":
        return Rollout(target, drafter, temperature, max_new_tokens, seed=SEED)
    assert isinstance(drafter, DSpark)
    return TreeRollout(target, drafter, temperature, max_new_tokens, num_nodes, seed=SEED)


def written(rollout: Rollout, conversations: list[Conversation]) -> tuple[list[list[int]], Rounds]:
    """The texts, prompts included, cut at the limit, in the order in which they ended."""
    texts: list[list[int]] = []
    original = rollout._ended

    def spy(tokens: list[int], limit: int, prompt_length: int) -> bool:
        if ended := original(tokens, limit, prompt_length):
            texts.append(tokens[:limit])
        return ended

    rollout._ended = spy  # type: ignore[method-assign]
    return texts, rollout.run(conversations, batch_size=4096)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_greedy_text_is_the_targets(name: str, size: str, tiny_target: Target, small_target: Target) -> None:
    """The small target's next token depends on the whole text, the tiny one's text ends."""
    target = tiny_target if size == "tiny" else small_target
    torch.manual_seed(5)
    conversations = [
        Conversation("", tuple(torch.randint(3, target.config.vocab_size, (3 + i % 4,)).tolist())) for i in range(5)
    ]
    texts, _ = written(make(name, target, 0.0, 30), conversations)
    assert sorted(texts) == sorted(greedy(target, conversation) for conversation in conversations)


def greedy(target: Target, conversation: Conversation) -> list[int]:
    """What the target itself writes, at most 30 tokens of it."""
    prompt = torch.tensor([conversation.prompt_ids])
    ids: list[int] = target.model.generate(prompt, do_sample=False, max_new_tokens=30)[0].tolist()
    return ids


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_a_tree_may_be_smaller_than_a_block(num_nodes: int, small_target: Target) -> None:
    """Up to the limit of the length, where a whole block has no room."""
    conversations = [Conversation("", PROMPT)]
    texts, _ = written(make("ddtree", small_target, 0.0, 30, num_nodes), conversations)
    assert texts == [greedy(small_target, conversation) for conversation in conversations]


def p_value(target: Target, texts: list[list[int]]) -> float:
    """Chi-square of the first NUM_TOKENS tokens against the target's joint distribution."""
    tokens = torch.tensor(texts)[:, len(PROMPT) : len(PROMPT) + NUM_TOKENS]
    runs = torch.tensor(list(itertools.product(range(SMALL), repeat=NUM_TOKENS)))
    whole = torch.cat((torch.tensor(PROMPT).expand(len(runs), -1), runs), dim=1)
    with torch.no_grad():
        log_p = target.model(whole).logits.double().log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    expected = log_p.gather(2, runs[..., None])[..., 0].sum(1).exp() * len(texts)
    index = (tokens * SMALL ** torch.arange(NUM_TOKENS - 1, -1, -1)).sum(1)
    counts = index.bincount(minlength=len(runs)).double()
    common = expected >= 5
    cells = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    return float(chisquare(cells, wanted).pvalue)


def sampled(rollout: Rollout) -> tuple[list[list[int]], Rounds]:
    return written(rollout, [Conversation("", PROMPT)] * 8192)


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_text_follows_the_target(name: str, small_target: Target) -> None:
    texts, rounds = sampled(make(name, small_target, 1.0, NUM_TOKENS))
    accepted = float(rounds.num_accepted.double().mean())
    assert accepted > 0.1  # the drafts are not hopeless
    assert p_value(small_target, texts) > 1e-3


class Sharpened:
    """A drafter that claims other probabilities than it drew from."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, *arguments: Any) -> Any:
        draft = self._drafter.propose(*arguments)
        claimed = draft.probabilities**2
        return dataclasses.replace(draft, probabilities=claimed / claimed.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", ["dspark", "eagle3"])
def test_control_a_drafter_that_lies_is_found(name: str, small_target: Target) -> None:
    rollout = make(name, small_target, 1.0, NUM_TOKENS)
    rollout._drafter = Sharpened(rollout._drafter)  # type: ignore[assignment]
    texts, _ = sampled(rollout)
    assert p_value(small_target, texts) < 1e-6


def test_control_a_walk_that_prefers_the_tree_is_found(small_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[..., tuple[list[int], int]] = tree_rollout.walk

    def eager(tree: Any, chosen: list[int]) -> tuple[list[int], int]:
        first = tree.tokens[1]  # the likeliest child of the root, whatever was sampled
        return honest(tree, [first if chosen[0] == 0 else chosen[0], *chosen[1:]])

    monkeypatch.setattr(tree_rollout, "walk", eager)
    texts, _ = sampled(make("ddtree", small_target, 1.0, NUM_TOKENS))
    assert p_value(small_target, texts) < 1e-6


def test_the_context_of_a_rollout_holds_the_tokens_behind_its_rows(tiny_target: Target) -> None:
    """Prompt look-up keeps nothing else: what it reads back in each round is the text itself."""
    rollout = make("ngram", tiny_target, 1.0, 24)
    checked = 0
    original = rollout._propose

    def spy(lane: Lane, slots: Tensor, anchors: Tensor, at: Tensor) -> Any:
        nonlocal checked
        for slot in slots.tolist():
            text = lane.tokens[slot]
            digits = lane.context_keys[0, slot, : len(text) - 1, 0].long()
            assert (digits * 128 ** torch.arange(3)).sum(-1).tolist() == text[1:]
            checked += 1
        return original(lane, slots, anchors, at)

    rollout._propose = spy  # type: ignore[method-assign]
    rollout.run([Conversation("", (3, 4, 5, 4, 5)), Conversation("", (9, 8, 9))], batch_size=2)
    assert checked > 10


def test_the_context_of_a_tree_rollout_is_that_of_the_walk(small_target: Target) -> None:
    """A branch's features stay with the branch: a misplaced row would only cost acceptance, and nobody would notice."""
    rollout = make("ddtree", small_target, 1.0, 24)
    assert isinstance(rollout, TreeRollout)
    layers = rollout._drafter.target_layer_ids
    checked = 0
    original = rollout._trees

    def spy(lane: Lane, slots: Tensor, anchors: Tensor, at: Tensor) -> Any:
        nonlocal checked
        for slot in slots.tolist():
            text = torch.tensor(lane.tokens[slot])[None, :-1]
            taps, _ = small_target.features(text, layers)
            keys, _ = rollout._drafter.project_context(taps, torch.arange(text.shape[1])[None])
            torch.testing.assert_close(lane.context_keys[:, slot, : text.shape[1]], keys[:, 0], atol=1e-4, rtol=1e-4)
            checked += 1
        return original(lane, slots, anchors, at)

    rollout._trees = spy  # type: ignore[method-assign]
    rollout.run([Conversation("", PROMPT), Conversation("", (3, 5, 6, 3))], batch_size=2)
    assert checked > 10
