"""`evaluate` as a command: what it writes, and that it judges no confidence where none was recorded."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.__main__ import main
from drafter.checkpoint import save_checkpoint
from drafter.initial import initial_drafter
from drafter.presets import PRESETS, preset_config
from drafter.target import Target


def evaluate(target: Path, folder: Path, *options: str) -> dict[str, Any]:
    """What it writes about the drafter in `folder`, on the prompts there."""
    found = folder / "found.json"
    command = ["drafter", "evaluate", "--target", str(target), "--drafter", str(folder), "--json", str(found)]
    command += ["--prompts", str(folder / "eval_mine.jsonl"), "--max-new-tokens", "8", "--threads", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*command, *options])
        main()
    content: dict[str, Any] = json.loads(found.read_text())
    return content


def test_confidences_are_judged_unless_trees_are_verified(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target.load(str(chat_model))
    preset = dataclasses.replace(PRESETS["dspark"], num_hidden_layers=1, block_size=3, markov_rank=4)
    vocabulary = torch.arange(target.config.vocab_size)
    save_checkpoint(initial_drafter(target, preset_config(preset, target, len(vocabulary), 0), vocabulary), tmp_path)
    (tmp_path / "eval_mine.jsonl").write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')

    plain = evaluate(chat_model, tmp_path)
    assert all(len(plain[name]) == 3 for name in ("ece_before_sts", "ece_after_sts", "auroc"))
    assert "ECE before STS" in capsys.readouterr().out
    tree = evaluate(chat_model, tmp_path, "--tree-nodes", "4")
    assert plain.keys() - tree.keys() == {"ece_before_sts", "ece_after_sts", "auroc"}
    assert "ECE" not in capsys.readouterr().out
    for content in (plain, tree):
        (row,) = content["rows"]
        assert row["dataset"] == "mine" and row["accepted_length"] >= 1
