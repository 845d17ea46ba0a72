"""The small parts of a draft layer: RMSNorm, rotary positions, SwiGLU, and attention over context and block.

Shape letters: B sequences, A blocks (anchors) per sequence, G block positions, T context rows, D hidden size,
Q query heads, H key/value heads, C head size. Knows nothing of heads, vocabularies or where context rows are stored.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.config import DrafterConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w, as x / hypot(|x|, sqrt(D eps)) * sqrt(D) w: faster than F.rms_norm on a CPU."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._scale = size**0.5
        self.floor = torch.tensor((size * eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        norm = norm.hypot(self.floor)
        out: Tensor = x / norm * (self.weight.float() * self._scale)
        return out.to(x.dtype)


class RotaryTable(nn.Module):
    """cos and sin by absolute position, [positions, C / 2] fp32 each, made once."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        half = config.head_dim // 2
        inverse = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * inverse
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [...] int64 -> (cos, sin), each [..., 1, C / 2]: the 1 stands for the heads."""
        return self.cos[positions].to(dtype).unsqueeze(-2), self.sin[positions].to(dtype).unsqueeze(-2)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [..., heads, C] in the half-split convention of Llama and Qwen."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SwiGLU(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class BlockAttention(nn.Module):
    """Every slot of a block sees the context strictly before its anchor and all slots of its own block.

    K = [W_k ctx ; W_k block], V likewise, Q from the block only; per-head q/k norm; true positions (paper section 3).
    """

    def __init__(self, config: DrafterConfig, input_size: int | None = None) -> None:
        """input_size: width of the rows that are projected, where it isn't the hidden size."""
        super().__init__()
        input_size = input_size or config.hidden_size
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [..., D], rotary of its positions -> keys and values [..., H, C]. Serves context and block alike."""
        split = (*x.shape[:-1], self.num_key_value_heads, self.head_dim)
        return rotate(self.k_norm(self.k_proj(x).view(split)), rotary), self.v_proj(x).view(split)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], hidden_rows: Tensor
    ) -> Tensor:
        """x [B, A, G, D]; context keys and values [B, T, H, C]; hidden_rows [B, 1, A, 1, T] bool, True = not seen."""
        return self.attend(x, rotary, self.keys_values(x, rotary), context, hidden_rows)

    def attend(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        block: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        hidden_rows: Tensor,
    ) -> Tensor:
        """`forward` with the block's keys and values [B, A, J, H, C] given: every row of x sees all J of them."""
        num_sequences, num_blocks, num_rows, _ = x.shape
        heads, size = self.num_key_value_heads, self.head_dim
        query = rotate(self.q_norm(self.q_proj(x).view(num_sequences, num_blocks, num_rows, -1, size)), rotary)
        group = query.shape[-2] // heads
        # The query heads of one key/value head become extra query rows, so that K and V are never expanded.
        query = query.view(num_sequences, num_blocks, num_rows, heads, group, size).permute(0, 3, 1, 4, 2, 5)
        query = query.reshape(num_sequences, heads, num_blocks, group * num_rows, size)
        key, value = (y.permute(0, 3, 1, 2, 4) for y in block)  # [B, H, A, J, C] each
        context_key, context_value = (y.transpose(1, 2) for y in context)  # [B, H, T, C] each
        mixed = _attend(query, key, value, context_key, context_value, hidden_rows)
        mixed = mixed.view(num_sequences, heads, num_blocks, group, num_rows, size).permute(0, 2, 4, 1, 3, 5)
        out: Tensor = self.o_proj(mixed.reshape(num_sequences, num_blocks, num_rows, -1))
        return out


def _attend(
    query: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, hidden_rows: Tensor
) -> Tensor:
    """Many blocks of one context: query [B, H, A, Q, C], key and value [B, H, A, G, C], context [B, H, T, C]."""
    num_sequences, heads, num_blocks, num_rows, size = query.shape
    query = query * size**-0.5
    rows = query.reshape(num_sequences, heads, num_blocks * num_rows, size)
    seen = (rows @ context_key.transpose(-1, -2)).view(num_sequences, heads, num_blocks, num_rows, -1)
    scores = torch.cat((seen.masked_fill(hidden_rows, float("-inf")), query @ key.transpose(-1, -2)), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    num_context = context_key.shape[-2]
    from_context = weights[..., :num_context].reshape(num_sequences, heads, -1, num_context) @ context_value
    return from_context.view(query.shape) + weights[..., num_context:] @ value


class DraftLayer(nn.Module):
    """Pre-norm decoder layer whose attention injects the context."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], hidden_rows: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, context, hidden_rows)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
