"""EAGLE-3 (Li et al. 2025): one layer over [normed embedding ; normed hidden state], started from fused features.

Queries, keys and values are projected from both halves side by side (2 D wide); the residual is the hidden state. It
is trained on its own hidden states over the whole block. Like every drafter here it reads DSpark's taps and normalises
queries and keys per head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.baselines.chain import ChainBackbone
from drafter.config import DrafterConfig
from drafter.layers import RMSNorm


class Eagle3Backbone(ChainBackbone):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def start(self, features: Tensor) -> Tensor:
        out: Tensor = self.fc(features)
        return out

    def fuse(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1), hidden
