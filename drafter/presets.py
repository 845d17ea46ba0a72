"""The drafters of the field as numbers: what `--preset NAME` stands for, before options change it.

All are trained on the same responses, features, anchors and slots. The losses are those of the methods, in their
noiseless form where there is a choice: cross-entropy is taken against the target's whole distribution, whose mean over
labels the cross-entropy against sampled labels only estimates. That favours the baselines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafter.config import DrafterConfig, Family, MarkovHeadType, TrainConfig, default_target_layer_ids
from drafter.target import Target

_PAPER = TrainConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Defaults of one drafter; the meaning of each number is documented where it ends up, in drafter/config.py."""

    family: Family = "block"
    num_hidden_layers: int = 2
    block_size: int = 7
    markov_rank: int = 256
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = True
    distillation_fraction: float = _PAPER.distillation_fraction
    position_decay: float = _PAPER.position_decay


_CHAIN_DECAY = -1 / math.log(0.8)  # exp(-k / this) = 0.8^k, EAGLE-3's weight of step k

PRESETS = {
    "dspark": Preset(),
    "dspark-gated": Preset(markov_head_type="gated"),
    "dspark-rnn": Preset(markov_head_type="rnn"),
    "dflash": Preset(markov_rank=0, enable_confidence_head=False, distillation_fraction=1.0),
    "dflash-l1": Preset(markov_rank=0, enable_confidence_head=False),
    "eagle3": Preset(
        family="eagle3",
        num_hidden_layers=1,
        markov_rank=0,
        enable_confidence_head=False,
        distillation_fraction=1.0,
        position_decay=_CHAIN_DECAY,
    ),
    "mtp": Preset(
        family="mtp",
        num_hidden_layers=1,
        block_size=1,
        markov_rank=0,
        enable_confidence_head=False,
        distillation_fraction=1.0,
        position_decay=_CHAIN_DECAY,
    ),
}


def preset_config(preset: Preset, target: Target, draft_vocab_size: int, mask_token_id: int) -> DrafterConfig:
    """The preset's shape at the target's widths."""
    source = target.config
    num_layers = source.num_hidden_layers
    head_dim = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    return DrafterConfig(
        family=preset.family,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=preset.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=source.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_target_layers=num_layers,
        # MTP goes on from where the target ended.
        target_layer_ids=(num_layers - 1,) if preset.family == "mtp" else default_target_layer_ids(num_layers),
        block_size=preset.block_size,
        mask_token_id=mask_token_id,
        markov_rank=preset.markov_rank,
        markov_head_type=preset.markov_head_type,
        enable_confidence_head=preset.enable_confidence_head,
        rms_norm_eps=source.rms_norm_eps,
        rope_theta=source.rope_parameters["rope_theta"],
        max_position_embeddings=source.max_position_embeddings,
    )
