"""Prompt look-up: what followed the last occurrence of the latest tokens is proposed again. Free, and no model.

The tokens themselves are the context: each row keeps the id behind it as three digits, so that it survives a cache of
any precision. Proposals are certain: the distribution of each slot is one-hot, which verifies exactly like any other.

Shape letters: R requests, G block positions, T context rows, N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.interface import Draft, Sampler, check_temperatures

_BASE = 128  # digits that bf16 holds exactly
_DIGITS = 3
_CERTAIN = 1e4  # a logit whose softmax is one-hot at any temperature that is served


class NgramDrafter:
    """Satisfies drafter.interface.Drafter. The longest suffix that occurred before decides."""

    temperatures: tuple[float, ...] = ()
    target_layer_ids = (0,)  # read by nobody: a drafter without features is nothing that the target knows

    def __init__(self, block_size: int, vocab_size: int, max_ngram: int = 3) -> None:
        if vocab_size > _BASE**_DIGITS:
            raise ValueError(f"vocab_size must be at most {_BASE**_DIGITS}, got {vocab_size}")
        self.block_size = block_size
        self.target_ids = torch.arange(vocab_size)
        self._max_ngram = max_ngram

    @property
    def context_shape(self) -> tuple[int, int, int]:
        return 1, 1, _DIGITS

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        check_temperatures(temperatures, 0)

    def project_context(
        self, features: Tensor, positions: Tensor, next_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if next_tokens is None:
            raise ValueError("prompt look-up reads the tokens behind the features: give next_tokens")
        powers = _BASE ** torch.arange(_DIGITS)
        digits = (next_tokens[..., None] // powers % _BASE)[None, ..., None, :].to(features.dtype)
        return digits, digits

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        context_lengths: Tensor,
        sampler: Sampler,
        num_slots: int,
    ) -> Draft:
        """See drafter.interface.Drafter. Where nothing is found the anchor is proposed, with confidence 0."""
        history = (context_keys[0, :, :, 0].long() * _BASE ** torch.arange(_DIGITS)).sum(-1)
        found = [
            look_up(row[:length], num_slots, self._max_ngram)
            for row, length in zip(history.tolist(), context_lengths.tolist(), strict=True)
        ]
        tokens = anchors[:, None].repeat(1, num_slots)
        for row, proposed in enumerate(found):
            tokens[row, : len(proposed)] = torch.tensor(proposed, dtype=torch.int64)
        drawn, probabilities = [], []
        for slot in range(num_slots):
            logits = torch.zeros(len(anchors), len(self.target_ids)).scatter_(1, tokens[:, slot, None], _CERTAIN)
            ids, probability = sampler(slot, logits)
            drawn.append(ids)
            probabilities.append(probability)
        chosen = torch.stack(drawn, dim=1)
        is_found = torch.arange(num_slots) < torch.tensor([len(proposed) for proposed in found])[:, None]
        return Draft(chosen, chosen, torch.stack(probabilities, dim=1), is_found.float())


def look_up(tokens: list[int], num_slots: int, max_ngram: int) -> list[int]:
    """Up to `num_slots` tokens that followed the latest earlier occurrence of the longest suffix; [] for none."""
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                return tokens[start + size : start + size + num_slots]
    return []
