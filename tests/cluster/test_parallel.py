"""The target split over real processes (gloo) against one process and against Hugging Face, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import torch
from rank_jobs import BLOCK, Steps, make_config
from ranks import JobError, Ranks
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cluster.config import ParallelConfig
from cluster.mesh import Mesh, bundles_by_node
from cluster.messages import Span
from cluster.models.decoder import Decoder
from cluster.models.loader import Checkpoint, load_decoder, read_config
from cluster.shard import Shard

pytestmark = pytest.mark.dist

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 12, "num_experts_per_tok": 3}


def family_config(family: str, num_kv_heads: int) -> PretrainedConfig:
    sizes = {**SIZES, "num_key_value_heads": num_kv_heads}
    if family == "llama":
        return LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    if family == "qwen2":
        return Qwen2Config(**sizes, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True)
    if family == "mixtral":
        return MixtralConfig(**sizes, **EXPERTS, sliding_window=None)
    if family == "deepseek_v3":
        return DeepseekV3Config(
            **sizes,
            **EXPERTS,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            q_lora_rank=18,
            kv_lora_rank=20,
            qk_nope_head_dim=10,
            qk_rope_head_dim=6,
            v_head_dim=9,
            num_nextn_predict_layers=0,
        )
    return Qwen3MoeConfig(
        **sizes, **EXPERTS, head_dim=8, moe_intermediate_size=20, norm_topk_prob=True, mlp_only_layers=[1]
    )


@dataclass
class Row:
    """Where a step's span comes from: the whole sequence, and the rows of it."""

    tokens: list[int]
    start: int
    end: int
    blocks: list[int]

    @property
    def span(self) -> Span:
        return Span(self.tokens[self.start : self.end], self.start, self.blocks, self.end - self.start)


def scenario() -> list[list[list[Row]]]:
    """Steps of two replicas: prompt chunks, single rows, rows to verify, a shared prefix, and idleness on each side."""
    tokens = torch.randint(3, SIZES["vocab_size"], (5, 32), generator=torch.Generator().manual_seed(1)).tolist()
    tokens[2] = tokens[0][: 2 * BLOCK] + tokens[2][2 * BLOCK :]
    blocks = [list(range(10 * i, 10 * i + 8)) for i in range(5)]
    blocks[2] = blocks[0][:2] + blocks[2][2:]

    def row(sequence: int, start: int, end: int) -> Row:
        return Row(tokens[sequence], start, end, blocks[sequence])

    return [
        [[row(0, 0, 9), row(1, 0, 5)], []],
        [[row(0, 9, 20), row(1, 5, 6)], [row(3, 0, 12)]],
        [[row(0, 20, 24), row(1, 6, 10), row(2, 2 * BLOCK, 19)], [row(3, 12, 13)]],
        [[], [row(3, 13, 17), row(4, 0, 30)]],
        [[], []],
        [[row(1, 10, 11)], [row(4, 30, 31)]],
    ]


class Family:
    """One family's random weights, saved, with what one process and Hugging Face compute of the scenario."""

    def __init__(self, config: PretrainedConfig, folder: Path) -> None:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():  # fresh norms are all ones and fresh biases all zeros: a bug there would not show
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
        model.save_pretrained(folder)
        self.folder = folder
        self.rows = scenario()
        self.steps: Steps = [[[row.span for row in rows] for rows in step] for step in self.rows]
        self.one_process = [self._alone(replica) for replica in range(2)]
        self.hugging_face = [[self._expected(model, step[replica]) for step in self.rows] for replica in range(2)]

    def _alone(self, replica: int) -> list[Tensor | None]:
        shard = Shard(load_decoder(self.folder, torch.float32), None, make_config(self.folder))
        results = [shard.forward(step[replica]) for step in self.steps]
        return [None if result is None else result.logits_MV for result in results]

    @torch.no_grad()
    def _expected(self, model: PreTrainedModel, rows: list[Row]) -> Tensor | None:
        parts = [model(torch.tensor([row.tokens[: row.end]])).logits[0, row.start :] for row in rows]
        return torch.cat(parts) if parts else None


_families: dict[tuple[str, int], Family] = {}


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """`request.param`: (family, key/value heads)."""
    if request.param not in _families:
        _families[request.param] = Family(family_config(*request.param), tmp_path_factory.mktemp("model"))
    return _families[request.param]


def close(actual: list[Tensor | None], expected: list[Tensor | None], tolerance: float) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        if theirs is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("nodes", "tp", "dealt"),
    [
        ("aabb", 2, [[0, 1], [2, 3]]),
        ("abab", 2, [[0, 1], [2, 3]]),  # leaders on one node: somebody's neighbour is elsewhere in any case
        ("abba", 2, [[0, 3], [2, 1]]),
        ("baab", 2, [[0, 3], [2, 1]]),  # by node alone, each would get the other one's
        ("abcabc", 3, [[0, 1, 4], [3, 2, 5]]),
        ("aabbab", 3, [[0, 1, 4], [3, 2, 5]]),
        ("abc", 1, [[0], [1], [2]]),
    ],
)
def test_ranks_of_a_replica_share_a_node_where_they_can(nodes: str, tp: int, dealt: list[list[int]]) -> None:
    assert bundles_by_node(list(nodes), tp) == dealt


def test_collectives(ranks: Ranks) -> None:
    whole = ranks.run(2, 2, rank_jobs.collectives)
    for rank, results in enumerate(whole):
        replica, tp_rank = divmod(rank, 2)
        reduced, gathered, rows, scattered, exchanged, agreed, decided, empty, short, long = results
        assert reduced.tolist() == [[4.0 * replica + 1]] * 2
        assert gathered.tolist() == ([[2.0 * replica, 2.0 * replica + 1]] * 2 if tp_rank == 0 else [[rank]] * 2)
        assert rows.flatten().tolist() == [tp_rank, tp_rank, tp_rank + 2, tp_rank + 2]
        assert scattered.flatten().tolist() == [2 * (2 * replica + i) + 2 * tp_rank + 2 for i in range(2)]
        assert exchanged.flatten().tolist() == [source for source in range(4) for _ in range(rank + 1)]
        assert agreed == ((10, 11) if tp_rank == 0 else None)
        assert decided == 7
        assert empty == ((0, 4) if tp_rank == 0 else (0, 2))
        assert short == "short"
        assert long == list(range(30000))


# Three key/value heads over three ranks, else two, which four ranks hold twice.
DENSE = [("llama", 2), ("qwen3", 2)]
MOE = [("mixtral", 2), ("qwen3_moe", 2), ("deepseek_v3", 12)]
SHAPES = [(1, 2), (1, 4), (2, 1), (2, 2)]
CASES = [
    *((family, dp, tp, False) for family in DENSE for dp, tp in SHAPES),
    *((family, dp, tp, exchange) for family in MOE for dp, tp in SHAPES for exchange in (False, True)),
    *(((name, 3), 1, 3, name == "mixtral") for name in ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")),
    (("deepseek_v3", 12), 1, 3, True),
]


@pytest.mark.parametrize(("family", "dp", "tp", "exchange"), CASES, indirect=["family"])
def test_logits_equal_one_process_and_hugging_face(
    ranks: Ranks, family: Family, dp: int, tp: int, exchange: bool
) -> None:
    results = ranks.run(dp, tp, rank_jobs.forwards, family.folder, family.steps, exchange)
    for replica in range(dp):
        leader, *followers = results[replica * tp : (replica + 1) * tp]
        close(leader, family.one_process[replica], 1e-4)
        close(leader, family.hugging_face[replica], 1e-3)
        assert not any(followers)


@pytest.mark.parametrize("family", [("qwen3_moe", 2)], indirect=True)
def test_choices_of_experts_are_counted_by_layer(family: Family) -> None:
    shard = Shard(load_decoder(family.folder, torch.float32), None, make_config(family.folder))
    for step in family.steps:
        shard.forward(step[0])
    num_rows = sum(row.end - row.start for step in family.rows for row in step[0])
    load = shard.expert_load
    assert load.keys() == {0, 2}, "layer 1 has none"
    assert {sum(counts) for counts in load.values()} == {num_rows * EXPERTS["num_experts_per_tok"]}
    assert all(len(counts) == EXPERTS["num_local_experts"] for counts in load.values())


@pytest.mark.parametrize("family", [("llama", 2), ("qwen3", 2), ("mixtral", 2)], indirect=True)
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_a_rank_reads_only_its_share(family: Family, dp: int, tp: int) -> None:
    """Matrices are read once by every replica, experts once by the whole group, and only norms are everybody's."""
    parallel = ParallelConfig(data_parallel_size=dp, tensor_parallel_size=tp)
    config = read_config(family.folder)

    def elements(mesh: Mesh) -> tuple[int, int]:
        """(of experts, of other matrices)"""
        counts = [0, 0]
        with Checkpoint(family.folder, torch.float32, "cpu") as checkpoint:

            def read(name: str, *part: Any, **dtype: Any) -> Tensor:
                tensor = checkpoint.read(name, *part, **dtype)
                if tensor.dim() > 1 and "k_proj" not in name and "v_proj" not in name and "gate.weight" not in name:
                    counts[".experts." not in name] += tensor.numel()
                return tensor

            Decoder(read, config, mesh)
        return counts[0], counts[1]

    whole = elements(Mesh())
    for rank in range(parallel.world_size):
        experts, others = elements(Mesh(parallel, rank))
        assert experts * dp * tp == whole[0]
        assert others * tp == whole[1]


@pytest.mark.parametrize("family", [("mixtral", 2)], indirect=True)
@pytest.mark.parametrize(
    ("dp", "tp", "message"),
    [
        (1, 8, "12 attention heads can't be divided over 8 tensor-parallel ranks"),
        (1, 3, "2 key/value heads can't be divided over 3 tensor-parallel ranks, nor each replicated"),
        (5, 1, r"12 experts can't be divided over 5 ranks \(data_parallel_size 5 x tensor_parallel_size 1\)"),
    ],
)
def test_sizes_that_do_not_divide_are_named(family: Family, dp: int, tp: int, message: str) -> None:
    mesh = Mesh(ParallelConfig(data_parallel_size=dp, tensor_parallel_size=tp), 0)
    with pytest.raises(ValueError, match=message):
        load_decoder(family.folder, torch.float32, "cpu", mesh)


def test_a_vocabulary_that_does_not_divide_is_named(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "vocab_size": 97, "num_key_value_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    mesh = Mesh(ParallelConfig(tensor_parallel_size=2), 1)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: dimension 0 of size 97 can't be divided over 2 ranks"):
        load_decoder(tmp_path, torch.float32, "cpu", mesh)


def test_a_silent_rank_is_an_error_and_no_hang(ranks: Ranks) -> None:
    first, second, _ = ranks.run(1, 3, rank_jobs.silent_rank, 4.0, timeout_seconds=2.0)
    for rank, error in enumerate((first, second)):
        assert error.startswith(
            f"rank {rank} of 3 (replica 0, tensor-parallel rank {rank}) lost its group in all_reduce"
        )


@pytest.mark.parametrize("family", [("mixtral", 2)], indirect=True)
def test_a_replica_that_stops_ends_the_group_in_order(ranks: Ranks, family: Family) -> None:
    stopped, follower, error, other_follower = ranks.run(2, 2, rank_jobs.stopped_replica, family.folder)
    assert stopped == "stopped"
    assert follower == other_follower == "followed to the end"
    assert error == "replica 0 of the group was stopped"


def test_the_harness_reports_a_job_that_raises(ranks: Ranks) -> None:
    with pytest.raises(JobError, match="rank 1: "):
        ranks.run(1, 2, rank_jobs.forwards, Path("/nowhere"), [], False, timeout_seconds=5.0)
