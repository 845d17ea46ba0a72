"""The laboratory: what is missing is trained, what was done is found again, and every experiment writes its files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter import experiment
from drafter.calibration import reliability
from drafter.comparison import gain, macro_score, scores, threshold_sweep
from drafter.data import Response, response_line
from drafter.evaluate import bootstrap
from drafter.experiments import EXPERIMENTS
from drafter.laboratory import Arm, Laboratory, Record
from drafter.ranks import ALONE
from drafter.rollout import Conversation, Rounds
from drafter.target import Target
from tests.drafter.conftest import VOCABULARY

CONVERSATIONS = [Conversation(f"set{i % 2}", tuple(range(3, 6 + i))) for i in range(12)]


def arguments(folder: Path, responses: list[Response], *names: str) -> argparse.Namespace:
    file = folder / "responses.jsonl"
    file.write_text("".join(response_line(response) for response in responses))
    parser = argparse.ArgumentParser()
    experiment.add_arguments(parser)
    options = [
        "--target",
        "tiny",
        "--prompts",
        "unused.jsonl",
        "--responses",
        str(file),
        "--runs",
        str(folder / "runs"),
    ]
    options += ["--results", str(folder / "results"), "--budget", "0.0003", "--draft-vocabulary", "40"]
    options += ["--markov-rank", "4", "--max-new-tokens", "8", "--batch-size", "12", "--threads", "1"]
    options += ["--calibration-prompts", "calibrate.jsonl", "--feature-memory-gib", "0.1"]
    return parser.parse_args([*names, *options])


@pytest.fixture
def laboratory(
    tiny_target: Target, tiny_responses: list[Response], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Laboratory:
    """Without prompt files: rendering needs a tokenizer, which the tiny target hasn't."""
    monkeypatch.setattr("drafter.laboratory.choose_conversations", lambda *_: list(CONVERSATIONS))
    monkeypatch.setattr("drafter.calibration.choose_conversations", lambda *_: list(CONVERSATIONS))
    return Laboratory(tiny_target, arguments(tmp_path, tiny_responses[:2], "all"), ALONE)


def test_an_arm_is_trained_and_decoded_once(
    laboratory: Laboratory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [Arm("dspark", layers=1, block_size=3), Arm("eagle3", layers=1, block_size=3), Arm("ngram", block_size=3)]
    laboratory.train(arms)
    assert capsys.readouterr().out.count("training") == 2
    records = [laboratory.decode(arm) for arm in arms]
    monkeypatch.setattr(laboratory, "_train", None)
    monkeypatch.setattr(laboratory, "_rollout", None)  # neither is needed again
    laboratory.train(arms)
    for arm, record in zip(arms, records, strict=True):
        again = laboratory.decode(arm)
        assert torch.equal(again.rounds.num_tokens, record.rounds.num_tokens)
        assert again.rounds.confidence_logits.shape[1] == 3


def test_an_arm_is_calibrated_once_for_each_way_to_do_it(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("laboratory", "calibration"):
        monkeypatch.setattr(f"drafter.{module}.choose_conversations", lambda _, chosen: CONVERSATIONS[: chosen.limit])
    arm = Arm("dspark", layers=1, block_size=3)
    laboratory.train([arm])
    found: dict[Path, int] = {}
    for option, value in ((None, None), ("temperature", 0.5), ("max_new_tokens", 6), ("calibration_limit", 10)):
        if option:
            setattr(laboratory._arguments, option, value)
        laboratory.calibrated(arm)
        files = {path: path.stat().st_mtime_ns for path in laboratory._folder(arm).glob("calibrated*/calibration.json")}
        assert len(files) == len(found) + 1 and found.items() <= files.items(), option
        found = files
        laboratory.calibrated(arm)  # again: nothing is done
        assert found == {path: path.stat().st_mtime_ns for path in found}


def test_drafters_of_other_settings_are_not_taken_for_these(
    laboratory: Laboratory, tiny_target: Target, tiny_responses: list[Response], tmp_path: Path
) -> None:
    options = arguments(tmp_path, tiny_responses[:2], "T1")
    Laboratory(tiny_target, options, ALONE)
    options.markov_rank = 8
    with pytest.raises(ValueError, match="are those of markov_rank 4; use another folder"):
        Laboratory(tiny_target, options, ALONE)


def test_every_experiment_writes_its_files(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("drafter.experiments.DEPTHS", (1, 2))
    options = laboratory._arguments
    for name, each in EXPERIMENTS.items():
        laboratory.train(each.arms)
        experiment._measure(name, each, laboratory, options)
    for name in EXPERIMENTS:
        content: dict[str, Any] = json.loads((tmp_path / "results" / f"{name}.json").read_text())
        assert content["rows"] and content["provenance"]["slots"] == 300
        assert (tmp_path / "results" / f"{name}.md").read_text().startswith(f"# {name}: ")
        assert (tmp_path / "results" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        if name == "T1":
            drafters = {row["drafter"] for row in content["rows"]}
            assert drafters == {arm.preset for arm in each_arms("T1")} | {"ddtree"}
            assert set(content["rows"][0]) == {"drafter", "dataset", "accepted_length", "low", "high", "rounds"}
            assert all(row["low"] <= row["accepted_length"] <= row["high"] for row in content["rows"])


def test_what_is_trained_is_measured_before_the_rest_is(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    laboratory.train([Arm("dspark"), Arm("dflash"), Arm("dflash", layers=1), Arm("dspark", block_size=3)])
    monkeypatch.setattr("drafter.experiment.Laboratory", lambda *_: laboratory)
    monkeypatch.setattr("drafter.experiment.Target.load", lambda _: laboratory.target)
    monkeypatch.setattr(laboratory, "train", None)
    options = arguments(tmp_path, laboratory._responses, "T1", "F3", "F4", "detach", "--trained-only")
    experiment.run(options)
    assert not (tmp_path / "results" / "detach.json").exists()
    assert "detach is left out: dspark-2x7-detached must be trained first" in capsys.readouterr().out
    found = {}
    for name in ("T1", "F3", "F4"):
        found[name] = json.loads((tmp_path / "results" / f"{name}.json").read_text())["rows"]
    assert {row["drafter"] for row in found["T1"]} == {"dspark", "dflash", "ddtree", "ngram"}
    assert {(row["drafter"], row["layers"]) for row in found["F3"]} == {("dspark", 2), ("dflash", 2), ("dflash", 1)}
    assert {row["block_size"] for row in found["F4"]} == {7}, "3 has nothing to compare with"
    page = (tmp_path / "results" / "F3.md").read_text()
    assert "left out: dspark-1x7, dspark-5x7, dflash-5x7." in page


def each_arms(name: str) -> tuple[Arm, ...]:
    return EXPERIMENTS[name].arms


def record(tokens: Tensor, logits: Tensor | None = None) -> Record:
    """Conversation i of CONVERSATIONS has the rounds tokens[i], tokens per round 1..4 of a block of 3."""
    count = tokens.shape[1]
    conversation = torch.arange(12).repeat_interleave(count)
    flat = tokens.flatten()
    logits = torch.zeros(len(flat), 3) if logits is None else logits
    full = torch.full((len(flat),), 3)
    return Record(CONVERSATIONS, Rounds(conversation, logits, flat - 1, flat, full, torch.empty(len(flat), 3, 0)))


def test_gains_are_paired_over_prompts() -> None:
    """Prompts that differ widely, on which one drafter is always twice as good: the interval has no width."""
    torch.manual_seed(0)
    short = torch.randint(1, 3, (12, 1)).expand(12, 40).clone()
    one, other = record(short * 2), record(short)
    found = gain("a", one, "b", other)
    assert (found.percent, found.low, found.high) == pytest.approx((100, 100, 100))
    macro = macro_score("b", other)
    assert macro.low < macro.accepted_length < macro.high
    assert macro.accepted_length == pytest.approx(sum(s.accepted_length for s in scores("b", other)) / 2)
    per_set = gain("a", one, "b", other, "set1")
    assert per_set.dataset == "set1" and per_set.percent == pytest.approx(100)


def test_data_sets_are_resampled_independently() -> None:
    """Of two sets that hold the same, the mean varies less than each of them."""
    torch.manual_seed(0)
    same = record(torch.randint(1, 5, (6, 3)).repeat_interleave(2, dim=0))
    single, macro = scores("a", same)[0], macro_score("a", same)
    assert macro.accepted_length == pytest.approx(single.accepted_length)
    assert macro.high - macro.low == pytest.approx((single.high - single.low) / 2**0.5, rel=0.1)


def test_the_interval_covers_what_it_should() -> None:
    torch.manual_seed(0)
    hits = 0
    for trial in range(200):
        totals = torch.stack((torch.randn(40, dtype=torch.float64) * 3 + 20, torch.full((40,), 10.0)), dim=1).double()
        low, high = bootstrap(totals, trial).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        hits += low <= 2 <= high
    assert 180 <= hits <= 199


def test_a_threshold_trades_rate_against_length() -> None:
    torch.manual_seed(0)
    confidence = torch.rand(12 * 50, 3)
    accepted = (torch.rand(12 * 50, 3) < confidence).long().cumprod(1).sum(1)
    sweep = threshold_sweep(record((accepted + 1).view(12, 50), confidence.logit()), torch.ones(3), (0.0, 0.5, 0.9))
    for dataset in ("set0", "set1"):
        every, half, few = (row for row in sweep if row.dataset == dataset)
        assert every.verified_per_step == 3
        assert every.acceptance_rate < half.acceptance_rate < few.acceptance_rate
        assert every.tokens_per_step > half.tokens_per_step > few.tokens_per_step


def test_reliability_by_hand() -> None:
    bins = reliability(torch.tensor([0.11, 0.14, 0.9]), torch.tensor([True, False, True]))
    assert bins == [pytest.approx((0.125, 0.5, 1 + 1)), pytest.approx((0.9, 1.0, 1))]
    assert VOCABULARY > 40  # the reduced vocabulary of these tests is one
