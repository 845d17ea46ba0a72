"""The decoder (Llama, SmolLM2, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, DeepSeek-V3) over flat batches and paged KV.

Knows the order of the layers; knows nothing of files, sequences, sampling or scheduling. Collectives of one forward
pass: an all_reduce for the embedding, one behind each attention and one behind each MLP (a mixture of experts needs
more, see cluster/moe.py), and a gather of the logits. None where the model is on one rank.

Shape letters: N flat rows, M rows with logits, K tapped layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.attention import Step, group_first_order, masks, ragged_attention
from cluster.flat_batch import FlatBatch
from cluster.kv_cache import PagedKV
from cluster.layers import (
    ColumnParallelLinear,
    ParallelHead,
    ReadWeight,
    RMSNorm,
    Rotary,
    RowParallelLinear,
    SwiGLU,
    VocabParallelEmbedding,
)
from cluster.mesh import Mesh
from cluster.messages import Lockstep
from cluster.models.mla import LatentAttention, MLAConfig
from cluster.moe import MoE, MoEConfig
from drafter.frozen import rotate_
from drafter.packing import can_pack, padded_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of one decoder."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    moe: MoEConfig | None = None
    dense_layer_ids: tuple[int, ...] = ()
    """Layers that have a plain MLP although the others have experts."""
    mla: MLAConfig | None = None
    """Latent attention instead of grouped heads; head_dim is then its rotated part."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """[head_dim / 2] fp32, radians per position: theta^(-2i/C), stretched where the config says so."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Wavelengths above original/low are stretched by `factor`, those below original/high kept, between them blended.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


class Attention:
    """Projections, optional query/key norm, rotary embedding and ragged attention of one layer."""

    def __init__(self, read: ReadWeight, name: str, config: DecoderConfig, mesh: Mesh) -> None:
        heads = mesh.divide(config.num_attention_heads, "attention heads")
        kv_part = mesh.kv_part(config.num_key_value_heads)
        kv_heads = config.num_key_value_heads // kv_part.count
        order = group_first_order(heads, kv_heads, config.head_dim)
        self._heads, self._rotated, self._head_dim = heads, heads + kv_heads, config.head_dim
        self._query_width = heads * config.head_dim
        tail = torch.arange(self._query_width, (heads + 2 * kv_heads) * config.head_dim)
        projections = [(f"{name}.q_proj", mesh.part(0)), (f"{name}.k_proj", kv_part), (f"{name}.v_proj", kv_part)]
        self._qkv = ColumnParallelLinear(read, projections, bias=config.qkv_bias, order_O=torch.cat((order, tail)))
        self._output = RowParallelLinear(read, f"{name}.o_proj", mesh, bias=config.output_bias, order_I=order)
        self._norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.query_key_norm:
            q_norm = RMSNorm(read, f"{name}.q_norm", config.rms_norm_eps)
            self._norms = q_norm, RMSNorm(read, f"{name}.k_norm", config.rms_norm_eps)

    def __call__(self, x_ND: Tensor, layer: int, step: Step) -> Tensor:
        """[N or more, D] -> the same; writes the N rows' keys and values into the pages on the way."""
        qkv = self._qkv(x_ND)
        qk_NHC = qkv.view(x_ND.shape[0], -1, self._head_dim)[:, : self._rotated]
        if self._norms is not None:
            for part, norm in zip((qk_NHC[:, : self._heads], qk_NHC[:, self._heads :]), self._norms, strict=True):
                part.copy_(norm(part))
        rotate_(qk_NHC, step.cos_sin)  # in place: the keys now lie before the values, as the pages want them
        query, key_value_rows = qkv.tensor_split((self._query_width,), 1)
        step.kv.write_rows(layer, step.batch.slots_N, key_value_rows[: step.batch.num_rows])
        return self._output(ragged_attention(query, step.kv, layer, step.batch, step.masks))


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, read: ReadWeight, index: int, config: DecoderConfig, mesh: Mesh) -> None:
        name = f"model.layers.{index}"
        self._attention_norm = RMSNorm(read, f"{name}.input_layernorm", config.rms_norm_eps)
        self._attention: Attention | LatentAttention
        if config.mla is None:
            self._attention = Attention(read, f"{name}.self_attn", config, mesh)
        else:
            self._attention = LatentAttention(read, f"{name}.self_attn", config.num_attention_heads, config.mla, mesh)
        self._mlp_norm = RMSNorm(read, f"{name}.post_attention_layernorm", config.rms_norm_eps)
        self.moe: MoE | None = None
        if config.moe is not None and index not in config.dense_layer_ids:
            self.moe = MoE(read, f"{name}.mlp", config.moe, mesh)
        else:
            self._mlp = SwiGLU(read, f"{name}.mlp", mesh, bias=config.mlp_bias)

    def __call__(self, x_ND: Tensor, layer: int, step: Step) -> Tensor:
        x_ND = self._attention(self._attention_norm(x_ND), layer, step).add_(x_ND)
        rows_ND = self._mlp_norm(x_ND)
        return (self._mlp(rows_ND) if self.moe is None else self.moe(rows_ND, step.lockstep)).add_(x_ND)


class Decoder:
    """The model. Made by `loader.load_decoder`."""

    def __init__(self, read: ReadWeight, config: DecoderConfig, mesh: Mesh) -> None:
        self.config = config
        self.embedding = VocabParallelEmbedding(read, "model.embed_tokens", mesh)
        weight_VD = self.embedding.weight_VD
        head_VD = weight_VD if config.tie_word_embeddings else read("lm_head.weight", mesh.part(0))
        # A tied head is the one weight that exists twice where weights are packed: rows can't be looked up in a packed
        # one, and a plain product would cost as much time as six layers.
        self._head = ParallelHead(head_VD, mesh)
        self._layers = [DecoderLayer(read, index, config, mesh) for index in range(config.num_hidden_layers)]
        self._norm = RMSNorm(read, "model.norm", config.rms_norm_eps)
        self.dtype, self.device = weight_VD.dtype, weight_VD.device
        self.pads = can_pack(weight_VD) and not self.moe_layers
        """Whether flat batches are padded, once instead of in every product. Experts are passed by real rows only."""
        self._rotary = Rotary(rotary_frequencies(config), config.max_position_embeddings, self.dtype, self.device)
        self._num_kv_heads = (
            1 if config.mla else config.num_key_value_heads // mesh.kv_part(config.num_key_value_heads).count
        )
        self._num_queries_per_kv = config.num_attention_heads // mesh.tp_size // self._num_kv_heads

    @property
    def moe_layers(self) -> dict[int, MoE]:
        """The layers that have experts, by their place."""
        return {index: layer.moe for index, layer in enumerate(self._layers) if layer.moe is not None}

    def make_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        """Pages of this model's shape, for this rank's key/value heads."""
        mla = self.config.mla
        row_size, num_parts = (mla.cached_size, 1) if mla else (self.config.head_dim, 2)
        shape = (self.config.num_hidden_layers, num_blocks, block_size, self._num_kv_heads, row_size)
        return PagedKV(*shape, self.dtype, self.device, num_parts)

    @torch.inference_mode()
    def forward(
        self, batch: FlatBatch, kv: PagedKV, tap_layers: tuple[int, ...] = (), lockstep: Lockstep | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass over the batch's rows -> hidden [N, D] after the final norm, and features [N, K * D].

        Features are the outputs of the 0-based `tap_layers`, in that order (Hugging Face's hidden_states[id + 1];
        never the last layer). Writes the rows' keys and values into `kv`. All ranks of all replicas enter a pass
        together, with the same `lockstep`: here, or in `join` where a replica has no rows.
        """
        group_masks = masks(batch, self._num_queries_per_kv, self.dtype)
        lockstep = lockstep or Lockstep((batch.num_rows,))
        if self.pads:
            batch = batch.padded(padded_rows(batch.num_rows))
        step = Step(batch, kv, self._rotary.at(batch.positions_N), group_masks, lockstep)
        x_ND = self.embedding(batch.tokens_N)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            x_ND = layer(x_ND, index, step)
            if index in tap_layers:
                tapped[index] = x_ND
        x_ND = x_ND[: batch.num_rows]
        features = [tapped[index][: batch.num_rows] for index in tap_layers]
        return self._norm(x_ND), torch.cat(features, -1) if features else x_ND.new_empty(x_ND.shape[0], 0)

    @torch.inference_mode()
    def join(self, lockstep: Lockstep) -> None:
        """Take part in the other replicas' pass without rows: this rank's experts compute theirs."""
        nothing_0D = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        for moe in self.moe_layers.values():
            moe(nothing_0D, lockstep)

    @torch.inference_mode()
    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Final hidden states [M, D] -> logits [M, V] in the model's dtype; on a rank that obeys, its part of them."""
        return self._head(hidden_MD)
