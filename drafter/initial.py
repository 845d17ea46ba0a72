"""The first weights of a drafter: from the target's last layers, or from another drafter.

Knows modules and the target's files; knows nothing of training.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from drafter.backbone import Backbone
from drafter.baselines.chain import ChainDrafter
from drafter.baselines.eagle3 import Eagle3Backbone
from drafter.baselines.mtp import MtpBackbone
from drafter.checkpoint import build_drafter, load_drafter
from drafter.config import DrafterConfig
from drafter.dspark import DSpark
from drafter.target import Target


def initial_drafter(target: Target, config: DrafterConfig, target_ids: Tensor) -> DSpark | ChainDrafter:
    """A drafter whose layers and norms start as the target's last ones, and what fuses its inputs as the last tap."""
    head = target.lm_head_weight_VD.detach()[target_ids].clone()
    model = build_drafter(config, target.embed_weight_VD.detach().clone(), head, target_ids)
    with torch.no_grad():
        if isinstance(model.backbone, Backbone | Eagle3Backbone):
            _start_as_identity(model.backbone.fc, len(config.target_layer_ids) - 1)
        elif isinstance(model.backbone, MtpBackbone):
            _start_as_identity(model.backbone.eh_proj, 0)
        _copy_target_layers(target, config, model.backbone)
    return model


def _start_as_identity(linear: nn.Linear, part: int) -> None:
    """[D, parts * D]: small random weights, and the identity on one part of the input."""
    size = linear.out_features
    linear.weight.normal_(std=0.02 / math.sqrt(linear.in_features // size))
    linear.weight[:, part * size : (part + 1) * size] += torch.eye(size)


def _copy_target_layers(target: Target, config: DrafterConfig, backbone: nn.Module) -> None:
    first = config.num_target_layers - config.num_hidden_layers
    parameters = {_target_name(name, first): parameter for name, parameter in backbone.named_parameters()}
    for path in target.folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            for name in parameters.keys() & tensors.keys():
                _copy(tensors.get_tensor(name), parameters[name])


def _target_name(name: str, first: int) -> str:
    """Which of the target's tensors a parameter starts as; draft layer 0 comes from its layer `first`."""
    if name.startswith("midlayer."):
        return f"model.layers.{first}.{name.removeprefix('midlayer.')}"
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        return f"model.layers.{first + int(index)}.{rest}"
    return f"model.{name}"  # the final norm; other names find nothing


def _copy(source: Tensor, parameter: Tensor) -> None:
    """EAGLE-3's projections are twice as wide: the second half of their input is the hidden state."""
    if parameter.shape == source.shape:
        parameter.copy_(source)
    else:
        parameter.zero_()
        parameter[:, source.shape[1] :] = source


def adapted_drafter(target: Target, folder: Path, target_ids: Tensor | None) -> DSpark | ChainDrafter:
    """The drafter in `folder`, to train on. `target_ids` is another draft vocabulary for it; None keeps its own.

    A token that both vocabularies have keeps its row of the sequential head; a new one starts without a bias.
    """
    embedding, head = target.embed_weight_VD.detach(), target.lm_head_weight_VD.detach()
    old = load_drafter(folder, embedding, head, dtype=torch.float32)
    if target_ids is None:
        target_ids = old.target_ids
    config = dataclasses.replace(old.config, draft_vocab_size=len(target_ids))
    model = build_drafter(config, embedding.clone(), head[target_ids].clone(), target_ids)
    state = old.state_dict()
    if isinstance(model, DSpark) and model.markov_head is not None:
        bias_rows = torch.zeros_like(model.markov_head.markov_w2.weight)
        kept = torch.isin(old.target_ids, target_ids)
        bias_rows[torch.isin(target_ids, old.target_ids)] = state["markov_head.markov_w2.weight"][kept]
        state["markov_head.markov_w2.weight"] = bias_rows
    model.load_state_dict(state)
    return model
