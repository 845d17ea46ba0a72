"""The DSpark drafter: backbone + sequential head + confidence head, to train and to draft with.

`DSpark` is the module whose parameters carry the public checkpoint's names; `propose` makes it a `Drafter`.
The target's embedding and output head are handed in frozen. Files are drafter/checkpoint.py's business.

Shape letters: R requests, B sequences, A anchors, G block positions, M blocks, D hidden size, V draft vocabulary,
T context rows, K tapped layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.backbone import Backbone
from drafter.config import DrafterConfig
from drafter.frozen import FrozenBackbone
from drafter.heads import ConfidenceHead, build_markov_head
from drafter.interface import Draft, Sampler, check_temperatures
from drafter.packing import FrozenLinear, freeze_linears


class DSpark(nn.Module):
    """Trainable drafter; satisfies drafter.interface.Drafter.

    embed_weight [vocab_size, D] and lm_head_weight [V, D] (the rows of `target_ids`) are the target's, frozen.
    target_ids [V] int64, strictly increasing: the target id of each draft id.
    """

    embed_tokens: Tensor
    lm_head: Tensor
    target_ids: Tensor
    sts_temperatures: Tensor

    def __init__(self, config: DrafterConfig, embed_weight: Tensor, lm_head_weight: Tensor, target_ids: Tensor) -> None:
        super().__init__()
        if target_ids.shape != (config.draft_vocab_size,):
            raise ValueError(f"target_ids must have shape ({config.draft_vocab_size},), got {tuple(target_ids.shape)}")
        if lm_head_weight.shape != (config.draft_vocab_size, config.hidden_size):
            raise ValueError(
                f"lm_head_weight must have shape ({config.draft_vocab_size}, {config.hidden_size}), "
                f"got {tuple(lm_head_weight.shape)}"
            )
        if not torch.all(target_ids[1:] > target_ids[:-1]):
            raise ValueError("target_ids must be strictly increasing")
        self.config = config
        self.backbone = Backbone(config)
        self.markov_head = build_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.register_buffer("embed_tokens", embed_weight, persistent=False)
        self.register_buffer("lm_head", lm_head_weight, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.register_buffer("sts_temperatures", torch.ones(config.block_size), persistent=False)
        self._frozen_backbone: FrozenBackbone | None = None
        self._frozen_head: FrozenLinear | None = None

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def context_shape(self) -> tuple[int, int, int]:
        return self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(self.sts_temperatures.tolist()) if self.confidence_head is not None else ()

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        check_temperatures(temperatures, len(self.temperatures))
        self.sts_temperatures = torch.tensor(temperatures, device=self.sts_temperatures.device)

    def freeze(self) -> None:
        """Make it a drafter only: the weights take the form that multiplies fastest, and can't be trained or saved."""
        self.eval().requires_grad_(False)
        self._frozen_backbone = FrozenBackbone(self.backbone)
        del self.backbone  # its weights are packed now
        freeze_linears(self)
        self._frozen_head = FrozenLinear(self.lm_head)

    def project_context(
        self, features: Tensor, positions: Tensor, next_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Target features [..., K*D] at positions [...] -> context keys and values [L, ..., H, C]; no token is read."""
        return (self._frozen_backbone or self.backbone).project_context(features, positions)

    def hidden(
        self, anchors: Tensor, positions: Tensor, context_keys: Tensor, context_values: Tensor, visible: Tensor
    ) -> Tensor:
        """Anchor tokens [B, A] at positions [B, A] -> h [B, A, G, D]. Context and `visible` as in Backbone.forward."""
        blocks = anchors[..., None].expand(*anchors.shape, self.block_size).clone()
        blocks[..., 1:] = self.config.mask_token_id
        embedded = self.embed_tokens[blocks]
        backbone = self._frozen_backbone or self.backbone
        out: Tensor = backbone(embedded, positions, context_keys, context_values, visible)
        return out

    def base_logits(self, hidden: Tensor) -> Tensor:
        """U [..., V] of h [..., D]: the target's head, for the draft vocabulary."""
        if self._frozen_head is not None:
            return self._frozen_head(hidden)
        return nn.functional.linear(hidden, self.lm_head)

    def slot_logits(self, base: Tensor, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """base U_k [M, V], hidden h_k [M, D], previous W1[x_{k-1}] [M, r] -> (U_k + B_k [M, V], next state)."""
        if self.markov_head is None:
            return base, state
        bias, state = self.markov_head.bias(previous, hidden, state)
        return base + bias, state

    def previous_embedding(self, tokens: Tensor) -> Tensor | None:
        """W1[x] [M, r] of target ids [M]; None without a sequential head."""
        if self.markov_head is None:
            return None
        out: Tensor = self.markov_head.markov_w1(tokens)
        return out

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        context_lengths: Tensor,
        sampler: Sampler,
        num_slots: int,
    ) -> Draft:
        """See drafter.interface.Drafter. The block always has G inputs, as in training; only `num_slots` are drawn."""
        rows = torch.arange(context_keys.shape[2], device=anchors.device)
        visible = rows < context_lengths[:, None]
        hidden = self.hidden(anchors[:, None], positions[:, None], context_keys, context_values, visible[:, None])[
            :, 0, :num_slots
        ]
        return self._draw(anchors, hidden, self.base_logits(hidden), sampler)

    def _draw(self, anchors: Tensor, hidden: Tensor, base: Tensor, sampler: Sampler) -> Draft:
        """The sequential part: hidden [R, num_slots, D] and base logits [R, num_slots, V], left to right."""
        token = anchors
        state = hidden.new_zeros(len(anchors), self.config.markov_rank)
        tokens, draft_ids, probabilities, previous_tokens = [], [], [], []
        for slot in range(hidden.shape[1]):
            previous_tokens.append(token)
            logits = base[:, slot]
            previous = self.previous_embedding(token)
            if previous is not None:
                logits, state = self.slot_logits(logits, hidden[:, slot], previous, state)
            ids, probability = sampler(slot, logits)
            token = self.target_ids[ids]
            tokens.append(token)
            draft_ids.append(ids)
            probabilities.append(probability)
        return Draft(
            tokens=torch.stack(tokens, dim=1),
            draft_ids=torch.stack(draft_ids, dim=1),
            probabilities=torch.stack(probabilities, dim=1),
            confidences=self._confidences(hidden, torch.stack(previous_tokens, dim=1)),
        )

    def _confidences(self, hidden: Tensor, previous_tokens: Tensor) -> Tensor:
        """Calibrated c [R, num_slots] fp32 of h [R, num_slots, D] and the tokens before each slot."""
        if self.confidence_head is None:
            return torch.ones(hidden.shape[:2], device=hidden.device)
        logits = self.confidence_head(hidden, self.previous_embedding(previous_tokens))
        return torch.sigmoid(logits / self.sts_temperatures[: hidden.shape[1]])
