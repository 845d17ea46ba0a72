"""Prompt files: what is accepted, what is refused and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.benchmarks.prompts import BUILT_IN, Dataset, read_texts


def test_the_built_in_set_is_of_distinct_prompts() -> None:
    texts = read_texts(BUILT_IN)
    assert len(texts) == len(set(texts)) == 24


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "eval_mine.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n\n{"turns": []}\n')
    with pytest.raises(ValueError, match=r"eval_mine.jsonl, line 3"):
        read_texts(file)
    file.write_text('{"turns": ["one", "two"]}\n')
    assert read_texts(file) == ["one"]
    file.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        read_texts(file)


def test_taking_begins_again_after_the_last() -> None:
    dataset = Dataset("x", ((1,), (2,), (3,)))
    assert dataset.take(2, 3) == [(3,), (1,), (2,)]
    assert dataset.take(4, 1) == [(2,)]
