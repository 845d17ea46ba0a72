"""Prompt and response files, the mix of domains, batches, the draft vocabulary."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from drafter.data import (
    Prompt,
    Response,
    draft_vocabulary,
    epoch_batches,
    prompt_stream,
    read_prompts,
    read_responses,
    response_line,
    write_json,
)


def responses_of_lengths(*lengths: int) -> list[Response]:
    return [Response(tuple(range(1, n + 1)), ((2, n),), "d", i) for i, n in enumerate(lengths)]


def test_prompts_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one", "two"], "domain": "chat"}\n\n{"turns": ["héé"]}\n', encoding="utf-8")
    assert read_prompts(path) == [Prompt(("one", "two"), "chat"), Prompt(("héé",), "")]
    for bad in ("{", "[1]", '{"turns": []}', '{"turns": [""]}', '{"turns": "text"}', '{"turn": ["x"]}'):
        path.write_text('{"turns": ["fine"]}\n' + bad + "\n")
        with pytest.raises(ValueError, match="line 2"):
            read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(path)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    turn = "one\u2028two\u2029three\u0085four"  # whole in a string of JSON, ends of lines for str.splitlines
    path.write_text(json.dumps({"turns": [turn]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(path) == [Prompt((turn,))]


def test_responses_survive_the_file_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    written = [Response((5, 6, 7, 8, 9), ((1, 3), (3, 5)), "math", 4), Response((1, 2), ((1, 2),))]
    lines = [response_line(response) for response in written]
    path.write_text("".join(lines))
    assert read_responses(path) == written
    assert written[0].num_response_tokens == 4
    path.write_text(lines[0] + lines[1][:-1])
    assert read_responses(path) == written[:1]
    for spans in ([[0, 2]], [[1, 1]], [[1, 3], [2, 3]], [[1, 4]]):
        path.write_text(f'{{"token_ids": [5, 6, 7], "response_spans": {spans}}}\n')
        with pytest.raises(ValueError, match="line 1"):
            read_responses(path)


def test_every_prefix_of_the_stream_mixes_domains_in_equal_shares() -> None:
    prompts = [Prompt((f"m{i}",), "math") for i in range(900)] + [Prompt((f"c{i}",), "chat") for i in range(100)]
    drawn = list(itertools.islice(prompt_stream(prompts, seed=3), 400))
    for prefix in (100, 400):
        share = Counter(prompt.domain for prompt in drawn[:prefix])["chat"] / prefix
        assert 0.4 < share < 0.6  # where plain shuffling gives 0.1
    math = [prompt for prompt in drawn if prompt.domain == "math"]
    assert len(set(math)) == len(math), "a domain repeats itself only when it is used up"
    assert drawn == list(itertools.islice(prompt_stream(prompts, seed=3), 400))
    assert drawn != list(itertools.islice(prompt_stream(prompts, seed=4), 400))


def test_batches_see_everything_once_an_epoch() -> None:
    lengths = list(range(3, 40))
    first, second = (epoch_batches(lengths, 4, seed=0, epoch=epoch) for epoch in (0, 1))
    for batches in (first, second):
        assert sorted(row for batch in batches for row in batch) == list(range(37))
    assert first != second, "epochs differ in order"
    assert first == epoch_batches(lengths, 4, seed=0, epoch=0)
    assert first != epoch_batches(lengths, 4, seed=1, epoch=0)


def test_batches_waste_little_padding() -> None:
    lengths = list(range(3, 203))
    padded = sum(8 * max(lengths[row] for row in batch) for batch in epoch_batches(lengths, 8, seed=0, epoch=0))
    assert padded < 1.1 * sum(lengths)


def test_draft_vocabulary_counts_response_tokens_only_and_keeps_the_end_token() -> None:
    # 50 is frequent in the prompt only; 7: 3 times, 9: twice, 8 and 2 (the end): once
    responses = [Response((50, 50, 50, 50, 7, 7, 9, 8), ((4, 8),)), Response((50, 7, 9, 2), ((1, 4),))]
    ids, coverage = draft_vocabulary(responses, 3, always=[2])
    assert ids.tolist() == [2, 7, 9]
    assert ids.dtype == torch.int64
    assert coverage == pytest.approx(6 / 7)
    assert draft_vocabulary(responses, 3)[0].tolist() == [2, 7, 9]  # the lower id wins the tie of 2 and 8
    filled, everything = draft_vocabulary(responses, 6)
    assert filled.tolist() == [0, 1, 2, 7, 8, 9]
    assert everything == 1
    with pytest.raises(ValueError, match="can't hold"):
        draft_vocabulary(responses, 1, always=[2, 3])


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert path.read_text() == '{\n  "a": 2\n}\n'
    assert list(tmp_path.iterdir()) == [path]
