"""A local folder with config.json and *.safetensors -> a Decoder.

Knows Hugging Face's file layout and config keys; knows nothing of where the folder came from.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from cluster.mesh import Mesh
from cluster.models.decoder import Decoder, DecoderConfig, RopeScaling

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
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
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a dict)
        self._unread = {name for name in self._file_of if not name.endswith(_IGNORED_SUFFIXES)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing unmaps the files: nothing may still be a view of them (layers copy or pack what they read).
        self._file_of.clear()
        self._files.clear()

    def read(self, name: str) -> Tensor:
        """The tensor, in the model's dtype and on its device. ValueError when the folder lacks it."""
        if name not in self._file_of:
            raise ValueError(f"{self._folder} lacks the tensor {name!r}")
        self._unread.discard(name)
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def forget(self, name: str) -> None:
        """Ticks off a tensor that the model has no use for."""
        self._unread.discard(name)

    def check_complete(self) -> None:
        """ValueError when a tensor was never read: the model would silently be another one."""
        if self._unread:
            raise ValueError(f"{self._folder} holds tensors this model has no place for: {sorted(self._unread)[:5]}")


def load_decoder(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu", mesh: Mesh | None = None
) -> Decoder:
    """Loads the model; ValueError names what is missing, left over or not supported."""
    config = read_config(folder)
    with Checkpoint(folder, dtype, device) as checkpoint, torch.inference_mode():
        decoder = Decoder(checkpoint.read, config, mesh or Mesh())
        if config.tie_word_embeddings:
            checkpoint.forget("lm_head.weight")
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
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window", family == "mistral"):
        raise ValueError(f"{path}: sliding_window attention is not supported")
    theta, scaling = _rope(raw, path)
    heads, hidden_size = raw["num_attention_heads"], raw["hidden_size"]
    bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden_size // heads,
        rms_norm_eps=raw["rms_norm_eps"],
        max_position_embeddings=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        query_key_norm=family == "qwen3",
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
