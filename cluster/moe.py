"""A mixture of experts over all ranks of a group: who computes a row (route), and how it gets there and back (MoE).

Each rank holds whole experts, num_experts / world of them. Rows reach them in one of two exact forms:

- gathered: every rank computes its experts' terms for all rows of all replicas, and the terms are summed. Collectives:
  all_gather and reduce_scatter among the replicas (none with one replica), then the all_reduce that a dense layer has
  as well. No shape depends on a value. Best for few rows.
- exchanged: a row travels to the ranks of its experts only, and back. Three all_to_alls (how many, rows, results) and
  the same all_reduce. The ranks of a replica hold the same rows, so each sends an even share of them: a row's way is
  decided by exactly one rank. Best for many rows.

Knows rows, weights and ranks; knows nothing of sequences or model families.

Shape letters: N rows of this replica, T rows of all replicas, D hidden size, E experts, K experts of one row, L experts
of this rank, W ranks, S (row, expert) pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.layers import ReadWeight, SwiGLU
from cluster.mesh import Mesh
from cluster.messages import Lockstep

CROSSOVER_SIZES = (16, 64, 256, 1024)
"""Rows of each replica at which the two forms are timed."""
CROSSOVER_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The experts of a layer, and how a row is given its own."""

    num_experts: int
    num_experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    """Whether the weights of a row's experts are made to sum to 1."""
    num_groups: int = 1
    num_groups_kept: int = 1
    """Only experts of the best groups are eligible, a group being as good as its two best experts together."""
    scaling: float = 1.0
    """Factor of all weights."""
    corrected: bool = False
    """Whether a learnt bias (e_score_correction_bias) is added to the scores, for ranking only."""
    shared: bool = False
    """Whether there is an expert that every row passes, whose output is added."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(f"num_experts_per_token must lie in 1..{self.num_experts}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts can't be divided into {self.num_groups} groups")


def route(logits_NE: Tensor, config: MoEConfig, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Router logits [N, E] fp32 -> weights [N, K] fp32 and experts [N, K] int64, best first.

    Mixtral, Qwen3-MoE: softmax; DeepSeek-V3: sigmoid, corrected, grouped, scaled (arXiv:2412.19437, section 2.1.2).
    """
    scores_NE = logits_NE.sigmoid() if config.scoring == "sigmoid" else logits_NE.softmax(-1)
    ranked_NE = scores_NE if correction_E is None else scores_NE + correction_E
    if config.num_groups > 1:
        grouped = ranked_NE.view(-1, config.num_groups, config.num_experts // config.num_groups)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.num_groups_kept, dim=-1).indices
        dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=grouped.device).scatter_(1, best, False)
        ranked_NE = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    experts_NK = ranked_NE.topk(config.num_experts_per_token, dim=-1).indices
    weights_NK = scores_NE.gather(1, experts_NK)
    if config.normalize:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return weights_NK * config.scaling, experts_NK


class MoE:
    """One layer's router, this rank's experts, and this rank's part of the shared expert."""

    def __init__(self, read: ReadWeight, name: str, config: MoEConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._local = mesh.experts(config.num_experts)
        # In fp32: a small product whose rounding would move rows to other experts.
        self._router_ED = read(f"{name}.gate.weight", dtype=torch.float32).clone()
        self._correction_E: Tensor | None = None
        if config.corrected:
            self._correction_E = read(f"{name}.gate.e_score_correction_bias", dtype=torch.float32).clone()
        self._experts = [SwiGLU(read, f"{name}.experts.{expert}", Mesh()) for expert in self._local]
        self._shared = SwiGLU(read, f"{name}.shared_experts", mesh) if config.shared else None
        self.load_E = torch.zeros(config.num_experts, dtype=torch.int64, device=self._router_ED.device)
        """How often this rank has chosen each expert so far: for all rows of the group in the gathered form, for its
        share of its replica's in the exchanged one."""

    def __call__(self, x_ND: Tensor, lockstep: Lockstep) -> Tensor:
        """[N, D] -> [N, D]; N may be 0 as long as some replica has a row."""
        partial_ND = self._exchanged(x_ND) if lockstep.exchange else self._gathered(x_ND, lockstep.num_rows)
        if self._shared is not None:
            partial_ND += self._shared.partial(x_ND)
        return self._mesh.all_reduce(partial_ND) if len(x_ND) else partial_ND

    def _route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        return route(F.linear(x_ND.float(), self._router_ED), self._config, self._correction_E)

    def _by_expert(self, experts_NK: Tensor) -> tuple[Tensor, list[int]]:
        """The (row, expert) pairs [S = N * K] in order of their experts, and how many each expert has."""
        flat_S = experts_NK.flatten()
        counts_E = torch.bincount(flat_S, minlength=self._config.num_experts)
        self.load_E += counts_E
        return flat_S.argsort(stable=True), counts_E.tolist()

    def _gathered(self, x_ND: Tensor, num_rows: Sequence[int]) -> Tensor:
        """[N, D] -> this rank's term of the replica's sum."""
        most = max(num_rows)
        whole = min(num_rows) == most  # else the shorter batches are padded, and what is padded is left out again
        padded = x_ND if len(x_ND) == most else F.pad(x_ND, (0, 0, 0, most - len(x_ND)))
        rows_TD = self._mesh.all_gather(padded)
        terms_TD = torch.zeros_like(rows_TD)
        real_T = None if whole else _real_rows(num_rows, x_ND.device)
        weights_TK, experts_TK = self._route(rows_TD if real_T is None else rows_TD[real_T])
        order_S, counts_E = self._by_expert(experts_TK)
        first = sum(counts_E[: self._local.start])
        counts_L = counts_E[self._local.start : self._local.stop]
        mine_S = order_S[first : first + sum(counts_L)]
        row_S = mine_S // self._config.num_experts_per_token
        if real_T is not None:
            row_S = real_T[row_S]
        results_SD = self._compute(rows_TD[row_S], counts_L)
        terms_TD.index_add_(0, row_S, results_SD * weights_TK.flatten()[mine_S, None].to(results_SD.dtype))
        return self._mesh.reduce_scatter(terms_TD)[: len(x_ND)]

    def _exchanged(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> the finished rows of this rank's share, and zeros for the rest of its replica's."""
        mesh, num_rows = self._mesh, len(x_ND)
        share = slice(num_rows * mesh.tp_rank // mesh.tp_size, num_rows * (mesh.tp_rank + 1) // mesh.tp_size)
        weights_NK, experts_NK = self._route(x_ND[share])
        order_S, counts_E = self._by_expert(experts_NK)
        row_S = order_S // self._config.num_experts_per_token
        num_local = len(self._local)
        sent_WL = torch.tensor(counts_E, device=x_ND.device).view(mesh.size, num_local)
        arriving_WL = mesh.all_to_all(sent_WL, [1] * mesh.size, [1] * mesh.size)
        num_sent, num_arriving = sent_WL.sum(1).tolist(), arriving_WL.sum(1).tolist()
        arrived_SD = mesh.all_to_all(x_ND[share][row_S], num_sent, num_arriving)
        # They come rank by rank, each rank's in order of the experts.
        experts_L = torch.arange(num_local, device=x_ND.device)
        by_expert_S = experts_L.repeat(mesh.size).repeat_interleave(arriving_WL.flatten()).argsort(stable=True)
        results_SD = torch.empty_like(arrived_SD)
        results_SD[by_expert_S] = self._compute(arrived_SD[by_expert_S], arriving_WL.sum(0).tolist())
        returned_SD = mesh.all_to_all(results_SD, num_arriving, num_sent)
        finished_ND = torch.zeros_like(x_ND)
        weighted_SD = returned_SD * weights_NK.flatten()[order_S, None].to(returned_SD.dtype)
        finished_ND[share].index_add_(0, row_S, weighted_SD)
        return finished_ND

    def _compute(self, rows_SD: Tensor, counts_L: list[int]) -> Tensor:
        """Rows in order of this rank's experts, counts_L[i] of the i-th -> their outputs."""
        parts = zip(self._experts, torch.split(rows_SD, counts_L), strict=True)
        results = [expert(rows) for expert, rows in parts if len(rows)]
        return torch.cat(results) if results else rows_SD


def _real_rows(num_rows: Sequence[int], device: torch.device) -> Tensor:
    """Indices of the rows that aren't padding, where each replica's are padded to the most."""
    most = max(num_rows)
    return torch.cat([torch.arange(most * i, most * i + count, device=device) for i, count in enumerate(num_rows)])


def moe_plain(
    x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """The plain twin of `MoE`: every expert computes every row, and most of it is multiplied by 0."""
    result_ND = torch.zeros_like(x_ND)
    for index, expert in enumerate(experts):
        weight_N = (weights_NK * (experts_NK == index)).sum(-1)
        result_ND += weight_N[:, None].to(x_ND.dtype) * expert(x_ND)
    return result_ND


@torch.inference_mode()
def measure_crossover(
    layer: MoE, hidden_size: int, dtype: torch.dtype, mesh: Mesh, clock: Callable[[], float] = time.perf_counter
) -> int | None:
    """From how many rows of the whole group on the exchanged form is the faster one here; None: not in the range timed.

    Every rank calls it; rank 0's clock decides. With one replica nothing is gathered, so nothing could be saved.
    """
    if mesh.dp_size == 1:
        return None
    crossover = 0
    for size in reversed(CROSSOVER_SIZES):
        x_ND = torch.randn(size, hidden_size, device=mesh.device).to(dtype)
        num_rows = (size,) * mesh.dp_size
        seconds = []
        for exchange in (False, True):
            times = []
            for _ in range(CROSSOVER_REPEATS):
                started = clock()
                layer(x_ND, Lockstep(num_rows, exchange)).sum().item()  # reading it waits for the device
                times.append(clock() - started)
            seconds.append(min(times))
        if mesh.decide(int(seconds[1] >= seconds[0])):
            break
        crossover = size * mesh.dp_size
    layer.load_E.zero_()
    return crossover or None
