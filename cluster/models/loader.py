"""A local folder with config.json and *.safetensors -> a Decoder.

Knows Hugging Face's file layout and config keys; knows nothing of where the folder came from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from cluster.mesh import WHOLE, Mesh, Part
from cluster.models.decoder import Decoder, DecoderConfig, RopeScaling
from cluster.models.mla import MLAConfig
from cluster.moe import MoEConfig

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_MIXTRAL_BLOCK = ".block_sparse_moe."
# What the other families call the parts of it.
_MIXTRAL_NAMES = {_MIXTRAL_BLOCK: ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
# Not weights: tables that some checkpoints store although they follow from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


class Checkpoint:
    """The tensors of a folder, read one at a time and ticked off, so that a missing or unused one is noticed."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{folder} has no *.safetensors")
        self._folder, self._dtype, self._device = folder, dtype, device
        self._files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._stored = {_common_name(name): (file, name) for file in self._files for name in file.keys()}  # noqa: SIM118
        self._unread = {name for name in self._stored if not name.endswith(_IGNORED_SUFFIXES)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing unmaps the files: nothing may still be a view of them (layers copy or pack what they read).
        self._stored.clear()
        self._files.clear()

    def read(self, name: str, part: Part = WHOLE, dtype: torch.dtype | None = None) -> Tensor:
        """Part of a tensor, in `dtype` (the model's) and on its device; the rest isn't read from the file.

        ValueError when the folder lacks the tensor or it can't be divided so.
        """
        if name not in self._stored:
            raise ValueError(f"{self._folder} lacks the tensor {name!r}")
        self._unread.discard(name)
        file, stored_name = self._stored[name]
        if part.count == 1:
            tensor: Tensor = file.get_tensor(stored_name)
        else:
            rows = file.get_slice(stored_name)
            start, end = part.range(rows.get_shape()[part.dim], name)
            tensor = rows[start:end] if part.dim == 0 else rows[:, start:end]
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    def forget(self, name: str) -> None:
        """Ticks off a tensor that the model has no use for."""
        self._unread.discard(name)

    def forget_experts(self, experts: Container[int]) -> None:
        """Ticks off the tensors of experts that other ranks hold, who will notice if one is missing."""
        self._unread = {
            name for name in self._unread if not ((found := _EXPERT.search(name)) and int(found[1]) in experts)
        }

    def check_complete(self) -> None:
        """ValueError when a tensor was never read: the model would silently be another one."""
        if self._unread:
            raise ValueError(f"{self._folder} holds tensors this model has no place for: {sorted(self._unread)[:5]}")


def _common_name(name: str) -> str:
    """The name that the layers ask for; only Mixtral's experts have others."""
    if _MIXTRAL_BLOCK in name:
        for own, common in _MIXTRAL_NAMES.items():
            name = name.replace(own, common)
    return name


def load_decoder(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu", mesh: Mesh | None = None
) -> Decoder:
    """Loads this rank's part of the model; ValueError names what is missing, left over, unsupported or indivisible."""
    config, mesh = read_config(folder), mesh or Mesh()
    with Checkpoint(folder, dtype, device) as checkpoint, torch.inference_mode():
        decoder = Decoder(checkpoint.read, config, mesh)
        if config.tie_word_embeddings:
            checkpoint.forget("lm_head.weight")
        if config.moe is not None:
            local = mesh.experts(config.moe.num_experts)
            checkpoint.forget_experts(set(range(config.moe.num_experts)).difference(local))
        checkpoint.check_complete()
    return decoder


def read_config(folder: Path) -> DecoderConfig:
    """config.json -> DecoderConfig. ValueError when it asks for what the decoder doesn't do."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json")
    raw: dict[str, Any] = json.loads(path.read_text())
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"{path}: model_type {family!r} is not supported; these are: {', '.join(_FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window", family in ("mistral", "mixtral")):
        raise ValueError(f"{path}: sliding_window attention is not supported")
    if raw.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config is not supported, only plain weights")
    theta, scaling = _rope(raw, path)
    heads, hidden_size = raw["num_attention_heads"], raw["hidden_size"]
    bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("qk_rope_head_dim") or raw.get("head_dim") or hidden_size // heads,
        rms_norm_eps=raw["rms_norm_eps"],
        max_position_embeddings=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        query_key_norm=family in ("qwen3", "qwen3_moe", "deepseek_v3"),
        moe=_moe(raw, family),
        dense_layer_ids=_dense_layer_ids(raw),
        mla=_mla(raw, path) if family == "deepseek_v3" else None,
    )


def _moe(raw: dict[str, Any], family: str) -> MoEConfig | None:
    if family == "deepseek_v3":
        return MoEConfig(
            num_experts=raw["n_routed_experts"],
            num_experts_per_token=raw["num_experts_per_tok"],
            scoring="sigmoid",
            normalize=raw["norm_topk_prob"],
            num_groups=raw["n_group"],
            num_groups_kept=raw["topk_group"],
            scaling=raw["routed_scaling_factor"],
            corrected=True,
            shared=raw["n_shared_experts"] > 0,
        )
    if family not in ("mixtral", "qwen3_moe"):
        return None
    return MoEConfig(
        # transformers 5 calls it num_local_experts everywhere, older checkpoints of Qwen3-MoE num_experts.
        num_experts=raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"],
        num_experts_per_token=raw["num_experts_per_tok"],
        normalize=family == "mixtral" or bool(raw.get("norm_topk_prob", False)),
    )


def _dense_layer_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    """Layers without experts in a model that has some: DeepSeek's first ones, or as Qwen3-MoE's settings say."""
    first, every = raw.get("first_k_dense_replace", 0), raw.get("decoder_sparse_step", 1)
    plain = raw.get("mlp_only_layers") or ()
    return tuple(i for i in range(raw["num_hidden_layers"]) if i < first or i in plain or (i + 1) % every)


def _mla(raw: dict[str, Any], path: Path) -> MLAConfig:
    if raw.get("q_lora_rank") is None or raw.get("attention_bias"):
        raise ValueError(f"{path}: latent attention without q_lora_rank, or with attention_bias, is not supported")
    return MLAConfig(
        q_lora_rank=raw["q_lora_rank"],
        kv_lora_rank=raw["kv_lora_rank"],
        qk_nope_head_dim=raw["qk_nope_head_dim"],
        qk_rope_head_dim=raw["qk_rope_head_dim"],
        v_head_dim=raw["v_head_dim"],
        rope_interleave=raw.get("rope_interleave", True),
    )


def _rope(raw: dict[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Rotary settings in either layout: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{path}: rope_type {kind!r} is not supported, only 'default' and 'llama3'")
    return theta, RopeScaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
    )
