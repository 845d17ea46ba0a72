"""A dense model and its split into always-on experts are one function: in Hugging Face, in one process, over ranks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import torch
from ranks import Ranks
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from cluster.messages import Span
from cluster.models.loader import load_decoder, read_config
from drafter.source import resolve_source
from drafter.split_experts import split_experts

TOKENS = [5, 17, 3, 88, 41, 9, 60]


@pytest.fixture(scope="module")
def split(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("split") / "model"
    split_experts(tiny[0], output, 4)
    return output


@torch.no_grad()
def test_hugging_face_computes_the_same(tiny: tuple[Path, Any], split: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(split).eval()
    assert isinstance(model, MixtralForCausalLM)
    ids = torch.tensor([TOKENS])
    torch.testing.assert_close(model(ids).logits, tiny[1](ids).logits, atol=1e-4, rtol=1e-5)
    assert (split / "generation_config.json").is_file()


def test_no_weight_is_rounded(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    """In bfloat16 as well: the experts' columns, scaled back, are the dense ones bit for bit."""
    dense = copy.deepcopy(tiny[1]).to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "dense")
    split_experts(tmp_path / "dense", tmp_path / "split", 4)
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "split", dtype=torch.bfloat16)
    for mixed, plain in zip(moe.model.layers, dense.model.layers, strict=True):
        columns = torch.cat(list(mixed.mlp.experts.down_proj / 4), dim=1)
        assert torch.equal(columns, plain.mlp.down_proj.weight)


@pytest.mark.dist
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_over_two_ranks(tiny: tuple[Path, Any], split: Path, ranks: Ranks, dp: int, tp: int) -> None:
    steps = [[[Span(TOKENS, 0, [0, 1], len(TOKENS))], []]]
    results = ranks.run(dp, tp, rank_jobs.forwards, split, steps, False)
    with torch.no_grad():
        expected = tiny[1](torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(results[0][0], expected, atol=1e-4, rtol=0)


def test_a_source_is_split_once(tiny: tuple[Path, Any], split: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_source(f"split-experts=4:{tiny[0]}")
    assert tmp_path in folder.parents
    assert (folder / "model.safetensors").read_bytes() == (split / "model.safetensors").read_bytes()
    written = folder.stat().st_mtime_ns
    assert resolve_source(f"split-experts=4:{tiny[0]}") == folder
    assert folder.stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="split-experts=<number>:<source>"):
        resolve_source(f"split-experts=four:{tiny[0]}")


def test_our_decoder_loads_it(split: Path) -> None:
    load_decoder(split, torch.float32)
    moe = read_config(split).moe
    assert moe is not None
    assert moe.num_experts == moe.num_experts_per_token == 4


@pytest.mark.parametrize(
    ("change", "num_experts", "message"),
    [
        ({"model_type": "qwen2"}, 2, "model_type 'qwen2' has no Mixtral twin"),
        ({"mlp_bias": True}, 2, "mlp_bias: Mixtral has no biases"),
        ({}, 3, "power of two"),
        ({"intermediate_size": 66}, 4, "66 can't be divided into 4 experts"),
    ],
)
def test_what_has_no_twin_is_refused(
    tiny: tuple[Path, Any], tmp_path: Path, change: dict[str, Any], num_experts: int, message: str
) -> None:
    config = json.loads((tiny[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        split_experts(tmp_path, tmp_path / "output", num_experts)
