"""What `inspect` shows, and what it refuses: incomplete files, and taps that are one layer off."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from drafter import inspection
from drafter.checkpoint import load_drafter, save_checkpoint
from drafter.config import TrainConfig
from drafter.data import Response
from drafter.initial import initial_drafter
from drafter.inspection import calibration_table, check_taps, tap_overlaps
from drafter.supervision import FeatureMemory
from drafter.target import Target
from drafter.train import Trainer
from tests.drafter.conftest import VOCABULARY, drafter_config, random_drafter, tiny_config


def inspect(folder: Path) -> None:
    parser = argparse.ArgumentParser()
    inspection.add_arguments(parser)
    inspection.run(parser.parse_args([str(folder)]))


def test_shapes_sizes_and_calibration_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(random_drafter(drafter_config()), tmp_path)
    inspect(tmp_path)
    shown = capsys.readouterr().out
    for text in ("target_layer_ids          (1, 2, 3, 4, 5)", "markov_head.markov_w2.weight", "[97, 8]", "calibrate"):
        assert text in shown
    content = {"sts_temperatures": [1.5, 2.0], "ece_before": [0.25, 0.125], "head_penalty": 0.1}
    facts = {"verification": "rejection", "temperature": 1.0, "prompts": ["a.jsonl"], "rounds": 9}
    (tmp_path / "calibration.json").write_text(json.dumps({**content, "provenance": facts}))
    table = calibration_table(tmp_path)
    assert "1.500   2.000" in table and "0.250   0.125" in table and "head_penalty" not in table
    assert "verification rejection, temperature 1.0, prompts ['a.jsonl'], rounds 9" in table


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    save_checkpoint(random_drafter(drafter_config()), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing norm.weight"):
        inspect(tmp_path)


@pytest.fixture(scope="module")
def layered_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Weights so large that neighbouring layers really differ."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.1)).eval()
    folder = tmp_path_factory.mktemp("layered-target")
    model.save_pretrained(folder)
    return Target(model, SimpleNamespace(eos_token_id=2, chat_template=""), folder)


def test_shifted_taps_are_refused(layered_target: Target, tmp_path: Path) -> None:
    target = layered_target
    torch.manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (48, 4))
    sampling = {"do_sample": True, "max_new_tokens": 40, "min_new_tokens": 40, "top_k": 0}
    sequences = target.model.generate(prompts, attention_mask=torch.ones_like(prompts), **sampling)
    responses = [Response(tuple(sequence.tolist()), ((4, 44),)) for sequence in sequences]
    model = initial_drafter(target, drafter_config(target_layer_ids=(2, 4), block_size=2), torch.arange(VOCABULARY))
    config = TrainConfig(slots=12_000, anchors_per_sequence=24, learning_rate=5e-3)
    trainer = Trainer(model, FeatureMemory(target, (2, 4), 2**28), responses, config)
    while trainer.slots < config.slots:
        trainer.train_step()
    check_taps(target, model, responses[:8])
    save_checkpoint(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_layer_ids": [1, 3]}))
    weights = target.embed_weight_VD, target.lm_head_weight_VD
    shifted = load_drafter(tmp_path, *weights, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"\[1, 3\] look shifted: with \[2, 4\]"):
        check_taps(target, shifted, responses[:8])
    assert set(tap_overlaps(target, shifted, responses[:2])) == {0, -1, 1}
