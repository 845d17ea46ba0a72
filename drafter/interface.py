"""What a drafter gives to an engine, and what it asks of it.

The engine owns the pages in which context K/V lives; the drafter only computes rows for them and reads them back as
dense padded tensors. So a drafter needs no knowledge of pages, requests or rollback.

Shape letters: R requests, G block positions, N flat rows, K tapped layers, L draft layers, T context rows,
H key/value heads, C head size, D hidden size, V draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Sampler = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""`sampler(slot, logits_RV) -> (draft_ids_R int64, probabilities_RV fp32)`: how slot `slot` of every request is drawn.

`draft_ids` index the draft vocabulary, and each must have been drawn from just these probabilities.
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """One block of proposals per request."""

    tokens: Tensor
    """[R, G] int64, ids of the TARGET vocabulary."""
    draft_ids: Tensor
    """[R, G] int64, the same tokens as ids of the draft vocabulary."""
    probabilities: Tensor
    """[R, G, V] fp32: the distribution over the DRAFT vocabulary that each token was drawn from."""
    confidences: Tensor
    """[R, G] fp32: calibrated P(slot k passes | the slots before it passed)."""


class Drafter(Protocol):
    """A drafter as the engine sees it."""

    @property
    def block_size(self) -> int:
        """G: the most tokens that one proposal holds."""
        ...

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """0-based target layers whose outputs are the features."""
        ...

    @property
    def context_shape(self) -> tuple[int, int, int]:
        """(L, H, C): context K/V layers, key/value heads, head size."""
        ...

    @property
    def target_ids(self) -> Tensor:
        """[V] int64: the target id of each draft id, strictly increasing."""
        ...

    @property
    def temperatures(self) -> tuple[float, ...]:
        """[G] what the confidence logits of each slot are divided by; empty when confidences aren't learned."""
        ...

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        """Take these from the next draft on. ValueError unless there is a positive one for each slot that has one."""
        ...

    def project_context(
        self, features: Tensor, positions: Tensor, next_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Target features [N, K*D] at absolute positions [N] -> context keys and values, each [L, N, H, C].

        next_tokens [N] int64: the committed token behind each row. Parallel blocks don't read them; drafters that do
        refuse to go without.
        """
        ...

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
        """Draft the first `num_slots` tokens after each anchor.

        anchors [R] int64; positions [R] int64, the anchors' absolute positions; context_keys and context_values
        [L, R, T, H, C], padded; context_lengths [R] int64: rows of T that are real (committed tokens strictly before
        the anchor).
        """
        ...


def check_temperatures(temperatures: tuple[float, ...], num_slots: int) -> None:
    """What `Drafter.calibrate` refuses: another number of temperatures than slots, or one that no logit survives."""
    if len(temperatures) != num_slots:
        raise ValueError(f"temperatures: {len(temperatures)} for a drafter that has {num_slots}")
    if not all(0 < temperature < math.inf for temperature in temperatures):
        raise ValueError(f"temperatures: must be positive and finite, got {temperatures}")
