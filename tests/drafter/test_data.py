"""Prompt and response files, the mix of domains, batches, the draft vocabulary."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from drafter.data import (
    Prompt,
    Response,
    batches,
    draft_vocabulary,
    pad,
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


def test_every_prefix_of_the_stream_mixes_domains_by_the_root_of_their_size() -> None:
    prompts = [Prompt((f"m{i}",), "math") for i in range(900)] + [Prompt((f"c{i}",), "chat") for i in range(100)]
    drawn = list(itertools.islice(prompt_stream(prompts, seed=3), 400))
    for prefix in (100, 400):
        share = Counter(prompt.domain for prompt in drawn[:prefix])["chat"] / prefix
        assert 0.15 < share < 0.35  # 10 / (30 + 10), where plain shuffling gives 0.1
    math = [prompt for prompt in drawn if prompt.domain == "math"]
    assert len(set(math)) == len(math), "a domain repeats itself only when it is used up"
    assert drawn == list(itertools.islice(prompt_stream(prompts, seed=3), 400))
    assert drawn != list(itertools.islice(prompt_stream(prompts, seed=4), 400))


def test_batches_see_everything_once_an_epoch_and_resume_anywhere() -> None:
    responses = responses_of_lengths(*range(3, 40))
    per_epoch = -(-len(responses) // 4)
    epoch = list(itertools.islice(batches(responses, 4, seed=0), 2 * per_epoch))
    for half in (epoch[:per_epoch], epoch[per_epoch:]):
        assert sorted(int(n) for _, batch in half for n in batch.lengths) == list(range(3, 40))
    first, second = ([batch.lengths.tolist() for _, batch in half] for half in (epoch[:per_epoch], epoch[per_epoch:]))
    assert first != second, "epochs differ in order"
    for start in (1, per_epoch - 1, per_epoch + 2):
        step, batch = next(batches(responses, 4, seed=0, start=start))
        assert step == start
        assert torch.equal(batch.token_ids, epoch[start][1].token_ids)


def test_batches_waste_little_padding() -> None:
    responses = responses_of_lengths(*range(3, 203))
    padded = sum(b.token_ids.numel() for _, b in itertools.islice(batches(responses, 8, seed=0), 25))
    assert padded < 1.1 * sum(len(response.token_ids) for response in responses)


def test_padding_masks_and_cutting() -> None:
    batch = pad([Response((9, 8, 7, 6, 5), ((1, 2), (3, 5))), Response((4, 3), ((1, 2),))], max_length=4)
    assert batch.token_ids.tolist() == [[9, 8, 7, 6], [4, 3, 0, 0]]
    assert batch.response_mask.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert batch.lengths.tolist() == [4, 2]


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
