"""Multi-token prediction as DeepSeek-V3 and V4 define it, used as a chain: one module, applied again and again.

h'_k = M [RMSNorm(h_{k-1}) ; RMSNorm(Emb(x_{t+k}))], h_k = block(h'_k), h_0 the target's last hidden state, the output
head shared. With one drafted token (MTP-1) it is what production systems run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.baselines.chain import ChainBackbone
from drafter.config import DrafterConfig
from drafter.layers import RMSNorm


class MtpBackbone(ChainBackbone):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def start(self, features: Tensor) -> Tensor:
        return features

    def fuse(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        fused: Tensor = self.eh_proj(torch.cat((self.hnorm(hidden), self.enorm(embedded)), dim=-1))
        return self.input_layernorm(fused), fused
