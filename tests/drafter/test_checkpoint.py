"""Checkpoints: a round trip keeps every number, and an incomplete or foreign one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.checkpoint import confidence_weights, load_drafter, replace_confidence, save_checkpoint
from drafter.dspark import DSpark
from tests.drafter.conftest import drafter_config, random_drafter


def target_weights(model: DSpark) -> tuple[torch.Tensor, torch.Tensor]:
    return model.embed_tokens, model.embed_tokens


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("draft_vocab_size", [97, 40])
def test_round_trip(tmp_path: Path, kind: str, draft_vocab_size: int) -> None:
    model = random_drafter(drafter_config(markov_head_type=kind, draft_vocab_size=draft_vocab_size))
    save_checkpoint(model, tmp_path, dtype=torch.float32)
    loaded = load_drafter(tmp_path, *target_weights(model), dtype=torch.float32)
    assert loaded.config == model.config
    assert torch.equal(loaded.target_ids, model.target_ids)
    assert torch.equal(loaded.lm_head, model.lm_head)
    for (name, saved), (_, read) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(saved, read), name


def test_names_are_the_public_ones(tmp_path: Path) -> None:
    save_checkpoint(random_drafter(drafter_config(draft_vocab_size=40)), tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    layer = {
        f"layers.1.{name}.weight"
        for name in (
            *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
            *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        )
    }
    heads = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    heads |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    base = {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"}
    assert names == layer | {name.replace("layers.1", "layers.0") for name in layer} | heads | base


@pytest.mark.parametrize("damage", ["missing", "unexpected", "misshapen"])
def test_incomplete_checkpoints_are_refused(tmp_path: Path, damage: str) -> None:
    model = random_drafter(drafter_config())
    save_checkpoint(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if damage == "missing":
        del tensors["layers.1.mlp.up_proj.weight"]
    elif damage == "unexpected":
        tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(1)
    else:
        tensors["fc.weight"] = tensors["fc.weight"][:, :64].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj|fc\.weight"):
        load_drafter(tmp_path, *target_weights(model))


def test_a_checkpoint_of_another_target_is_refused(tmp_path: Path) -> None:
    model = random_drafter(drafter_config())
    save_checkpoint(model, tmp_path)
    other = torch.zeros(97, 32)
    with pytest.raises(ValueError, match="width 64"):
        load_drafter(tmp_path, other, other)


def test_missing_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    weights = torch.zeros(97, 64), torch.zeros(97, 64)
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_drafter(tmp_path / "nowhere", *weights)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="Qwen3DSparkModel"):
        load_drafter(tmp_path, *weights)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3DSparkModel"], "rope_theta": 1.0}))
    with pytest.raises(ValueError, match="'hidden_size' is missing"):
        load_drafter(tmp_path, *weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "type 'yarn'"),
    ],
)
def test_what_no_tensor_tells_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    model = random_drafter(drafter_config())
    save_checkpoint(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, *target_weights(model))


def test_sts_temperatures_scale_the_confidence(tmp_path: Path) -> None:
    model = random_drafter(drafter_config())
    save_checkpoint(model, tmp_path, dtype=torch.float32)
    keys, values = (x[:, None] for x in model.project_context(torch.randn(6, 320), torch.arange(6)))
    arguments = (torch.tensor([5]), torch.tensor([6]), keys, values, torch.tensor([6]))

    def sampler(_slot: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), logits.softmax(-1)

    raw = model.propose(*arguments, sampler, 5).confidences
    (tmp_path / "calibration.json").write_text(json.dumps({"sts_temperatures": [1.0, 2.0, 0.5, 1.0, 4.0]}))
    scaled = load_drafter(tmp_path, *target_weights(model), dtype=torch.float32).propose(*arguments, sampler, 5)
    expected = (raw.logit() / torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0])).sigmoid()
    torch.testing.assert_close(scaled.confidences, expected, atol=1e-5, rtol=1e-4)
    (tmp_path / "calibration.json").write_text(json.dumps({"sts_temperatures": [1.0]}))
    with pytest.raises(ValueError, match="1 positions, not 5"):
        load_drafter(tmp_path, *target_weights(model))


def test_the_confidence_head_is_replaced_in_the_weights(tmp_path: Path) -> None:
    model = random_drafter(drafter_config())
    save_checkpoint(model, tmp_path, dtype=torch.float32)
    weight, bias = confidence_weights(tmp_path)
    replace_confidence(tmp_path, weight * 2, bias - 0.5)
    loaded = load_drafter(tmp_path, *target_weights(model), dtype=torch.float32)
    assert loaded.confidence_head is not None and model.confidence_head is not None
    torch.testing.assert_close(loaded.confidence_head.proj.bias, model.confidence_head.proj.bias - 0.5)
    torch.testing.assert_close(loaded.confidence_head.proj.weight, model.confidence_head.proj.weight * 2)
    others = {k: v for k, v in model.named_parameters() if not k.startswith("confidence_head")}
    for name, value in loaded.named_parameters():
        assert name.startswith("confidence_head") or torch.equal(value, others[name])


@pytest.mark.parametrize("write", ["save", "replace"])
def test_other_weights_are_not_calibrated(tmp_path: Path, write: str) -> None:
    """Temperatures of a refitted head would make the trained one worse than none."""
    model = random_drafter(drafter_config())
    save_checkpoint(model, tmp_path)
    (tmp_path / "calibration.json").write_text(json.dumps({"sts_temperatures": [2.0] * 5}))
    if write == "save":
        save_checkpoint(model, tmp_path)
    else:
        replace_confidence(tmp_path, *confidence_weights(tmp_path))
    loaded = load_drafter(tmp_path, *target_weights(model))
    assert isinstance(loaded, DSpark) and loaded.sts_temperatures.tolist() == [1.0] * 5
