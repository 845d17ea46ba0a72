"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads in one latent.

What lies in the pages is the latent and one rotated key part that all heads share; a head's own key and value
projections are absorbed into its query and its output, so attention is that of many query heads over one key/value
head, and values are the keys' first columns. The pages are the same on all ranks of a replica, heads are divided.

Shape letters: N flat rows, D hidden size, H heads of this rank, L latent size, P plain and R rotated part of a head's
query, V its value size, Q rank of the queries' bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.attention import Step, ragged_attention
from cluster.layers import ReadWeight, RMSNorm, RowParallelLinear
from cluster.mesh import Mesh
from drafter.frozen import rotate_
from drafter.packing import FrozenLinear

_NORM_EPS = 1e-6
"""Of the bottlenecks' norms; the checkpoints' rms_norm_eps is that of the layers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes, in the checkpoints' names: q_lora_rank, kv_lora_rank, and the parts of a head."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    """Whether the rotated pairs are neighbours in the checkpoint, instead of halves apart."""

    @property
    def cached_size(self) -> int:
        """Numbers per token and layer in the pages."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentAttention:
    """Projections, norms, rotary embedding and ragged attention of one layer."""

    def __init__(self, read: ReadWeight, name: str, num_heads: int, config: MLAConfig, mesh: Mesh) -> None:
        self._config = config
        self._heads = mesh.divide(num_heads, "attention heads")
        plain, rotated, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        pairs = torch.arange(rotated)
        if config.rope_interleave:
            pairs = pairs.view(-1, 2).T.flatten()
        order = torch.cat((torch.arange(latent), latent + pairs))
        down = [read(f"{name}.q_a_proj.weight"), read(f"{name}.kv_a_proj_with_mqa.weight")[order]]
        self._down = FrozenLinear(torch.cat(down))
        self._query_norm = RMSNorm(read, f"{name}.q_a_layernorm", _NORM_EPS)
        self._latent_norm = RMSNorm(read, f"{name}.kv_a_layernorm", _NORM_EPS)
        order = torch.cat((torch.arange(plain), plain + pairs))
        query = read(f"{name}.q_b_proj.weight", mesh.part(0)).view(self._heads, plain + rotated, -1)
        self._query = FrozenLinear(query[:, order].flatten(0, 1))
        up = read(f"{name}.kv_b_proj.weight", mesh.part(0)).view(self._heads, plain + config.v_head_dim, latent)
        self._key_HPL = up[:, :plain].clone()
        self._value_HLV = up[:, plain:].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        self._output = RowParallelLinear(read, f"{name}.o_proj", mesh)
        # Attention divides by the root of what it sees as the head's size, which here is that of the pages' rows.
        self._scale = (config.cached_size / (plain + rotated)) ** 0.5

    def __call__(self, x_ND: Tensor, layer: int, step: Step) -> Tensor:
        """[N or more, D] -> the same; writes the N rows' latents into the pages on the way."""
        config, num_rows = self._config, x_ND.shape[0]
        sizes = (config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim)
        bottleneck_NQ, latent_NL, shared_NR = self._down(x_ND).split(sizes, 1)  # type: ignore[no-untyped-call]
        query = self._query(self._query_norm(bottleneck_NQ)).view(num_rows, self._heads, -1)
        plain_NHP, rotated_NHR = query.tensor_split((config.qk_nope_head_dim,), -1)
        latent_NHL = torch.einsum("nhp,hpl->nhl", plain_NHP, self._key_HPL)
        query = torch.cat((latent_NHL, rotate_(rotated_NHR.contiguous(), step.cos_sin)), -1).mul_(self._scale)
        shared_NR = rotate_(shared_NR.unsqueeze(1).contiguous(), step.cos_sin)[:, 0]
        latents = torch.cat((self._latent_norm(latent_NL), shared_NR), -1)
        step.kv.write_rows(layer, step.batch.slots_N, latents[: step.batch.num_rows])
        mixed = ragged_attention(query.flatten(1), step.kv, layer, step.batch, step.masks)
        mixed_NHL = mixed.view(num_rows, self._heads, -1)[..., : config.kv_lora_rank]
        return self._output(torch.einsum("nhl,hlv->nhv", mixed_NHL, self._value_HLV).flatten(1))
