"""`train` as a command: what a run may go on with, and what one refusal leaves behind for the next try."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.__main__ import main
from drafter.data import Response, response_line

SHAPE = ("--layers", "1", "--block-size", "3", "--markov-rank", "8", "--draft-vocabulary", "64")


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    """Eight of 30 tokens, 24 of them the target's."""
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(line(number) for number in range(8)))
    return path


def line(number: int, length: int = 30) -> str:
    row = torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return response_line(Response(tuple(row), ((6, length),)))


def train(target: Path, output: Path, *options: str) -> dict[str, Any]:
    """Runs the command in this process; the provenance of its checkpoint."""
    command = ["drafter", "train", "--target", str(target), "--output", str(output), "--threads", "1", *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        main()
    facts: dict[str, Any] = json.loads((output / "checkpoint" / "provenance.json").read_text())
    return facts


def test_a_run_goes_on_only_as_it_began(chat_model: Path, tmp_path: Path, responses: Path) -> None:
    data, output = ("--responses", str(responses)), tmp_path / "run"
    begun = train(chat_model, output, *data, *SHAPE, "--slots", "400")
    other_target = shutil.copytree(chat_model, tmp_path / "other-target")
    for target, changes, message in (
        (chat_model, ["--seed", "1"], "seed 0"),
        (chat_model, ["--learning-rate", "0.1", "--muon-learning-rate", "0.1"], "learning_rate 0.002, muon_learning"),
        (chat_model, ["--mask-token-id", "1"], "mask_token_id 0"),
        (chat_model, ["--block-size", "4"], "block_size 3"),
        (chat_model, ["--layers", "2"], "num_hidden_layers 1"),
        (other_target, [], f"target {chat_model}"),
    ):
        with pytest.raises(SystemExit, match=rf"the run in \S*run is one of {message}.*; use another folder"):
            train(target, output, *data, *SHAPE, "--slots", "800", *changes)
    written = responses.read_text()
    responses.write_text(line(99) + "".join(written.splitlines(keepends=True)[1:]))
    with pytest.raises(SystemExit, match="is one of other responses"):
        train(chat_model, output, *data, *SHAPE, "--slots", "800")

    responses.write_text(written + line(8) + line(9))  # as `synthesize` goes on
    more = train(chat_model, output, *data, *SHAPE, "--slots", "800", "--gradient-accumulation-steps", "2")
    assert more["slots"] > begun["slots"] and (begun["responses"], more["responses"]) == (8, 10)


def test_a_state_that_notes_no_settings_goes_on(chat_model: Path, tmp_path: Path, responses: Path) -> None:
    """As earlier versions wrote it."""
    data = ("--responses", str(responses))
    begun = train(chat_model, tmp_path / "run", *data, *SHAPE, "--slots", "400")
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    old = {name: state[name] for name in ("model", "optimizers", "slots", "step")}
    torch.save(old, tmp_path / "run" / "state.pt")
    assert train(chat_model, tmp_path / "run", *data, *SHAPE, "--slots", "800")["steps"] == 2 * begun["steps"]


def test_prompts_and_the_first_weights_stay(chat_model: Path, tmp_path: Path, responses: Path) -> None:
    train(chat_model, tmp_path / "first", "--responses", str(responses), *SHAPE, "--slots", "1")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "adapted"
    prompts.write_text('{"turns": ["one"]}\n')
    options = ("--prompts", str(prompts), "--max-length", "90", "--slots", "1")
    init = ("--init", str(tmp_path / "first" / "checkpoint"))
    facts = train(chat_model, output, *options, *init)
    assert (facts["init"], facts["responses"]) == (init[1], 1)
    with pytest.raises(SystemExit, match=r"one of init \S*first/checkpoint; use another folder"):
        train(chat_model, output, *options, "--init", str(tmp_path / "second" / "checkpoint"))
    prompts.write_text('{"turns": ["two"]}\n')
    with pytest.raises(SystemExit, match=r"one of prompts_sha256 [0-9a-f]{64}; use another folder"):
        train(chat_model, output, *options, *init)


def test_a_calibration_outlives_a_repeated_command_and_no_further_training(
    chat_model: Path, tmp_path: Path, responses: Path
) -> None:
    data, output = ("--responses", str(responses)), tmp_path / "run"
    calibration = output / "checkpoint" / "calibration.json"
    train(chat_model, output, *data, *SHAPE, "--slots", "400")
    calibration.write_text('{"sts_temperatures": [2.0, 2.0, 2.0]}')
    before = {path: path.read_bytes() for path in (output / "checkpoint").iterdir()}
    train(chat_model, output, *data, *SHAPE, "--slots", "400")
    assert before == {path: path.read_bytes() for path in (output / "checkpoint").iterdir()}
    train(chat_model, output, *data, *SHAPE, "--slots", "800")
    assert not calibration.exists()


def test_a_checkpoint_that_a_kill_left_behind_its_state_is_written(
    chat_model: Path, tmp_path: Path, responses: Path
) -> None:
    data, output = ("--responses", str(responses)), tmp_path / "run"
    train(chat_model, output, *data, *SHAPE, "--slots", "400")
    shutil.copytree(output / "checkpoint", tmp_path / "earlier")
    more = train(chat_model, output, *data, *SHAPE, "--slots", "800")
    for path in (output / "checkpoint").iterdir():
        shutil.copy2(tmp_path / "earlier" / path.name, path)  # with the earlier time, too
    assert train(chat_model, output, *data, *SHAPE, "--slots", "800")["steps"] == more["steps"]


def test_a_mistake_does_not_stand_in_the_way_of_its_correction(
    chat_model: Path, tmp_path: Path, responses: Path
) -> None:
    data, output = ("--responses", str(responses)), tmp_path / "run"
    with pytest.raises(SystemExit, match="nothing to train on: 8 of 8 responses are longer than 20 tokens"):
        train(chat_model, output, *data, *SHAPE, "--max-length", "20")
    with pytest.raises(SystemExit, match=r"--draft-vocabulary must lie in 1\.\.258, got 640"):
        train(chat_model, output, *data, *SHAPE[:-1], "640")
    assert not list(output.iterdir())
    assert train(chat_model, output, *data, *SHAPE, "--slots", "1")["steps"] == 1


def test_what_is_too_long_is_said(
    chat_model: Path, tmp_path: Path, responses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    responses.write_text(responses.read_text() + line(8, length=50))
    options = ("--responses", str(responses), *SHAPE, "--slots", "1")
    assert train(chat_model, tmp_path / "run", *options, "--max-length", "40")["responses"] == 8
    assert "1 of 9 responses are longer than 40 tokens and left out" in capsys.readouterr().out
    assert train(chat_model, tmp_path / "all", *options)["responses"] == 9
    assert "left out" not in capsys.readouterr().out
