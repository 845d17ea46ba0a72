"""The backbone as it drafts: weights packed and fused, one block a request, no gradient.

The fast twin of drafter/backbone.py, which trains and says what is computed; a test holds the two together. Knows the
backbone's weights; knows nothing of heads, vocabularies or where context rows are stored.

Shape letters: R requests, G block positions, T context rows, K tapped layers, L draft
layers, D hidden size, Q query heads, H key/value heads, C head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.backbone import Backbone
from drafter.layers import DraftLayer, RMSNorm
from drafter.packing import FrozenLinear


class FrozenRMSNorm:
    """The same as RMSNorm, in five kernels; also several norms side by side, each with its own weight."""

    def __init__(self, *norms: RMSNorm) -> None:
        size = norms[0].weight.shape[0]
        self._scaled_weight = torch.stack([norm.weight.detach().float() for norm in norms]) * math.sqrt(size)
        if len(norms) == 1:
            self._scaled_weight = self._scaled_weight[0]
        self._floor = norms[0].floor.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D], or [..., number of norms, D] for several, -> the same shape and dtype."""
        return rms_norm(x, self._scaled_weight, self._floor)


class FrozenBackbone:
    """Backbone.project_context and Backbone.forward for blocks [R, 1, G, D], without gradient."""

    def __init__(self, backbone: Backbone) -> None:
        config = backbone.config
        layers = [layer for layer in backbone.layers if isinstance(layer, DraftLayer)]
        self._shape = config.num_key_value_heads, config.head_dim
        self._fc = FrozenLinear(backbone.fc.weight)
        self._hidden_norm = FrozenRMSNorm(backbone.hidden_norm)
        # Every layer reads the same context: all their keys, then all their values, come from one product.
        attentions = [layer.self_attn for layer in layers]
        keys, values = ([getattr(a, name).weight for a in attentions] for name in ("k_proj", "v_proj"))
        self._context = FrozenLinear(torch.cat([*keys, *values]))
        self._context_norm = FrozenRMSNorm(*(a.k_norm for a in attentions for _ in range(config.num_key_value_heads)))
        self._layers = [FrozenDraftLayer(layer, config.num_attention_heads) for layer in layers]
        self._norm = FrozenRMSNorm(backbone.norm)
        dtype = backbone.fc.weight.dtype
        cos, sin = backbone.rotary.cos.to(dtype), backbone.rotary.sin.to(dtype)
        # x * cos + swap(x) * sin: the sign of the rotation lies in the first half of the sine.
        self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def project_context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """features [..., K*D] at positions [...] -> context keys and values, each [L, ..., H, C]."""
        rows, (heads, size) = features.shape[:-1], self._shape
        context = self._context(self._hidden_norm(self._fc(features)))
        keys, values = context.view(*rows, 2, -1, size).unbind(-3)
        rotated = rotate_(self._context_norm(keys), self._rotary(positions))
        split = *rows, -1, heads, size
        return rotated.reshape(split).movedim(-3, 0), values.reshape(split).movedim(-3, 0)

    def __call__(
        self, embedded: Tensor, positions: Tensor, context_keys: Tensor, context_values: Tensor, visible: Tensor
    ) -> Tensor:
        """As Backbone.forward with A = 1: embedded [R, 1, G, D] -> h [R, 1, G, D]."""
        # Slots behind the last position are computed like the others and never drawn.
        slots = (positions + torch.arange(embedded.shape[2], device=positions.device)).clamp(max=len(self._cos) - 1)
        rotary = self._rotary(slots)
        mask = None
        if not visible.all():
            mask = F.pad(visible, (0, embedded.shape[2]), value=True)[:, None]
        x = embedded[:, 0]
        for index, layer in enumerate(self._layers):
            x = layer(x, rotary, context_keys[index], context_values[index], mask)
        return self._norm(x)[:, None]

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] -> (cos, signed sin), each [..., 1, C]."""
        return self._cos[positions].unsqueeze(-2), self._sin[positions].unsqueeze(-2)


class FrozenDraftLayer:
    """One draft layer: q, k and v of the block fused, gate and up fused."""

    def __init__(self, layer: DraftLayer, num_query_heads: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._heads, self._size = attention.num_key_value_heads, attention.head_dim
        self._num_query_heads = num_query_heads
        self._input_norm = FrozenRMSNorm(layer.input_layernorm)
        self._qkv = FrozenLinear(torch.cat([getattr(attention, f"{part}_proj").weight for part in "qkv"]))
        norms = [attention.q_norm] * num_query_heads + [attention.k_norm] * self._heads
        self._query_key_norm = FrozenRMSNorm(*norms)
        self._output = FrozenLinear(attention.o_proj.weight)
        self._mlp_norm = FrozenRMSNorm(layer.post_attention_layernorm)
        self._gate_up = FrozenLinear(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        self._down = FrozenLinear(mlp.down_proj.weight)

    def __call__(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """x [R, G, D]; keys and values [R, T, H, C] of the context; mask [R, 1, 1, T + G] bool, True = seen."""
        num_requests, block, _ = x.shape
        qkv = self._qkv(self._input_norm(x)).view(num_requests, block, -1, self._size)
        rotated = rotate_(self._query_key_norm(qkv[:, :, : -self._heads]), rotary)
        query, key = rotated.tensor_split((self._num_query_heads,), dim=2)
        keys = torch.cat((keys, key), dim=1).transpose(1, 2)
        values = torch.cat((values, qkv[:, :, -self._heads :]), dim=1).transpose(1, 2)
        # The query heads of one key/value head become extra query rows, so that K and V are never expanded.
        grouped = query.reshape(num_requests, block, self._heads, -1, self._size).permute(0, 2, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(grouped.flatten(2, 3), keys, values, mask).view(grouped.shape)
        mixed = mixed.permute(0, 3, 1, 2, 4).flatten(2)
        x = self._output(mixed).add_(x)
        gate, up = self._gate_up(self._mlp_norm(x)).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up)).add_(x)


def rms_norm(x: Tensor, scaled_weight: Tensor, floor: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last dimension D, in fp32, returned in x's dtype.

    Written as x / hypot(|x|, sqrt(D eps)) * (w sqrt(D)): fewer kernels than F.rms_norm launches on a CPU.
    scaled_weight: w sqrt(D), fp32; floor: sqrt(D eps).
    """
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(floor)
    return (x / norm).mul_(scaled_weight).to(x.dtype)


def rotate_(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [..., heads, C] in the half-split convention, in place."""
    cos, sin = rotary
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)
