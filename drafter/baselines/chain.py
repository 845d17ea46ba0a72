"""Drafters that are chains: one causal layer feeds on its own hidden state and the token it has just drafted.

EAGLE-3 and MTP differ in what a row is made of (`ChainBackbone.start` and `fuse`); everything else is here. Row i pairs
the hidden state at position i with the token at i + 1 and predicts the token at i + 2. For committed tokens the hidden
state comes from the target; behind the anchor it is the chain's own ("training-time test": in training as well).

Shape letters: R requests, B sequences, A blocks, G block positions, T context rows, N rows, K tapped layers,
D hidden size, V draft vocabulary, L context layers, H key/value heads, C head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.config import DrafterConfig
from drafter.interface import Draft, Sampler, check_temperatures
from drafter.layers import BlockAttention, RMSNorm, RotaryTable, SwiGLU
from drafter.packing import freeze_linears


class ChainLayer(nn.Module):
    """A decoder layer whose rows and residual are handed in: they are fused from two sources."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, input_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        rows: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        block: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        hidden_rows: Tensor,
    ) -> Tensor:
        """rows [B, A, 1, input_size], residual [B, A, 1, D]; the rest as in BlockAttention.attend."""
        x = residual + self.self_attn.attend(rows, rotary, block, context, hidden_rows)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class ChainBackbone(nn.Module):
    """What EAGLE-3 and MTP have in common: one layer, a final norm, and rows made of a hidden state and a token."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.config = config
        self.midlayer = ChainLayer(config, input_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config)

    def start(self, features: Tensor) -> Tensor:
        """Target features [..., K*D] -> the hidden state [..., D] that a chain starts from."""
        raise NotImplementedError

    def fuse(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden state [..., D] and embedding of the next token [..., D] -> the layer's rows and their residual."""
        raise NotImplementedError


class ChainDrafter(nn.Module):
    """Trainable chain; satisfies drafter.interface.Drafter. Arguments as DSpark's.

    A chain starts from the last context row's hidden state, which its keys and values don't give back. So further
    "layers" of the context hold it, split over what a layer's keys and values have room for.
    """

    embed_tokens: Tensor
    lm_head: Tensor
    target_ids: Tensor
    confidence_head: None = None
    temperatures: tuple[float, ...] = ()

    def __init__(
        self,
        config: DrafterConfig,
        backbone: ChainBackbone,
        embed_weight: Tensor,
        lm_head_weight: Tensor,
        target_ids: Tensor,
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.register_buffer("embed_tokens", embed_weight, persistent=False)
        self.register_buffer("lm_head", lm_head_weight, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def context_shape(self) -> tuple[int, int, int]:
        heads, size = self.config.num_key_value_heads, self.config.head_dim
        return 1 + -(-self.config.hidden_size // (2 * heads * size)), heads, size

    def freeze(self) -> None:
        """Make it a drafter only: the weights take the form that multiplies fastest, and can't be trained or saved."""
        self.eval().requires_grad_(False)
        freeze_linears(self)

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        check_temperatures(temperatures, 0)

    def project_context(
        self, features: Tensor, positions: Tensor, next_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See drafter.interface.Drafter; this one can't do without the tokens."""
        if next_tokens is None:
            raise ValueError(f"{self.config.family} drafts from features and the tokens behind them: give next_tokens")
        hidden = self.backbone.start(features)
        rows, _ = self.backbone.fuse(hidden, self.embed_tokens[next_tokens])
        rotary = self.backbone.rotary(positions, rows.dtype)
        key, value = self.backbone.midlayer.self_attn.keys_values(rows, rotary)
        kept_keys, kept_values = self._pack(hidden)
        return torch.cat((key[None], kept_keys)), torch.cat((value[None], kept_values))

    def _pack(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] -> two of [L - 1, ..., H, C]."""
        layers, heads, size = self.context_shape
        room = 2 * (layers - 1) * heads * size
        padded = nn.functional.pad(hidden, (0, room - hidden.shape[-1]))
        keys, values = padded.view(*hidden.shape[:-1], 2, layers - 1, heads, size).movedim((-4, -3), (0, 1))
        return keys, values

    def _unpack(self, keys: Tensor, values: Tensor) -> Tensor:
        """What `_pack` packed: two of [L - 1, ..., H, C] -> [..., D]."""
        together = torch.stack((keys, values)).movedim((0, 1), (-4, -3))
        return together.flatten(-4)[..., : self.config.hidden_size]

    def teacher_forced(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """tokens [B, T], features [B, T, K*D], anchors at positions [B, A] -> h [B, A, G, D] after the final norm.

        Slot k is fed the true token at anchor + k, and the chain's own hidden state of slot k - 1.
        """
        length = tokens.shape[1]
        next_tokens = tokens.roll(-1, dims=1)  # the last one's is wrong: no block's context reaches it
        positions = torch.arange(length).expand_as(tokens)
        keys, values = self.project_context(features, positions, next_tokens)
        before = (anchors - 1).clamp_min(0)
        hidden = self.backbone.start(torch.take_along_dim(features, before[..., None], dim=1))
        walk = _Walk(self, (keys[0], values[0]), torch.arange(length) < before[..., None], before, hidden)
        fed = (anchors[..., None] + torch.arange(self.block_size)).clamp_max(length - 1)
        fed = torch.take_along_dim(tokens[:, None], fed, dim=2)
        return torch.stack([walk.step(fed[..., slot]) for slot in range(self.block_size)], dim=2)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of h [..., D]: the target's head, for the draft vocabulary."""
        return nn.functional.linear(hidden, self.lm_head)

    def slot_logits(self, base: Tensor, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("a chain has no sequential head")

    def previous_embedding(self, tokens: Tensor) -> None:
        """A chain has no sequential head."""

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
        """See drafter.interface.Drafter. The last context row starts the chain; the rows before it are its context."""
        before = (context_lengths - 1).clamp_min(0)
        index = before[None, :, None, None, None]
        last = (torch.take_along_dim(each[1:], index, dim=2)[:, :, 0] for each in (context_keys, context_values))
        hidden = self._unpack(*last) * (context_lengths > 0)[:, None]
        visible = torch.arange(context_keys.shape[2]) < before[:, None]
        walk = _Walk(
            self, (context_keys[0], context_values[0]), visible[:, None], (positions - 1)[:, None], hidden[:, None]
        )
        token = anchors
        tokens, draft_ids, probabilities = [], [], []
        for slot in range(num_slots):
            ids, probability = sampler(slot, self.base_logits(walk.step(token[:, None])[:, 0]))
            token = self.target_ids[ids]
            tokens.append(token)
            draft_ids.append(ids)
            probabilities.append(probability)
        return Draft(
            tokens=torch.stack(tokens, dim=1),
            draft_ids=torch.stack(draft_ids, dim=1),
            probabilities=torch.stack(probabilities, dim=1),
            confidences=torch.ones(len(anchors), num_slots),
        )


class _Walk:
    """Blocks on their way, slot by slot: what each has computed so far."""

    def __init__(
        self,
        drafter: ChainDrafter,
        context: tuple[Tensor, Tensor],
        visible: Tensor,
        positions: Tensor,
        hidden: Tensor,
    ) -> None:
        """context keys and values [B, T, H, C]; visible [B, A, T] bool; positions [B, A] of the first rows, and the
        hidden states [B, A, D] there."""
        self._drafter = drafter
        self._context = context
        self._hidden_rows = ~visible[:, None, :, None, :]
        self._positions = positions
        self._hidden = hidden
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, tokens: Tensor) -> Tensor:
        """Feed tokens [B, A]; h [B, A, D] after the final norm, which predicts the token after them."""
        backbone = self._drafter.backbone
        rows, residual = backbone.fuse(self._hidden, self._drafter.embed_tokens[tokens])
        limit = self._drafter.config.max_position_embeddings - 1
        rotary = backbone.rotary((self._positions + len(self._keys)).clamp(0, limit), rows.dtype)
        key, value = backbone.midlayer.self_attn.keys_values(rows, rotary)
        self._keys.append(key)
        self._values.append(value)
        block = torch.stack(self._keys, dim=2), torch.stack(self._values, dim=2)
        cos, sin = rotary
        out = backbone.midlayer(
            rows[:, :, None],
            residual[:, :, None],
            (cos[:, :, None], sin[:, :, None]),
            block,
            self._context,
            self._hidden_rows,
        )
        self._hidden = out[:, :, 0]
        normed: Tensor = backbone.norm(self._hidden)
        return normed
