"""What a drafter is made of, in the names of the public `Qwen3DSparkModel` checkpoint format.

Knows the numbers and their rules; knows nothing of tensors or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
Family = Literal["block", "eagle3", "mtp"]
"""What kind of network drafts: a parallel block (DSpark, DFlash), or a chain that feeds on its own hidden states."""


def default_target_layer_ids(num_target_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """0-based layer outputs to tap (paper section 3): evenly spread, never the last layer."""
    spread = (num_target_layers - 4) / (num_taps - 1)
    return tuple(round(1 + i * spread) for i in range(num_taps))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Shape of one drafter. Widths are the target's; only depth, block and heads are the drafter's own.

    `markov_rank == 0` means no sequential head, which with no confidence head is exactly DFlash.
    `draft_vocab_size < vocab_size` means a reduced output vocabulary with a draft-to-target map.
    """

    family: Family = "block"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size must lie in 1..{self.vocab_size}, got {self.draft_vocab_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id must lie in 0..{self.vocab_size - 1}, got {self.mask_token_id}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids must name at least one layer")
        if self.family == "mtp":
            if self.target_layer_ids != (self.num_target_layers - 1,):
                raise ValueError(f"target_layer_ids of MTP are the last layer alone, got {self.target_layer_ids}")
        elif any(not 0 <= layer < self.num_target_layers - 1 for layer in self.target_layer_ids):
            raise ValueError(
                f"target_layer_ids are 0-based and never the last layer: 0..{self.num_target_layers - 2}, "
                f"got {self.target_layer_ids}"
            )
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank must be 0 (no sequential head) or more, got {self.markov_rank}")
        if self.markov_rank == 0 and self.markov_head_type != "vanilla":
            raise ValueError(f"markov_head_type {self.markov_head_type!r} needs markov_rank > 0")
        if self.family != "block" and (self.num_hidden_layers, self.markov_rank) != (1, 0):
            raise ValueError(
                f"{self.family} is a chain of one layer without a sequential head (the context of a second layer would "
                f"depend on all rows before it); got num_hidden_layers {self.num_hidden_layers}, "
                f"markov_rank {self.markov_rank}"
            )
        if self.family != "block" and self.enable_confidence_head:
            raise ValueError(f"{self.family} has no confidence head: enable_confidence_head must be false")

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained. The defaults follow the paper's losses; rates fit small targets and Muon."""

    slots: int = 10_000_000
    """Budget: supervised block positions."""
    sequences_per_step: int = 8
    """Of all processes together: how many share a step changes its speed, not what it learns."""
    gradient_accumulation_steps: int = 1
    """Parts in which each process computes its sequences of a step: the same gradient in less memory."""
    anchors_per_sequence: int = 128
    max_length: int = 1024
    position_decay: float = 4.0
    """gamma_w: slot k weighs exp(-k / gamma_w)."""
    learning_rate: float = 2e-3
    """AdamW: embeddings, norms, biases."""
    muon_learning_rate: float = 2e-3
    """Muon: the matrices of the backbone."""
    warmup_fraction: float = 0.04
    decay_fraction: float = 0.4
    """The last part of the budget in which the rate falls to 0 along a cosine; 1.0 is plain cosine."""
    distillation_fraction: float = 0.65
    """The first part of the budget: soft-label cross-entropy against p_t; then the paper's 0.1 CE + 0.9 L1."""
    cross_entropy_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    detach_confidence: bool = False
    """Whether the confidence head only reads the hidden states, and its loss does not shape them."""
    max_gradient_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("warmup_fraction", "decay_fraction", "distillation_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {getattr(self, name)}")
        counts = ("slots", "sequences_per_step", "gradient_accumulation_steps", "anchors_per_sequence", "max_length")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
