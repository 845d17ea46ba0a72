"""Detokenising and stop strings, on the real tokenizer and on a plain one-token-per-piece table."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cluster.messages import TokenLogprobs
from deployments.text_stream import TextStream
from deployments.tokenizer import Tokenizer, _byte_fallback

TEXT = "Zürich — 東京, naïve café, 👩‍👩‍👧 and 🏳️‍🌈!\n\tend"


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(model_folder)


def stream_of(pieces: list[bytes], stop: tuple[str, ...] = (), min_tokens: int = 0) -> TextStream:
    """A stream whose token i stands for pieces[i]."""
    return TextStream(pieces.__getitem__, stop, min_tokens)


def feed(stream: TextStream, ids: list[int], cuts: set[int]) -> list[str]:
    """The texts that come out when the tokens come in steps that end at `cuts`."""
    texts, start = [], 0
    for end in sorted({cut for cut in cuts if 0 < cut < len(ids)} | {len(ids)}):
        texts.append(stream.push(ids[start:end]).text)
        start = end
    texts.append(stream.finish().text)
    return texts


def test_encode_and_render_are_the_models_own(tokenizer: Tokenizer, reference: AutoTokenizer) -> None:
    assert list(tokenizer.encode(TEXT)) == reference(TEXT)["input_ids"]
    rendered = reference.decode(tokenizer.render([{"role": "user", "content": TEXT}]))
    assert rendered.endswith(f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.end_token_ids == (2,)


def test_whole_characters_one_token_at_a_time(tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode(TEXT))
    texts = feed(TextStream(tokenizer.text_bytes), ids, set(range(len(ids))))
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)
    assert len([text for text in texts if not text]) > 5, "the test is about characters of several tokens"


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_ids_in_any_steps_decode_as_the_reference(
    tokenizer: Tokenizer, reference: AutoTokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cuts = data.draw(st.sets(st.integers(1, 30)))
    text = "".join(feed(TextStream(tokenizer.text_bytes), ids, cuts))
    assert text == reference.decode(ids, skip_special_tokens=True)


def test_special_tokens_have_a_name_but_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.text_bytes(2) == b""
    assert tokenizer.name_bytes(2) == b"<|im_end|>"


def test_byte_fallback_alphabet() -> None:
    assert _byte_fallback("\u2581Hello") == b" Hello"
    assert _byte_fallback("<0xE2>") == b"\xe2"


def test_an_unfinished_character_is_not_lost_at_the_end() -> None:
    stream = stream_of([b"a", b"\xe2\x82"])
    assert stream.push([0, 1]).text == "a"
    assert stream.finish().text == "\ufffd"


@given(
    pieces=st.lists(st.text(alphabet="abé", min_size=0, max_size=3), max_size=12),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 12)),
)
def test_stop_strings_end_the_text_where_they_start(pieces: list[str], stop: list[str], cuts: set[int]) -> None:
    """Against the definition: the shortest token prefix that holds a stop string, cut at the first one's start."""
    whole, num_tokens = "", 0
    for piece in pieces:
        whole, num_tokens = whole + piece, num_tokens + 1
        if any(s in whole for s in stop):
            break
    starts = [whole.find(s) for s in stop if s in whole]
    stream = stream_of([piece.encode() for piece in pieces], tuple(stop))
    assert "".join(feed(stream, list(range(len(pieces))), cuts)) == (whole[: min(starts)] if starts else whole)
    assert stream.stopped == bool(starts)
    assert stream.num_tokens == num_tokens, "tokens after the stop string don't count"


def test_possible_beginnings_of_a_stop_string_wait_and_nothing_else_does() -> None:
    stream = stream_of([b"one E", b"N", b"D", b"x", b"END", b"late"], ("END",))
    assert stream.push([0]).text == "one "
    assert stream.push([1]).text == ""
    assert stream.push([3]).text == "ENx"
    assert stream.push([0, 1, 2, 5]).text == "one "
    assert stream.stopped
    assert stream.finish().text == ""


def test_what_waits_is_delivered_at_the_end() -> None:
    stream = stream_of([b"one E", b"N"], ("END",))
    assert stream.push([0, 1]).text + stream.finish().text == "one EN"


def test_stop_string_across_bytes_of_a_character() -> None:
    stream = stream_of([b"x\xe2", b"\x82", b"\xacy"], ("€",))
    assert [stream.push([i]).text for i in range(3)] == ["x", "", ""]
    assert stream.stopped


def test_min_tokens_exempts_the_first_text() -> None:
    stream = stream_of([b"END", b"a", b"END"], ("END",), min_tokens=2)
    assert stream.push([0, 1, 2]).text == "ENDa"
    assert stream.stopped
    assert stream.num_tokens == 3


def test_tokens_are_shown_with_their_text_and_not_past_the_stop() -> None:
    logprobs = [TokenLogprobs(float(-i), ()) for i in range(5)]
    stream = stream_of([b"a", b"bE", b"N", b"D", b"late"], ("END",))
    assert [token.token_id for token in stream.push([0, 1, 2], logprobs[:3]).tokens] == [0, 1]
    assert stream.push([3, 4], logprobs[3:]).tokens == ()
    assert stream.finish().tokens == ()
    assert stream.num_tokens == 4


def test_shown_tokens_know_their_offset_and_logprob() -> None:
    logprobs = [TokenLogprobs(float(-i), ()) for i in range(4)]
    stream = stream_of([b"ab", b"", b"\xe2", b"\x82\xac"])
    tokens = stream.push([0, 1, 2, 3], logprobs).tokens
    assert [(token.token_id, token.offset, token.logprobs) for token in tokens] == [
        (0, 0, logprobs[0]),
        (1, 2, logprobs[1]),
        (2, 2, logprobs[2]),
        (3, 2, logprobs[3]),
    ]


def test_the_end_token_counts_and_is_not_shown() -> None:
    stream = stream_of([b"a"])
    stream.push([0])
    stream.push_end()
    assert stream.num_tokens == 2
    assert stream.finish().tokens == ()
