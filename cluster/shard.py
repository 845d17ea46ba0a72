"""One rank's tensors: the target model, the drafter, and the pages of both. It obeys and never decides.

Knows models and pages; knows nothing of requests, budgets or acceptance. The drafter's context rows lie in pages of
their own that the target's block tables address, so prefix hits, preemption and rollback need no second bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from cluster.config import EngineConfig
from cluster.flat_batch import FlatBatch, Span, flatten
from cluster.kv_cache import PagedKV
from cluster.models.decoder import Decoder
from cluster.models.loader import Checkpoint, load_decoder
from drafter.checkpoint import load_checkpoint, read_config
from drafter.dspark import DSpark
from drafter.interface import Draft, Drafter, Sampler
from drafter.source import resolve_source

MAX_UNCOMMITTED_ROWS = 512
"""Rows of features that may wait to become draft context: 3 MB of a model of SmolLM2's width."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What one forward pass left behind."""

    batch: FlatBatch
    logits_MV: Tensor
    """Of the rows that were wanted, in the model's dtype."""
    features_NF: Tensor
    """The tapped layers' outputs of every row, F = K * D; F = 0 without a drafter."""


class Shard:
    """Target, drafter (if any) and their pages."""

    def __init__(self, decoder: Decoder, drafter: Drafter | None, config: EngineConfig) -> None:
        limit = decoder.config.max_position_embeddings
        if config.max_model_len > limit:
            raise ValueError(f"max_model_len is {config.max_model_len}, but the model's positions end at {limit}")
        self.decoder = decoder
        self.drafter = drafter
        self._block_size = config.kv_block_size
        self._kv = decoder.make_kv(config.num_kv_blocks, config.kv_block_size)
        self._context: PagedKV | None = None
        self._uncommitted: list[tuple[Tensor, Tensor, Tensor]] = []
        if drafter is not None:
            num_layers, num_heads, head_dim = drafter.context_shape
            self._context = PagedKV(
                num_layers, config.num_kv_blocks, self._block_size, num_heads, head_dim, decoder.dtype, decoder.device
            )

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """The models that the settings name. ValueError says what doesn't fit."""
        folder, dtype = resolve_source(config.model_source), getattr(torch, config.dtype)
        decoder = load_decoder(folder, dtype)
        # With no tokens to propose a drafter would only cost memory and the projection of its context.
        wanted = config.drafter_source is not None and config.num_speculative_tokens != 0
        drafter = _load_drafter(resolve_source(str(config.drafter_source)), decoder, folder) if wanted else None
        return cls(decoder, drafter, config)

    @property
    def num_draft_slots(self) -> int:
        """G, the drafter's block size; 0 without a drafter."""
        return self.drafter.block_size if self.drafter else 0

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def target_ids(self) -> Tensor | None:
        """[V] int64, the target id of each draft id; None when they are the same."""
        if self.drafter is None or len(self.drafter.target_ids) == self.vocab_size:
            return None
        return self.drafter.target_ids

    def draft(
        self,
        anchors: list[int],
        num_context: list[int],
        block_ids: list[list[int]],
        sampler: Sampler,
        num_slots: int,
    ) -> Draft:
        """Propose `num_slots` tokens behind each anchor, which sits at position `num_context[r]`."""
        assert self.drafter is not None
        assert self._context is not None
        self._write_context()
        positions = torch.tensor(num_context)
        num_blocks = -(-max(num_context) // self._block_size)
        tables = torch.tensor([(ids[:num_blocks] + [0] * num_blocks)[:num_blocks] for ids in block_ids])
        keys, values = self._context.read_all(tables, max(num_context))
        return self.drafter.propose(torch.tensor(anchors), positions, keys, values, positions, sampler, num_slots)

    def forward(self, spans: list[Span]) -> StepTensors:
        """One target pass over the rows of all spans; writes their keys and values."""
        batch = flatten(spans, self._block_size, self.decoder.device)
        taps = self.drafter.target_layer_ids if self.drafter else ()
        hidden_ND, features_NF = self.decoder.forward(batch, self._kv, taps)
        return StepTensors(batch, self.decoder.logits(hidden_ND[batch.logits_rows_M]), features_NF)

    def commit_features(self, forward: StepTensors, num_final: list[int]) -> None:
        """The first `num_final[r]` rows of each span are committed: they become draft context. Others never do.

        Projecting a few rows costs almost as much as projecting hundreds, so it waits until somebody drafts.
        """
        if self.drafter is None:
            return
        batch, features_NF = forward.batch, forward.features_NF
        slots_N, positions_N = batch.slots_N, batch.positions_N
        if sum(num_final) < batch.num_rows:
            counts = torch.tensor(num_final)
            ends = counts.cumsum(0)
            rows = torch.arange(int(ends[-1])) + (batch.row_starts_R1[:-1] - ends + counts).repeat_interleave(counts)
            features_NF, slots_N, positions_N = features_NF[rows], slots_N[rows], positions_N[rows]
        self._uncommitted.append((features_NF, slots_N, positions_N))
        if sum(len(slots) for _, slots, _ in self._uncommitted) >= MAX_UNCOMMITTED_ROWS:
            self._write_context()

    def _write_context(self) -> None:
        """Project what was committed since the last draft, and write it in the order in which it was committed."""
        if not self._uncommitted:
            return
        assert self.drafter is not None
        assert self._context is not None
        features, slots, positions = zip(*self._uncommitted, strict=True)
        keys, values = self.drafter.project_context(torch.cat(features), torch.cat(positions))
        sizes = [len(each) for each in slots]
        # Step by step: a block that was given back meanwhile belongs to whoever wrote it last.
        for slots_N, keys_LNHC, values_LNHC in zip(
            slots, torch.split(keys, sizes, 1), torch.split(values, sizes, 1), strict=True
        ):
            self._context.write_all(slots_N, keys_LNHC, values_LNHC)
        self._uncommitted.clear()


def _load_drafter(folder: Path, decoder: Decoder, target: Path) -> DSpark:
    num_layers, trained_for = decoder.config.num_hidden_layers, read_config(folder).num_target_layers
    if trained_for != num_layers:  # shifted taps would load, and fail silently as lost acceptance
        raise ValueError(f"{folder}: made for a target of {trained_for} layers, but this one has {num_layers}")
    head = decoder.embed_weight_VD
    if not decoder.config.tie_word_embeddings:
        with Checkpoint(target, decoder.dtype, decoder.device) as checkpoint:
            head = checkpoint.read("lm_head.weight")
    drafter = load_checkpoint(folder, decoder.embed_weight_VD, head, decoder.dtype)
    drafter.freeze()
    return drafter
