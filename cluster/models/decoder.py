"""A Llama-family decoder (Llama, SmolLM2, Mistral, Qwen2, Qwen3) over a flat batch and paged keys and values.

Knows the order of the layers; knows nothing of files, sequences, sampling or scheduling.

Shape letters: N flat rows, M rows with logits, K tapped layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.attention import group_first_order, masks, ragged_attention
from cluster.flat_batch import FlatBatch
from cluster.kv_cache import PagedKV
from cluster.layers import ColumnParallelLinear, ReadWeight, RMSNorm, Rotary, RowParallelLinear, SwiGLU, rotate_
from cluster.mesh import Mesh
from drafter.packing import FrozenLinear


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
    intermediate_size: int
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
        kv_heads = mesh.divide(config.num_key_value_heads, "key/value heads")
        order = group_first_order(heads, kv_heads, config.head_dim)
        self._heads, self._rotated, self._head_dim = heads, heads + kv_heads, config.head_dim
        self._query_width = heads * config.head_dim
        tail = torch.arange(self._query_width, (heads + 2 * kv_heads) * config.head_dim)
        names = tuple(f"{name}.{part}_proj" for part in "qkv")
        self._qkv = ColumnParallelLinear(read, names, mesh, bias=config.qkv_bias, order_O=torch.cat((order, tail)))
        self._output = RowParallelLinear(read, f"{name}.o_proj", mesh, bias=config.output_bias, order_I=order)
        self._norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.query_key_norm:
            q_norm = RMSNorm(read, f"{name}.q_norm", config.rms_norm_eps)
            self._norms = q_norm, RMSNorm(read, f"{name}.k_norm", config.rms_norm_eps)

    def __call__(self, x_ND: Tensor, layer: int, step: Step) -> Tensor:
        """[N, D] -> [N, D]; writes the rows' keys and values into the pages on the way."""
        qkv = self._qkv(x_ND)
        qk_NHC = qkv.view(x_ND.shape[0], -1, self._head_dim)[:, : self._rotated]
        if self._norms is not None:
            for part, norm in zip((qk_NHC[:, : self._heads], qk_NHC[:, self._heads :]), self._norms, strict=True):
                part.copy_(norm(part))
        rotate_(qk_NHC, step.cos_sin)  # in place: the keys now lie before the values, as the pages want them
        query, key_value_rows = qkv.tensor_split((self._query_width,), 1)
        step.kv.write_rows(layer, step.batch.slots_N, key_value_rows)
        return self._output(ragged_attention(query, step.kv, layer, step.batch, step.masks))


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares."""

    batch: FlatBatch
    kv: PagedKV
    cos_sin: tuple[Tensor, Tensor]
    masks: Sequence[Tensor | None]


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, read: ReadWeight, name: str, config: DecoderConfig, mesh: Mesh) -> None:
        self._attention_norm = RMSNorm(read, f"{name}.input_layernorm", config.rms_norm_eps)
        self._attention = Attention(read, f"{name}.self_attn", config, mesh)
        self._mlp_norm = RMSNorm(read, f"{name}.post_attention_layernorm", config.rms_norm_eps)
        self._mlp = SwiGLU(read, f"{name}.mlp", mesh, bias=config.mlp_bias)

    def __call__(self, x_ND: Tensor, layer: int, step: Step) -> Tensor:
        """[N, D] -> [N, D], a new tensor: the input may have been tapped."""
        x_ND = self._attention(self._attention_norm(x_ND), layer, step).add_(x_ND)
        return self._mlp(self._mlp_norm(x_ND)).add_(x_ND)


class Decoder:
    """The model. Made by `loader.load_decoder`."""

    def __init__(self, read: ReadWeight, config: DecoderConfig, mesh: Mesh) -> None:
        self.config = config
        self.embed_weight_VD = read("model.embed_tokens.weight").clone()
        """[V, D]: plain, since rows are looked up in it."""
        head_VD = self.embed_weight_VD if config.tie_word_embeddings else read("lm_head.weight")
        # A tied head is the one weight that exists twice where weights are packed: rows can't be looked up in a packed
        # one, and a plain product would cost as much time as six layers.
        self._head = FrozenLinear(head_VD)
        self._layers = [
            DecoderLayer(read, f"model.layers.{index}", config, mesh) for index in range(config.num_hidden_layers)
        ]
        self._norm = RMSNorm(read, "model.norm", config.rms_norm_eps)
        self.dtype, self.device = self.embed_weight_VD.dtype, self.embed_weight_VD.device
        self._rotary = Rotary(rotary_frequencies(config), config.max_position_embeddings, self.dtype, self.device)
        self._mesh = mesh

    def make_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        """Pages of this model's shape, for this rank's key/value heads."""
        heads = self._mesh.divide(self.config.num_key_value_heads, "key/value heads")
        shape = (self.config.num_hidden_layers, num_blocks, block_size, heads, self.config.head_dim)
        return PagedKV(*shape, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv: PagedKV, tap_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """One pass over the batch's rows -> hidden [N, D] after the final norm, and features [N, K * D].

        Features are the outputs of the 0-based `tap_layers`, in that order (Hugging Face's hidden_states[id + 1];
        never the last layer). Writes the rows' keys and values into `kv`.
        """
        group_masks = masks(batch, self.config.num_attention_heads // self.config.num_key_value_heads, self.dtype)
        step = Step(batch, kv, self._rotary.at(batch.positions_N), group_masks)
        x_ND = F.embedding(batch.tokens_N, self.embed_weight_VD)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            x_ND = layer(x_ND, index, step)
            if index in tap_layers:
                tapped[index] = x_ND
        features = [tapped[index] for index in tap_layers]
        return self._norm(x_ND), torch.cat(features, -1) if features else x_ND.new_empty(x_ND.shape[0], 0)

    @torch.inference_mode()
    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Final hidden states [M, D] -> logits [M, V] in the model's dtype."""
        return self._head(hidden_MD)
