"""Drafter checkpoints in the public `Qwen3DSparkModel` format (DeepSpec, vLLM): a flat config.json and safetensors.

EAGLE-3 and MTP drafters are kept alike, under architecture names of their own: no other system has just these tensors.

Whoever loads must check completeness, since a missing tensor or shifted taps fail silently as lost acceptance: so a
missing, unexpected or misshapen tensor is an error here. `calibration.json` beside the weights holds the STS
temperatures; the public format has no place for them. Knows files and names; knows nothing of training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafter.baselines.chain import ChainDrafter
from drafter.baselines.eagle3 import Eagle3Backbone
from drafter.baselines.mtp import MtpBackbone
from drafter.config import DrafterConfig, Family
from drafter.dspark import DSpark

ARCHITECTURE = "Qwen3DSparkModel"
_ARCHITECTURES: dict[Family, str] = {"block": ARCHITECTURE, "eagle3": "DSparkServeEagle3", "mtp": "DSparkServeMTP"}
_TOKEN_MAP = "d2t"
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_CONFIDENCE_WEIGHT = "confidence_head.proj.weight"
_CONFIDENCE_BIAS = "confidence_head.proj.bias"
_BUFFERS = {_TOKEN_MAP, _HEAD, _EMBEDDING}


def build_drafter(
    config: DrafterConfig, embed_weight: Tensor, lm_head_weight: Tensor, target_ids: Tensor
) -> DSpark | ChainDrafter:
    """An untrained drafter of the family that `config` names; arguments as DSpark's."""
    if config.family == "block":
        return DSpark(config, embed_weight, lm_head_weight, target_ids)
    backbone = Eagle3Backbone(config) if config.family == "eagle3" else MtpBackbone(config)
    return ChainDrafter(config, backbone, embed_weight, lm_head_weight, target_ids)


def save_checkpoint(model: DSpark | ChainDrafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors. The embedding, identical to the target's, is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_public_name(name): value.detach().to(dtype).contiguous() for name, value in model.named_parameters()}
    if model.config.reduced_vocabulary:
        tensors[_TOKEN_MAP] = model.target_ids - torch.arange(len(model.target_ids))
        tensors[_HEAD] = model.lm_head.detach().to(dtype).contiguous()
    write_tensors(tensors, folder)
    (folder / "config.json").write_text(json.dumps(public_config(model.config), indent=2) + "\n")


def confidence_weights(folder: Path) -> tuple[Tensor, float]:
    """The confidence head of a saved checkpoint: weight [D + r] fp64 and bias. ValueError where it has none."""
    tensors = load_file(folder / "model.safetensors")
    if _CONFIDENCE_WEIGHT not in tensors:
        raise ValueError(f"{folder}: this drafter has no confidence head, so there is nothing to calibrate")
    return tensors[_CONFIDENCE_WEIGHT][0].double(), float(tensors[_CONFIDENCE_BIAS])


def replace_confidence(folder: Path, weight: Tensor, bias: float) -> None:
    """Give a saved checkpoint another confidence head, weight [D + r], not calibrated: any loader has it then."""
    tensors = load_file(folder / "model.safetensors")
    old = tensors[_CONFIDENCE_WEIGHT]
    tensors[_CONFIDENCE_WEIGHT] = weight[None].to(old.dtype)
    tensors[_CONFIDENCE_BIAS] = torch.tensor([bias], dtype=old.dtype)
    write_tensors(tensors, folder)


def load_drafter(
    folder: Path, embed_weight: Tensor, lm_head_weight: Tensor, dtype: torch.dtype = torch.bfloat16
) -> DSpark | ChainDrafter:
    """The drafter in `folder` for a target with embed_weight and lm_head_weight, each [vocab_size, D]. Trainable still.

    Raises ValueError when the checkpoint doesn't fit the target or is not complete.
    """
    config = read_config(folder)
    tensors = load_file(folder / "model.safetensors")
    if embed_weight.shape != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"{folder}: made for a target with vocabulary {config.vocab_size} and width {config.hidden_size}, "
            f"but this target's embedding is {tuple(embed_weight.shape)}"
        )
    target_ids = _target_ids(config, tensors, folder)
    head = tensors.get(_HEAD, lm_head_weight[target_ids])
    model = build_drafter(config, tensors.get(_EMBEDDING, embed_weight).to(dtype), head.to(dtype), target_ids)
    _load_parameters(model, tensors, folder)
    model.to(dtype)
    if model.confidence_head is not None:
        model.confidence_head.float()
    temperatures = read_sts_temperatures(folder)
    if temperatures is not None and isinstance(model, DSpark):
        if len(temperatures) != config.block_size:
            raise ValueError(f"{folder}: calibration.json has {len(temperatures)} positions, not {config.block_size}")
        model.sts_temperatures = torch.tensor(temperatures)
    return model.eval()


def read_config(folder: Path) -> DrafterConfig:
    """The DrafterConfig of a checkpoint folder. Raises ValueError naming what is missing or unsupported."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no drafter checkpoint there (config.json is missing)")
    values: dict[str, Any] = json.loads(path.read_text())
    architectures = values.get("architectures", [])
    family = next((family for family, name in _ARCHITECTURES.items() if name in architectures), None)
    if family is None:
        names = ", ".join(_ARCHITECTURES.values())
        raise ValueError(f"{path}: architectures is {architectures}, expected one of {names}")
    check_layers(path, values)
    try:
        return DrafterConfig(
            family=family,
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_hidden_layers=values["num_hidden_layers"],
            num_attention_heads=values["num_attention_heads"],
            num_key_value_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            vocab_size=values["vocab_size"],
            draft_vocab_size=values.get("draft_vocab_size") or values["vocab_size"],
            num_target_layers=values["num_target_layers"],
            target_layer_ids=tuple(values["target_layer_ids"]),
            block_size=values["block_size"],
            mask_token_id=values["mask_token_id"],
            markov_rank=values["markov_rank"],
            markov_head_type=values.get("markov_head_type", "vanilla"),
            # The public loaders default these two to false; we always write them.
            enable_confidence_head=values.get("enable_confidence_head", False),
            rms_norm_eps=values["rms_norm_eps"],
            rope_theta=values.get("rope_theta") or values["rope_parameters"]["rope_theta"],
            max_position_embeddings=values["max_position_embeddings"],
        )
    except KeyError as error:
        raise ValueError(f"{path}: the key {error.args[0]!r} is missing") from None


def check_layers(path: Path, layer: dict[str, Any]) -> None:
    """ValueError naming what a transformer's settings ask for and ours doesn't do, where no tensor would tell."""
    if layer.get("attention_bias"):
        raise ValueError(f"{path}: attention_bias is not supported")
    if set(layer.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise ValueError(f"{path}: layer_types other than full_attention are not supported")
    for key in ("rope_scaling", "rope_parameters"):
        rope = layer.get(key) or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise ValueError(f"{path}: {key} of type {kind!r} is not supported, only 'default'")


def read_sts_temperatures(folder: Path) -> list[float] | None:
    """Sequential temperature scaling fitted by `python -m drafter calibrate`; None when the drafter has none yet."""
    path = folder / "calibration.json"
    if not path.is_file():
        return None
    temperatures: list[float] = json.loads(path.read_text())["sts_temperatures"]
    return temperatures


def write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """model.safetensors of a checkpoint folder, as a whole or not at all; a calibration found there goes.

    It was fitted to the weights of before. Whoever has one for these writes it afterwards.
    """
    path = folder / "model.safetensors"
    partial = folder / "model.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes files that only their owner can read
    (folder / "calibration.json").unlink(missing_ok=True)  # first: at no moment do both lie there
    partial.replace(path)


def _public_name(name: str) -> str:
    return name.removeprefix("backbone.")


def public_config(config: DrafterConfig) -> dict[str, object]:
    """What config.json holds."""
    return {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.enable_confidence_head and config.markov_rank > 0,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _target_ids(config: DrafterConfig, tensors: dict[str, Tensor], folder: Path) -> Tensor:
    ids = torch.arange(config.draft_vocab_size)
    if not config.reduced_vocabulary:
        return ids
    missing = {_TOKEN_MAP, _HEAD} - tensors.keys()
    if missing:
        raise ValueError(f"{folder}: a reduced draft vocabulary needs the tensors {sorted(missing)}")
    return ids + tensors[_TOKEN_MAP].to(torch.int64)


def checkpoint_problems(config: DrafterConfig, tensors: dict[str, Tensor]) -> list[str]:
    """What is missing, unexpected or of another shape than `config` says; [] for a complete checkpoint."""
    with torch.device("meta"):
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        head = torch.empty(config.draft_vocab_size, config.hidden_size)
        model = build_drafter(config, embedding, head, torch.arange(config.draft_vocab_size, device="cpu"))
    needed = (_TOKEN_MAP, _HEAD) if config.reduced_vocabulary else ()
    missing = [f"missing {name}" for name in needed if name not in tensors]
    return missing + _parameter_problems(model, tensors)


def _parameter_problems(model: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    parameters = {_public_name(name): value for name, value in model.named_parameters()}
    given = tensors.keys() - _BUFFERS
    problems = [f"missing {name}" for name in sorted(parameters.keys() - given)]
    problems += [f"unexpected {name}" for name in sorted(given - parameters.keys())]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(value.shape)}"
        for name, value in parameters.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    return problems


def _load_parameters(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    problems = _parameter_problems(model, tensors)
    if problems:
        raise ValueError(f"{folder}: not a complete drafter checkpoint: " + "; ".join(problems))
    parameters = {_public_name(name): value for name, value in model.named_parameters()}
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(tensors[name])
