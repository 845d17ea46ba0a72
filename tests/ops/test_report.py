"""Tables and the README's generated parts."""

from __future__ import annotations

import pytest

from ops.benchmarks.report import ROOT, fill, laboratory_section, provenance, table


def test_a_table_aligns_words_left_and_numbers_right() -> None:
    assert table(["mode", "tok/s"], [["plain", "9.5"], ["fixed", "12.0"]]).splitlines() == [
        "| mode  | tok/s |",
        "|-------|------:|",
        "| plain |   9.5 |",
        "| fixed |  12.0 |",
    ]


def test_filling_replaces_only_what_stands_between_the_markers() -> None:
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    once = fill(text, "x", "new")
    assert once == "a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb\n"
    assert fill(once, "x", "new") == once
    with pytest.raises(ValueError, match="no markers"):
        fill(text, "y", "new")


def test_drafters_are_compared_by_data_set_and_by_what_the_first_gains() -> None:
    def score(drafter: str, dataset: str, length: float) -> dict[str, object]:
        return {"drafter": drafter, "dataset": dataset, "accepted_length": length, "low": length - 0.1, "high": 3.0}

    made = {"date": "2026-01-02T03:04:05Z", "machine": "Linux", "versions": {"torch": "2"}, "temperature": 1.0}
    gain = {"drafter": "dspark", "over": "dflash", "dataset": "macro", "percent": 25.0, "low": -1.04, "high": 30.0}
    results = {
        "rows": [score("dspark", "gsm8k", 2.5), score("dflash", "gsm8k", 2.0)],
        "macro": [score("dspark", "macro", 2.5), score("dflash", "macro", 2.0)],
        "gains": [gain, {**gain, "dataset": "gsm8k", "percent": 99.0}],
        "draft_passes": {"dspark": 0.0155},
        "provenance": {**made, "slots": 600000, "command": ["python", "-m", "drafter", "experiment", "T1"]},
    }
    text = laboratory_section(results)
    assert "600,000 slots each, with `python -m drafter experiment T1`" in text
    assert text.splitlines()[-2:] == [
        "| dspark  |  2.50 | 2.50 (2.40-3.00) | -                    | 15.5           |",
        "| dflash  |  2.00 | 2.00 (1.90-3.00) | +25.0% (-1.0..+30.0) | -              |",
    ]


def test_the_readme_has_a_place_for_each_result() -> None:
    readme = (ROOT / "README.md").read_text()
    for section in ("speedup", "alone", "drafter", "laboratory", "peers"):
        assert fill(readme, section, "numbers") != readme


def test_provenance_names_versions_and_machine_but_no_folder_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["x", "--prompts", "/somewhere/private/gsm8k.jsonl", "--json", "ops/results/a.json"]
    )
    seen = provenance()
    assert seen["command"].endswith(" --prompts gsm8k.jsonl --json ops/results/a.json")
    assert set(seen["versions"]) == {"python", "torch", "ray", "transformers"}
    assert seen["machine"]["cores"] >= 1 and seen["commit"]
