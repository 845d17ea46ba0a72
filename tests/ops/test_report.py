"""Tables and the README's generated parts."""

from __future__ import annotations

import pytest

from ops.benchmarks.report import ROOT, fill, provenance, table


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


def test_the_readme_has_a_place_for_each_result() -> None:
    readme = (ROOT / "README.md").read_text()
    for section in ("speedup", "alone", "drafter", "peers"):
        assert fill(readme, section, "numbers") != readme


def test_provenance_names_versions_and_machine_but_no_folder_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["x", "--prompts", "/somewhere/private/gsm8k.jsonl", "--json", "ops/results/a.json"]
    )
    seen = provenance()
    assert seen["command"].endswith(" --prompts gsm8k.jsonl --json ops/results/a.json")
    assert set(seen["versions"]) == {"python", "torch", "ray", "transformers"}
    assert seen["machine"]["cores"] >= 1 and seen["commit"]
