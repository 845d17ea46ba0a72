"""One rank's tensors: its part of the target model, the drafter, and the pages of both. It obeys and never decides.

The leader of a replica (tensor-parallel rank 0) is driven by an engine; the other ranks `follow` it: each `forward` of
the leader sends one StepPlan, and they run the same pass over their parts. Under data parallelism the leaders first
agree how many rows each of them has, so that all replicas pass the experts together, those without rows as well.

The drafter is the leader's alone. Hidden states are the same on all ranks of a replica, so the leader has every feature
and drafting needs no collective; what it drew goes out as tokens of the next plan. For this the leader holds the
embedding (and the drafter's rows of the head) once more, whole.

Knows models, pages and the mesh; knows nothing of requests, budgets or acceptance. The drafter's context rows lie in
pages of their own that the target's block tables address, so prefix hits, preemption and rollback need no second
bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from cluster.config import EngineConfig
from cluster.flat_batch import FlatBatch, flatten
from cluster.kv_cache import PagedKV
from cluster.mesh import Mesh
from cluster.messages import GroupError, Lockstep, Span, StepPlan
from cluster.models.decoder import Decoder
from cluster.models.loader import Checkpoint, load_decoder
from cluster.moe import measure_crossover
from drafter.baselines.chain import ChainDrafter
from drafter.checkpoint import load_drafter, read_config
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
    is_largest: bool
    """No replica of the group had more rows: the pass lasted as long as this one needed."""


IDLE_SECONDS_REPLICAS = 0.005
"""How long a replica without work may keep the others waiting for its part in their steps."""
STOP = -1
"""What a replica that leaves says instead of a number of rows."""


class Shard:
    """Target, drafter (if any) and their pages."""

    def __init__(
        self, decoder: Decoder, drafter: Drafter | None, config: EngineConfig, mesh: Mesh | None = None
    ) -> None:
        limit = decoder.config.max_position_embeddings
        if config.max_model_len > limit:
            raise ValueError(f"max_model_len is {config.max_model_len}, but the model's positions end at {limit}")
        self.decoder = decoder
        self.drafter = drafter
        self.mesh = mesh or Mesh()
        self.exchange_from_rows: int | None = None
        """Rows of the whole group from which on they travel to their experts; see cluster/moe.py."""
        self._block_size = config.kv_block_size
        self._kv = decoder.make_kv(config.num_kv_blocks, config.kv_block_size)
        self._context: PagedKV | None = None
        self._uncommitted: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        if drafter is not None:
            num_layers, num_heads, head_dim = drafter.context_shape
            self._context = PagedKV(
                num_layers, config.num_kv_blocks, self._block_size, num_heads, head_dim, decoder.dtype, decoder.device
            )

    @classmethod
    def load(cls, config: EngineConfig, mesh: Mesh | None = None) -> Self:
        """This rank's part of the models that the settings name. All ranks of a group load at the same time.

        ValueError says what doesn't fit; GroupError, that a rank is lost.
        """
        mesh = mesh or Mesh()
        # With no tokens to propose a drafter would only cost memory and the projection of its context.
        wanted = mesh.leads and config.drafter_source is not None and config.num_speculative_tokens != 0
        if wanted:  # what would be for nothing if it was found out later
            _check_drafter(config, mesh)
        folder, dtype = resolve_source(config.model_source), getattr(torch, config.dtype)
        decoder = load_decoder(folder, dtype, mesh.device, mesh)
        drafter = None
        if wanted:
            drafter = _load_drafter(resolve_source(str(config.drafter_source)), decoder, folder, mesh)
            if config.max_model_len > drafter.config.max_position_embeddings:
                raise ValueError(
                    f"max_model_len is {config.max_model_len}, but the drafter's positions end at "
                    f"{drafter.config.max_position_embeddings}"
                )
            drafter.freeze()
        shard = cls(decoder, drafter, config, mesh)
        mesh.meet()  # a rank may load for longer than any later step may take
        if moe_layers := list(decoder.moe_layers.values()):
            shard.exchange_from_rows = measure_crossover(moe_layers[0], decoder.config.hidden_size, decoder.dtype, mesh)
        return shard

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

    @property
    def temperatures(self) -> tuple[float, ...]:
        """See drafter.interface.Drafter; empty without a drafter."""
        return self.drafter.temperatures if self.drafter else ()

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        """Confidences of the next drafts follow these. Only the leader's drafter has any."""
        assert self.drafter is not None
        self.drafter.calibrate(temperatures)

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

    @property
    def idle_seconds(self) -> float | None:
        """How long the engine may go without a step when it has no work; None: for ever.

        A step without work is what the other replicas wait for to make theirs, and what tells the ranks that follow
        that their leader lives.
        """
        if self.mesh.size == 1:
            return None
        return IDLE_SECONDS_REPLICAS if self.mesh.dp_size > 1 else self.mesh.timeout_seconds / 4

    @property
    def expert_load(self) -> dict[int, list[int]]:
        """By layer that has experts: how often this rank has chosen each of them so far."""
        return {layer: moe.load_E.tolist() for layer, moe in self.decoder.moe_layers.items()}

    def forward(self, spans: list[Span]) -> StepTensors | None:
        """One target pass over the rows of all spans; writes their keys and values. None without spans.

        In a group, without spans as well: see `idle_seconds`. Only leaders call it. Raises GroupError when a rank is
        lost or a replica has left.
        """
        plan = self._agree(spans)
        self.mesh.send(plan)
        return self._run(plan)

    def follow(self) -> None:
        """Obey the leader's plans until it stops, in order. Raises GroupError when the group is lost."""
        while (plan := self.mesh.receive()) is not None:
            self._run(plan)

    def stop(self) -> None:
        """End the group in order: `follow` returns on the ranks of this replica, and other replicas get GroupError."""
        self.mesh.agree(STOP)
        self.mesh.send(None)
        self.mesh.leave()

    def _agree(self, spans: list[Span]) -> StepPlan:
        num_rows = self.mesh.agree(sum(len(span.token_ids) for span in spans))
        if STOP in num_rows:
            self.mesh.send(None)
            raise GroupError(f"replica {num_rows.index(STOP)} of the group was stopped")
        exchange = self.exchange_from_rows is not None and sum(num_rows) >= self.exchange_from_rows
        return StepPlan(tuple(spans), Lockstep(num_rows, exchange))

    def _run(self, plan: StepPlan) -> StepTensors | None:
        if not plan.spans:
            if any(plan.lockstep.num_rows):
                self.decoder.join(plan.lockstep)
            return None
        batch = flatten(plan.spans, self._block_size, self.decoder.device)
        taps = self.drafter.target_layer_ids if self.drafter else ()
        hidden_ND, features_NF = self.decoder.forward(batch, self._kv, taps, plan.lockstep)
        logits_MV = self.decoder.logits(hidden_ND[batch.logits_rows_M])
        # Decisions are made on the CPU, wherever the model is; only the leader makes any.
        is_largest = len(batch.tokens_N) == max(plan.lockstep.num_rows)
        return StepTensors(batch, logits_MV.cpu() if self.mesh.leads else logits_MV, features_NF, is_largest)

    def commit_features(self, forward: StepTensors, num_final: list[int], next_tokens: list[int]) -> None:
        """The first `num_final[r]` rows of each span are committed: they become draft context. Others never do.

        next_tokens[r]: the token behind the last of them. A block of context that several requests share was written
        for one of them, so to the others that one token of its last row may be wrong: a draft less good, no more.

        Projecting a few rows costs almost as much as projecting hundreds, so it waits until somebody drafts.
        """
        if self.drafter is None:
            return
        batch, features_NF = forward.batch, forward.features_NF
        slots_N, positions_N = batch.slots_N, batch.positions_N
        counts = torch.tensor(num_final)
        next_N = batch.tokens_N.roll(-1)
        next_N[batch.row_starts_R1[:-1] + counts - 1] = torch.tensor(next_tokens)
        if sum(num_final) < batch.num_rows:
            ends = counts.cumsum(0)
            rows = torch.arange(int(ends[-1])) + (batch.row_starts_R1[:-1] - ends + counts).repeat_interleave(counts)
            features_NF, slots_N, positions_N, next_N = (x[rows] for x in (features_NF, slots_N, positions_N, next_N))
        self._uncommitted.append((features_NF, slots_N, positions_N, next_N))
        if sum(len(slots) for _, slots, _, _ in self._uncommitted) >= MAX_UNCOMMITTED_ROWS:
            self._write_context()

    def _write_context(self) -> None:
        """Project what was committed since the last draft, and write it in the order in which it was committed."""
        if not self._uncommitted:
            return
        assert self.drafter is not None
        assert self._context is not None
        features, slots, positions, next_tokens = zip(*self._uncommitted, strict=True)
        keys, values = self.drafter.project_context(torch.cat(features), torch.cat(positions), torch.cat(next_tokens))
        sizes = [len(each) for each in slots]
        # Step by step: a block that was given back meanwhile belongs to whoever wrote it last.
        for slots_N, keys_LNHC, values_LNHC in zip(
            slots, torch.split(keys, sizes, 1), torch.split(values, sizes, 1), strict=True
        ):
            self._context.write_all(slots_N, keys_LNHC, values_LNHC)
        self._uncommitted.clear()


def _check_drafter(config: EngineConfig, mesh: Mesh) -> None:
    """ValueError where no target could make this drafter useful."""
    if mesh.device.type != "cpu":
        raise ValueError("drafter_source: drafting on GPUs is not supported yet; leave it out for plain decoding")
    has_confidence = read_config(resolve_source(str(config.drafter_source))).enable_confidence_head
    if config.speculation == "scheduled" and not has_confidence:
        raise ValueError("speculation: 'scheduled' needs a drafter_source with a confidence head; set it to 'fixed'")


def _load_drafter(folder: Path, decoder: Decoder, target: Path, mesh: Mesh) -> DSpark | ChainDrafter:
    num_layers, trained_for = decoder.config.num_hidden_layers, read_config(folder).num_target_layers
    if trained_for != num_layers:  # shifted taps would load, and fail silently as lost acceptance
        raise ValueError(f"{folder}: made for a target of {trained_for} layers, but this one has {num_layers}")
    embedding = head = decoder.embedding.weight_VD
    with Checkpoint(target, decoder.dtype, decoder.device) as checkpoint:
        if mesh.tp_size > 1:  # the target has only a part of it
            embedding = head = checkpoint.read("model.embed_tokens.weight").clone()
        if not decoder.config.tie_word_embeddings:
            head = checkpoint.read("lm_head.weight")
        return load_drafter(folder, embedding, head, decoder.dtype)
