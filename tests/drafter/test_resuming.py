"""`train` as a command: what a refusal leaves behind for the next try."""

from __future__ import annotations

import json
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
