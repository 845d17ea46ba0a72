"""The trainer: its labels and rows are aligned, it learns, and a killed run goes on where it was."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import save_checkpoint
from drafter.config import TrainConfig
from drafter.data import Response
from drafter.dspark import DSpark
from drafter.initial import adapted_drafter, initial_drafter
from drafter.presets import PRESETS
from drafter.supervision import FeatureMemory, batch_loss, choose_anchors, step_totals
from drafter.target import Target
from drafter.train import Trainer, _preset, add_arguments, check_arguments, learning_rate_factor
from tests.drafter.conftest import VOCABULARY, drafter_config, random_drafter


def trainer_for(target: Target, responses: list[Response], **changes: object) -> Trainer:
    torch.manual_seed(0)
    model = initial_drafter(target, drafter_config(), torch.arange(VOCABULARY))
    config = TrainConfig(**{"slots": 60_000, "anchors_per_sequence": 24, "learning_rate": 5e-3, **changes})  # type: ignore[arg-type]
    return Trainer(model, FeatureMemory(target, model.target_layer_ids, 2**28), responses, config)


def test_training_raises_the_acceptance_probability(tiny_target: Target, tiny_responses: list[Response]) -> None:
    trainer = trainer_for(tiny_target, tiny_responses)
    before = trainer.train_step().overlap
    while trainer.slots < trainer.config.slots:
        after = trainer.train_step().overlap
    assert after > before + 0.05


def test_a_killed_run_goes_on_where_it_was(tiny_target: Target, tiny_responses: list[Response], tmp_path: Path) -> None:
    whole = trainer_for(tiny_target, tiny_responses)
    for _ in range(4):
        whole.train_step()
    first = trainer_for(tiny_target, tiny_responses)
    for _ in range(2):
        first.train_step()
    first.save(tmp_path / "state.pt")
    second = trainer_for(tiny_target, tiny_responses)
    second.load(tmp_path / "state.pt")
    for _ in range(2):
        second.train_step()
    assert (second.slots, second.step) == (whole.slots, whole.step)
    for expected, resumed in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(expected, resumed)


def bias(model: DSpark, previous: Tensor) -> Tensor:
    assert model.markov_head is not None
    return model.markov_head.bias(model.previous_embedding(previous), torch.empty(0), torch.empty(0))[0]


def test_an_adapted_drafter_starts_as_the_one_it_comes_from(tiny_target: Target, tmp_path: Path) -> None:
    old = random_drafter(drafter_config(draft_vocab_size=40))
    save_checkpoint(old, tmp_path, torch.float32)
    same = adapted_drafter(tiny_target, tmp_path, None)
    torch.testing.assert_close(dict(same.named_parameters()), dict(old.named_parameters()))
    assert torch.equal(same.target_ids, old.target_ids)
    assert all(parameter.requires_grad for parameter in same.parameters())

    dropped, kept = old.target_ids[::4], old.target_ids[old.target_ids % 7 != 0]
    other = adapted_drafter(tiny_target, tmp_path, kept)
    assert set(dropped.tolist()) - set(kept.tolist()), "the test drops some"
    previous = torch.randint(VOCABULARY, (5,))
    biases = [
        m.markov_head.bias(m.previous_embedding(previous), torch.empty(0), torch.empty(0))[0] for m in (old, other)
    ]
    torch.testing.assert_close(biases[1], biases[0][:, torch.isin(old.target_ids, kept)])

    new_ids = torch.arange(VOCABULARY)
    wider = adapted_drafter(tiny_target, tmp_path, new_ids)
    unknown = ~torch.isin(new_ids, old.target_ids)
    assert (bias(wider, previous)[:, unknown] == 0).all()
    assert (bias(wider, previous)[:, ~unknown] != 0).all()


def test_a_target_in_several_files_gives_the_same_first_weights(tiny_target: Target, tmp_path: Path) -> None:
    tiny_target.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 4
    sharded = Target(tiny_target.model, tiny_target.tokenizer, tmp_path)
    weights = []
    for target in (tiny_target, sharded):
        torch.manual_seed(0)
        weights.append(dict(initial_drafter(target, drafter_config(), torch.arange(VOCABULARY)).named_parameters()))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    layer = tiny_target.model.base_model.layers[-1]
    assert torch.equal(weights[0]["backbone.layers.1.mlp.up_proj.weight"], layer.mlp.up_proj.weight)


def test_init_and_a_shape_contradict_each_other(tmp_path: Path) -> None:
    command = ["train", "--target", "t", "--responses", "r", "--output", str(tmp_path), "--init", "d", "--layers", "3"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ValueError, match="--layers can't change"):
        check_arguments(parser.parse_args(command[1:]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (2, 7, 256, "vanilla", True, 0.65)),
        (
            ["--preset", "dspark-rnn", "--layers", "5", "--block-size", "15", "--markov-rank", "8"],
            (5, 15, 8, "rnn", True, 0.65),
        ),
        (["--preset", "dflash", "--layers", "3"], (3, 7, 0, "vanilla", False, 1.0)),
        (["--preset", "dflash-l1", "--block-size", "11"], (2, 11, 0, "vanilla", False, 0.65)),
        (["--preset", "eagle3"], (1, 7, 0, "vanilla", False, 1.0)),
        (["--preset", "mtp"], (1, 1, 0, "vanilla", False, 1.0)),
    ],
)
def test_options_change_a_preset(options: list[str], expected: tuple[object, ...]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    preset = _preset(parser.parse_args(["--target", "t", "--responses", "r", "--output", "o", *options]))
    assert expected == (
        preset.num_hidden_layers,
        preset.block_size,
        preset.markov_rank,
        preset.markov_head_type,
        preset.enable_confidence_head,
        preset.distillation_fraction,
    )
    assert math.exp(-2 / PRESETS["eagle3"].position_decay) == pytest.approx(0.8**2)


def test_anchors_stay_inside_one_response() -> None:
    response = Response(tuple(range(3, 23)), ((4, 9), (12, 14), (18, 20)))
    blocks = choose_anchors([response], 100, 3, torch.Generator().manual_seed(0))
    found = dict(zip(blocks.position_M.tolist(), blocks.num_slots_M.tolist(), strict=True))
    # t and t + 1 lie in one span, and slots end with the span: t -> min(block, end - 1 - t).
    assert found == {4: 3, 5: 3, 6: 2, 7: 1, 12: 1, 18: 1}


def test_loss_of_a_perfect_drafter_is_the_targets_entropy(
    tiny_target: Target, tiny_responses: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is told the target's own logits at row anchor + k gives TV 0: rows, slots and labels are aligned."""
    trainer = trainer_for(tiny_target, tiny_responses)
    responses = tiny_responses[:3]
    features = trainer.memory.get([0, 1, 2], [response.token_ids for response in responses])
    blocks = choose_anchors(responses, 10, 5, torch.Generator().manual_seed(0))
    model = trainer.model
    rows = [
        torch.stack([features[s].hidden[min(p + k, 43)] for k in range(5)])
        for s, p in zip(blocks.sequence_M.tolist(), blocks.position_M.tolist(), strict=True)
    ]
    monkeypatch.setattr("drafter.supervision._block_hidden", lambda *_: torch.stack(rows).float())
    assert model.markov_head is not None  # its W2 starts at zero, so the base logits are all there is
    totals = step_totals(model, responses, blocks, trainer.config.position_decay)
    _, summary = batch_loss(model, responses, features, blocks, trainer.config, True, totals)
    assert summary.overlap == pytest.approx(1, abs=5e-3)  # bf16 of p_t
    shifted = torch.roll(torch.stack(rows).float(), 1, dims=1)
    monkeypatch.setattr("drafter.supervision._block_hidden", lambda *_: shifted)
    _, summary = batch_loss(model, responses, features, blocks, trainer.config, True, totals)
    assert summary.overlap < 0.95


@pytest.mark.parametrize("detach", [False, True])
def test_a_detached_confidence_loss_trains_its_head_alone(
    tiny_target: Target, tiny_responses: list[Response], detach: bool
) -> None:
    trainer = trainer_for(tiny_target, tiny_responses, detach_confidence=detach)
    responses = tiny_responses[:2]
    features = trainer.memory.get([0, 1], [response.token_ids for response in responses])
    blocks = choose_anchors(responses, 4, 5, torch.Generator().manual_seed(0))
    model = trainer.model
    assert model.confidence_head is not None
    with torch.no_grad():
        model.confidence_head.proj.weight.normal_()  # at its zero start nothing would flow through it anyway
    totals = step_totals(model, responses, blocks, trainer.config.position_decay)
    gradients = []
    for weight in (0.0, 1.0):
        model.zero_grad()
        config = dataclasses.replace(trainer.config, confidence_weight=weight)
        batch_loss(model, responses, features, blocks, config, True, totals)[0].backward()
        gradients.append(model.backbone.fc.weight.grad)
    assert model.confidence_head.proj.weight.grad.any()
    assert torch.equal(*gradients) == detach


def test_learning_rate() -> None:
    config = TrainConfig(warmup_fraction=0.1, decay_fraction=0.4)
    assert learning_rate_factor(0.05, config) == pytest.approx(0.5, abs=0.02)
    assert learning_rate_factor(0.3, config) == 1
    assert learning_rate_factor(0.8, config) == pytest.approx(0.5)
    assert learning_rate_factor(1.0, config) == pytest.approx(0)
