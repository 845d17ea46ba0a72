"""Routers against Hugging Face's own, experts against their plain twin, and both dispatch forms over real processes."""

from __future__ import annotations

import pytest
import rank_jobs
import torch
from ranks import Ranks
from torch import Tensor, nn
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from cluster.layers import SwiGLU
from cluster.mesh import WHOLE, Mesh, Part
from cluster.messages import Lockstep
from cluster.moe import MoE, MoEConfig, moe_plain, route

HIDDEN, WIDTH = 24, 24
DEEPSEEK = MoEConfig(
    num_experts=12,
    num_experts_per_token=4,
    scoring="sigmoid",
    num_groups=4,
    num_groups_kept=2,
    scaling=2.5,
    corrected=True,
    shared=True,
)
MIXTRAL = MoEConfig(num_experts=12, num_experts_per_token=2)
QWEN = MoEConfig(num_experts=12, num_experts_per_token=5, normalize=False)


def hugging_face_router(name: str) -> tuple[MoEConfig, nn.Module]:
    if name == "mixtral":
        config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=12, num_experts_per_tok=2)
        return MIXTRAL, MixtralTopKRouter(config)
    if name == "qwen3_moe":
        return QWEN, Qwen3MoeTopKRouter(
            Qwen3MoeConfig(hidden_size=HIDDEN, num_local_experts=12, num_experts_per_tok=5, norm_topk_prob=False)
        )
    return DEEPSEEK, DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            n_routed_experts=12,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        )
    )


def dense(weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
    return torch.zeros(len(weights_NK), 12).scatter_(1, experts_NK, weights_NK.float())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
@torch.no_grad()
def test_routers_equal_hugging_face(name: str) -> None:
    torch.manual_seed(0)
    config, router = hugging_face_router(name)
    router.weight.copy_(torch.randn_like(router.weight))
    correction = None
    if config.corrected:
        router.e_score_correction_bias.copy_(torch.randn(12) * 0.3)
        correction = router.e_score_correction_bias
    x = torch.randn(200, HIDDEN)
    logits, weights, experts = router(x)
    expected = dense(weights, experts)
    actual = dense(*route(logits.float(), config, correction))
    torch.testing.assert_close(actual, expected)
    assert ((actual > 0).sum(1) == config.num_experts_per_token).all()


def random_layer(config: MoEConfig) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tensors = {"mlp.gate.weight": torch.randn(config.num_experts, HIDDEN)}
    names = [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
    if config.shared:
        names.append("mlp.shared_experts")
    for name in names:
        tensors |= {f"{name}.{part}_proj.weight": torch.randn(WIDTH, HIDDEN) * 0.2 for part in ("gate", "up")}
        tensors[f"{name}.down_proj.weight"] = torch.randn(HIDDEN, WIDTH) * 0.2
    if config.corrected:
        tensors["mlp.gate.e_score_correction_bias"] = torch.randn(config.num_experts) * 0.3
    return tensors


def plain(tensors: dict[str, Tensor], config: MoEConfig, x: Tensor) -> Tensor:
    def read(name: str, part: Part = WHOLE, dtype: torch.dtype | None = None) -> Tensor:
        return tensors[name]

    correction = tensors.get("mlp.gate.e_score_correction_bias")
    weights, chosen = route(x @ tensors["mlp.gate.weight"].T, config, correction)
    experts = [SwiGLU(read, f"mlp.experts.{expert}", Mesh()) for expert in range(config.num_experts)]
    result = moe_plain(x, weights, chosen, experts)
    return result + SwiGLU(read, "mlp.shared_experts", Mesh())(x) if config.shared else result


@pytest.mark.parametrize("config", [MIXTRAL, QWEN, DEEPSEEK], ids=["mixtral", "qwen", "deepseek"])
@pytest.mark.parametrize("num_rows", [1, 3, 50])
def test_one_rank_equals_the_plain_twin(config: MoEConfig, num_rows: int) -> None:
    tensors, x = random_layer(config), torch.randn(num_rows, HIDDEN)
    layer = MoE(lambda name, part=WHOLE, dtype=None: tensors[name], "mlp", config, Mesh())
    torch.testing.assert_close(layer(x, Lockstep((num_rows,))), plain(tensors, config, x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x, Lockstep((num_rows,), True)), plain(tensors, config, x), atol=1e-5, rtol=1e-5)
    assert int(layer.load_E.sum()) == 2 * num_rows * config.num_experts_per_token


@pytest.mark.dist
@pytest.mark.parametrize("exchange", [False, True], ids=["gathered", "exchanged"])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2), (1, 3)])
def test_both_forms_equal_the_plain_twin_over_ranks(ranks: Ranks, dp: int, tp: int, exchange: bool) -> None:
    """Uneven and empty batches, a shared expert, and every row counted at exactly the experts it went to."""
    tensors = random_layer(DEEPSEEK)
    for lengths in ((7, 3), (0, 5), (1, 0)):
        rows = [torch.randn(length, HIDDEN) for length in lengths[:dp]]
        if not sum(map(len, rows)):
            continue
        results = ranks.run(dp, tp, rank_jobs.experts, tensors, DEEPSEEK, rows, exchange)
        for rank, (output, _, _) in enumerate(results):
            own = rows[rank // tp]
            torch.testing.assert_close(output, plain(tensors, DEEPSEEK, own), atol=1e-5, rtol=1e-5)
        together = torch.cat(rows)
        chosen = route(together @ tensors["mlp.gate.weight"].T, DEEPSEEK, tensors["mlp.gate.e_score_correction_bias"])[
            1
        ]
        load_E = torch.bincount(chosen.flatten(), minlength=12)
        loads_WE = torch.stack([load for _, load, _ in results])
        if exchange:  # every row is routed by one rank
            assert loads_WE.sum(0).tolist() == load_E.tolist()
        else:
            assert loads_WE.tolist() == [load_E.tolist()] * len(results)
        crossovers = {crossover for _, _, crossover in results}
        assert len(crossovers) == 1, "the ranks must agree, whatever their own clocks say"
        assert dp > 1 or crossovers == {None}


@pytest.mark.dist
@pytest.mark.parametrize("exchange", [False, True], ids=["gathered", "exchanged"])
def test_routers_that_differ_by_a_thousandth_neither_hang_nor_split_a_replica(ranks: Ranks, exchange: bool) -> None:
    """Two experts of different ranks tie, so that each rank's own noise decides; still no shape may depend on it."""
    tensors, x = random_layer(MIXTRAL), torch.randn(40, HIDDEN)
    tensors["mlp.gate.weight"][11] = tensors["mlp.gate.weight"][0]
    outputs = ranks.run(2, 2, rank_jobs.disagreeing_routers, tensors, MIXTRAL, x, exchange)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    if exchange:  # each rank has decided for its share of the rows, alone
        for rank, output in enumerate(outputs):
            share = slice(20 * (rank % 2), 20 * (rank % 2) + 20)
            expected = plain(rank_jobs.with_noisy_router(tensors, rank), MIXTRAL, x[share])
            torch.testing.assert_close(output[share], expected, atol=1e-5, rtol=1e-5)
