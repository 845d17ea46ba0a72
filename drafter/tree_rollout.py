"""Speculative decoding offline with trees of candidates (drafter/baselines/ddtree.py) instead of single drafts.

Shape letters as in drafter/rollout.py; S nodes of a tree, its root included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.baselines.ddtree import Tree, best_first_tree, walk
from drafter.dspark import DSpark
from drafter.rollout import Lane, Rollout
from drafter.speculative import GREEDY_BELOW, Purpose, probabilities, sample
from drafter.target import Target


class TreeRollout(Rollout):
    """Verifies the best `num_nodes` candidates of each block's marginals; a sequential head is not asked."""

    def __init__(
        self,
        target: Target,
        drafter: DSpark,
        temperature: float,
        max_new_tokens: int,
        num_nodes: int,
        seed: int | None = None,
    ) -> None:
        super().__init__(target, drafter, temperature, max_new_tokens, seed=seed)
        self._block_drafter = drafter
        self._num_nodes = num_nodes
        # What a walk visits is moved as rows of a whole block, even where the tree has fewer nodes.
        self._rows_per_round = 1 + max(num_nodes, drafter.block_size)

    def _round(self, lane: Lane, indices: list[int]) -> None:
        slots, anchors, at = self._anchors(lane)
        trees = self._trees(lane, slots, anchors, at)
        tokens = torch.tensor([tree.tokens for tree in trees])
        depths = torch.tensor([tree.depths for tree in trees])
        seen = torch.stack([tree.seen() for tree in trees])
        layers = self._drafter.target_layer_ids
        features, hidden = self._target.tree_features(tokens, depths, seen, at, lane.cache, slots, layers)
        # Nodes of one depth share their random number: the walk visits one of them.
        rows = self._rows((at[:, None] + depths + 1).flatten(), slots.repeat_interleave(tokens.shape[1]))
        logits = self._target.logits(hidden).flatten(0, 1)
        chosen = sample(probabilities(logits, rows), rows, Purpose.EMIT).view_as(tokens)
        walks = [walk(tree, choice) for tree, choice in zip(trees, chosen.tolist(), strict=True)]
        self._keep(lane, slots, at, features, [path for path, _ in walks])
        drafted = torch.zeros(len(slots), self._drafter.block_size, dtype=torch.int64)
        for row, (path, _) in enumerate(walks):
            drafted[row, : len(path)] = tokens[row, path]
        num_accepted = torch.tensor([len(path) for path, _ in walks])
        next_tokens = torch.tensor([token for _, token in walks])
        self._commit(lane, indices, drafted, torch.ones(drafted.shape), num_accepted, next_tokens)

    def _trees(self, lane: Lane, slots: Tensor, anchors: Tensor, at: Tensor) -> list[Tree]:
        drafter, reach = self._block_drafter, int(at.max())
        visible = torch.arange(reach) < at[:, None]
        context = (lane.context_keys[:, slots, :reach], lane.context_values[:, slots, :reach])
        hidden = drafter.hidden(anchors[:, None], at[:, None], *context, visible[:, None])[:, 0]
        temperature = self._temperature if self._temperature >= GREEDY_BELOW else 1.0
        marginals = (drafter.base_logits(hidden).float() / temperature).softmax(dim=-1)
        return [
            best_first_tree(anchor, rows, drafter.target_ids, self._num_nodes).filled(1 + self._num_nodes)
            for anchor, rows in zip(anchors.tolist(), marginals, strict=True)
        ]

    def _keep(self, lane: Lane, slots: Tensor, at: Tensor, features: Tensor, paths: list[list[int]]) -> None:
        """Move what the walks visited to its true place, and make context of it; behind a path's end lies anything."""
        deepest = self._drafter.block_size
        nodes = torch.tensor([[0, *path, *[0] * (deepest - len(path))] for path in paths])
        lane.cache.move(slots, at[:, None] + nodes, at)
        visited = torch.take_along_dim(features, nodes[..., None], dim=1)
        positions = at[:, None] + torch.arange(1 + deepest)
        keys, values = self._drafter.project_context(visited, positions)
        lane.context_keys[:, slots[:, None], positions] = keys
        lane.context_values[:, slots[:, None], positions] = values
