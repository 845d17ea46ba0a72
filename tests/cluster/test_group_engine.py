"""Engines over several ranks: one decides, and speculation, batching, idleness or noise on a rank change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_jobs
import pytest
import rank_jobs
import torch
from engine_jobs import Served, perturbation
from ranks import Ranks
from tiny_engine import dspark_drafter, greedy_truth, knowing_drafter, prompts, request, run
from transformers import MixtralConfig, MixtralForCausalLM

from cluster.engine import Engine
from cluster.models.loader import load_decoder
from cluster.shard import Shard
from drafter.checkpoint import save_checkpoint

pytestmark = pytest.mark.dist

MAX_TOKENS = 14
NUM_STEPS = 40


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            initializer_range=0.25,
            sliding_window=None,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    model = model.float().eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder, model


def serve(
    ranks: Ranks, model: tuple[Path, Any], dp: int, tp: int, first_steps: list[int], **settings: Any
) -> list[Served]:
    """Greedy requests dealt to the replicas; their text must be Hugging Face's. Returns what each replica did."""
    asked = prompts(6, longest=20)
    truth = {f"g{i}": greedy_truth(model[1], prompt, MAX_TOKENS) for i, prompt in enumerate(asked)}
    requests = [request(prompt, f"g{i}", max_tokens=MAX_TOKENS) for i, prompt in enumerate(asked)]
    dealt = [requests[replica::dp] for replica in range(dp)]
    references = None
    if "drafter_source" not in settings:
        references = [[*prompt, *truth[f"g{i}"]] for i, prompt in enumerate(asked)]
    config = rank_jobs.make_config(model[0], **settings)
    results = ranks.run(dp, tp, engine_jobs.serve, config, dealt, first_steps, NUM_STEPS, references)
    leaders = results[::tp]
    for replica, served in enumerate(leaders):
        assert served.tokens == {r.request_id: truth[r.request_id] for r in dealt[replica]}
        assert set(served.finished.values()) == {"length"}
        assert served.num_free_kv_blocks == config.num_kv_blocks
    assert all(result is None for rank, result in enumerate(results) if rank % tp)
    return leaders


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_greedy_text_with_speculation_is_hugging_faces(ranks: Ranks, tiny, dp: int, tp: int) -> None:
    leaders = serve(ranks, tiny, dp, tp, [0, 12][:dp], num_kv_blocks=40)
    assert sum(served.num_accepted for served in leaders) > 10, "the knowing drafter must be of use"


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_experts_over_all_ranks_while_a_replica_idles_before_and_after(ranks: Ranks, mixtral, dp: int, tp: int) -> None:
    """Replica 1 begins late, when replica 0 has decoded for a while, and both idle at the end."""
    leaders = serve(ranks, mixtral, dp, tp, [0, 12])
    assert sum(served.num_accepted for served in leaders) > 10
    assert leaders[1].num_idle_steps > 12
    assert leaders[0].num_idle_steps > 0


def test_the_real_drafter_on_a_leader_whose_target_is_split(ranks: Ranks, tiny, tmp_path: Path) -> None:
    """Loaded from its files: embedding and head are the target's, of which the leader's target holds only a part."""
    save_checkpoint(dspark_drafter(tiny[1], 96), tmp_path, torch.float32)
    serve(ranks, tiny, 1, 2, [0], drafter_source=str(tmp_path))


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_a_rank_whose_logits_are_off_decides_nothing(ranks: Ranks, tiny, mode: str) -> None:
    """The noise of rank 1 counts exactly as noise on its columns would in one process: no hang, no divergence."""
    sampling: dict[str, Any] = {
        "greedy": {"temperature": 0.0},
        "coupled": {"temperature": 1.0, "seed": 5},
        "rejection": {"temperature": 1.0},
    }[mode]
    asked = prompts(4, longest=20)
    requests = [request(prompt, f"r{i}", max_tokens=MAX_TOKENS, **sampling) for i, prompt in enumerate(asked)]
    references = [[*prompt, *greedy_truth(tiny[1], prompt, MAX_TOKENS)] for prompt in asked]
    config = rank_jobs.make_config(tiny[0])
    served, _ = ranks.run(1, 2, engine_jobs.serve, config, [requests], [0], NUM_STEPS, references, True)
    assert set(served.finished.values()) == {"length"}
    assert {len(tokens) for tokens in served.tokens.values()} == {MAX_TOKENS}
    if mode == "rejection":  # its randomness is fresh in every run
        return
    decoder = load_decoder(tiny[0], torch.float32)
    logits, noise = decoder.logits, perturbation(96)
    noise[:48] = 0
    decoder.logits = lambda hidden: logits(hidden) + noise  # type: ignore[method-assign]
    engine = Engine(config, Shard(decoder, knowing_drafter(references, 96), config), None)
    assert served.tokens == run(engine, requests).tokens


def test_collectives_of_a_step_are_those_that_are_stated(ranks: Ranks, tiny, mixtral) -> None:
    """One message a step, whatever is in it, and per layer no collective beyond those of docs/architecture.md."""
    layers = 4
    leader, follower = ranks.run(1, 2, rank_jobs.collectives_of_a_step, tiny[0], False)
    assert leader == {"send": 1, "all_reduce": 1 + 2 * layers, "gather": 1}
    assert follower == {"receive": 1, "all_reduce": 1 + 2 * layers, "gather": 1}
    for exchange, dispatch in (
        (False, {"all_gather": layers, "reduce_scatter": layers}),
        (True, {"all_to_all": 3 * layers}),
    ):
        expected = {"send": 1, "agree": 1, "all_reduce": 1 + 2 * layers, "gather": 1, **dispatch}
        results = ranks.run(2, 2, rank_jobs.collectives_of_a_step, mixtral[0], exchange)
        assert results[0] == expected
        # The other replica has no rows: nothing of its own to reduce or to gather.
        assert results[2] == {"send": 1, "agree": 1, **dispatch}
