"""DDTree: the best tree of candidates over a parallel block's marginals, and its exact verification.

A parallel drafter gives a distribution for each slot whatever the others draw. The product of them ranks prefixes, and
the `num_nodes` likeliest ones form a tree. The target is sampled at every node; the walk follows its choices for as
long as they are in the tree. So what is emitted is what plain decoding samples, whatever the tree: exact by
construction, at any temperature.

Shape letters: B trees, S nodes (root included), G block positions, V vocabulary.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """Node 0 is the anchor; parents come before their children."""

    tokens: list[int]
    parents: list[int]
    """-1 for the root, and for nodes that only fill a batch up."""
    depths: list[int]

    def filled(self, size: int) -> Tree:
        """With nodes that nobody reaches behind it, `size` in all."""
        missing = size - len(self.tokens)
        return Tree(self.tokens + [0] * missing, self.parents + [-1] * missing, self.depths + [0] * missing)

    def seen(self) -> Tensor:
        """[S, S] bool: which nodes a node sees, its ancestors and itself."""
        result = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                result[node] |= result[parent]
        return result


def best_first_tree(anchor: int, marginals: Tensor, target_ids: Tensor, num_nodes: int) -> Tree:
    """The `num_nodes` prefixes of highest probability under marginals [G, V] fp32, as a tree below `anchor`.

    A prefix is never likelier than its parent, nor a token than its better sibling: so the best node not yet taken is
    always a first child or a next sibling of one that is.
    """
    values, ids = marginals.log().topk(min(num_nodes, marginals.shape[1]), dim=1)
    scores, tokens = values.tolist(), target_ids[ids].tolist()
    tree = Tree([anchor], [-1], [0])
    heap = [(-scores[0][0], 0, 0, 0)]  # (-log probability, parent, depth, rank among siblings)
    while heap and len(tree.tokens) <= num_nodes:
        cost, parent, depth, rank = heapq.heappop(heap)
        if cost == float("inf"):
            break
        node = len(tree.tokens)
        tree.tokens.append(tokens[depth][rank])
        tree.parents.append(parent)
        tree.depths.append(depth + 1)
        if rank + 1 < len(scores[depth]):
            heapq.heappush(heap, (cost + scores[depth][rank] - scores[depth][rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(scores):
            heapq.heappush(heap, (cost - scores[depth + 1][0], node, depth + 1, 0))
    return tree


def walk(tree: Tree, chosen: list[int]) -> tuple[list[int], int]:
    """Follow chosen[node], the token sampled from the target at each node: (nodes below the root taken, last token)."""
    edges = zip(tree.parents, tree.tokens, strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    path: list[int] = []
    node = 0
    while (child := children.get((node, chosen[node]))) is not None:
        path.append(child)
        node = child
    return path, chosen[node]
