"""The parallel block backbone (DFlash style): one pass turns [anchor, MASK x (G-1)] into G hidden states.

Slot k sits at position anchor + k and predicts the token at anchor + 1 + k. The context is the target's features of
committed tokens strictly before the anchor, projected once per layer and kept by the caller.

Shape letters as in drafter/layers.py; K tapped layers, L draft layers, N flat rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.config import DrafterConfig
from drafter.layers import DraftLayer, RMSNorm, RotaryTable


class Backbone(nn.Module):
    """fc, hidden_norm, draft layers and final norm; the embedding belongs to the target and is handed in."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        num_taps = len(config.target_layer_ids)
        self.config = config
        self.fc = nn.Linear(num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config)

    def project_context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """features [..., K*D] at positions [...] -> context keys and values, each [L, ..., H, C].

        The same ctx = RMSNorm(fc(features)) goes to every layer and does not pass the layers' input norms.
        """
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary(positions, context.dtype)
        pairs = [layer.self_attn.keys_values(context, rotary) for layer in self._draft_layers()]
        return torch.stack([key for key, _ in pairs]), torch.stack([value for _, value in pairs])

    def forward(
        self, embedded: Tensor, positions: Tensor, context_keys: Tensor, context_values: Tensor, visible: Tensor
    ) -> Tensor:
        """embedded blocks [B, A, G, D] whose anchors sit at positions [B, A] -> h [B, A, G, D] after the final norm.

        context_keys and context_values [L, B, T, H, C]; visible [B, A, T] bool: rows strictly before the anchor.
        """
        slots = positions[..., None] + torch.arange(embedded.shape[2], device=positions.device)
        slots = slots.clamp(
            max=self.config.max_position_embeddings - 1
        )  # those behind the last position are never drawn
        rotary = self.rotary(slots, embedded.dtype)
        hidden_rows = ~visible[:, None, :, None, :]
        x = embedded
        for index, layer in enumerate(self._draft_layers()):
            x = layer(x, rotary, (context_keys[index], context_values[index]), hidden_rows)
        out: Tensor = self.norm(x)
        return out

    def _draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]
