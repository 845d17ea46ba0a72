"""The target's own text: sampling in batches, conversations, resuming. With a tiny random Llama."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafter.__main__ import main
from drafter.data import Response, read_responses, response_line
from drafter.synthesize import recover
from drafter.target import Target, draw, render_chat, render_user_header


def answers(target: Target, prompts: list[list[int]], **changes: int | float) -> dict[int, list[int]]:
    """Responses by prompt number."""
    options = {"temperature": 0.0, "max_new_tokens": 12, "batch_size": 4, "max_length": 64, **changes}
    waiting = list(enumerate(prompts))[::-1]
    generator = torch.Generator().manual_seed(0)
    generated = target.generate(lambda: waiting.pop() if waiting else None, generator=generator, **options)  # type: ignore[arg-type]
    return dict(generated)


def random_prompts(count: int) -> list[list[int]]:
    torch.manual_seed(5)
    return [torch.randint(3, 97, (length,)).tolist() for length in torch.randint(1, 20, (count,)).tolist()]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_greedy_text_is_that_of_the_plain_model_whatever_the_batch(tiny_target: Target, batch_size: int) -> None:
    prompts = random_prompts(11)
    found = answers(tiny_target, prompts, batch_size=batch_size)
    for number, prompt in enumerate(prompts):
        expected = tiny_target.model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert found[number] == expected[0, len(prompt) :].tolist()


def test_responses_end_with_an_end_token_or_at_a_limit(tiny_target: Target) -> None:
    prompts = random_prompts(60)
    found = answers(tiny_target, prompts, temperature=3.0, max_new_tokens=40, max_length=48, batch_size=16)
    assert found.keys() == set(range(60))
    reasons = Counter()
    for number, response in found.items():
        assert 2 not in response[:-1]
        room = min(40, 48 - len(prompts[number]))
        reasons["end" if response[-1] == 2 else "limit"] += 1
        assert len(response) == room or (response[-1] == 2 and len(response) < room)
    assert min(reasons["end"], reasons["limit"]) > 5, "both must occur for this test to mean something"


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([[0.0, 0.2, 0.5, 0.0, 0.3]]).expand(20_000, -1)
    counts = torch.bincount(draw(probabilities, torch.Generator().manual_seed(1)), minlength=5)
    expected = torch.tensor([0.2, 0.5, 0.3]) * 20_000
    assert counts[0] == counts[3] == 0
    assert float(((counts[[1, 2, 4]] - expected) ** 2 / expected).sum()) < 13.8  # chi-square, 2 degrees, p = 0.001


def test_sampled_tokens_follow_the_models_distribution(tiny_target: Target) -> None:
    prompt = [1, 5, 9]
    found = answers(tiny_target, [prompt] * 1500, temperature=0.3, max_new_tokens=2, batch_size=500)
    likely = Counter(response[0] for response in found.values()).most_common(1)[0][0]
    first = [response[0] for response in found.values()]
    second = [response[1] for response in found.values() if response[0] == likely]
    assert len(second) > 200
    assert _distance(first, tiny_target, prompt) < 0.12
    assert _distance(second, tiny_target, [*prompt, likely]) < 0.15
    assert _distance(second, tiny_target, prompt) > 0.25, "the negative control"


def _distance(tokens: list[int], target: Target, context: list[int]) -> float:
    """Total variation between the tokens' frequencies and the model's distribution at temperature 0.3."""
    hidden = target.features(torch.tensor([context]), [0])[1][0, -1]
    frequencies = torch.bincount(torch.tensor(tokens), minlength=97) / len(tokens)
    return float((frequencies - (target.logits(hidden) / 0.3).softmax(-1)).abs().sum() / 2)


def test_features_are_the_layers_outputs_and_padding_changes_nothing(tiny_target: Target) -> None:
    tokens = torch.randint(3, 97, (2, 9))
    taps, hidden = tiny_target.features(tokens, [1, 4])
    reference = tiny_target.model(tokens, output_hidden_states=True)
    torch.testing.assert_close(taps, torch.cat([reference.hidden_states[2], reference.hidden_states[5]], -1))
    torch.testing.assert_close(tiny_target.logits(hidden), reference.logits)
    alone_taps, alone_hidden = tiny_target.features(tokens[:1, :6], [1, 4])
    torch.testing.assert_close(taps[:1, :6], alone_taps)
    torch.testing.assert_close(hidden[:1, :6], alone_hidden)
    weight = torch.ones(128, requires_grad=True)
    (taps * weight).sum().backward()  # training reads the taps: they must not be inference tensors


def test_rendering_ends_where_the_next_speaker_starts(chat_model: Path) -> None:
    tokenizer = Target.load(str(chat_model)).tokenizer
    header = tokenizer.decode(render_user_header(tokenizer))
    assert header == "<start>system\nbe kind<end>\n<start>user\n"
    rendered = tokenizer.decode(render_chat(tokenizer, [{"role": "user", "content": "hi"}]))
    assert rendered == header + "hi<end>\n<start>assistant\n"


Synthesize = Callable[..., list[Response]]


@pytest.fixture
def synthesize(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Synthesize:
    """Runs the command in this process; returns what its file holds."""

    def run(prompts: list[dict[str, object]] | None, *options: str) -> list[Response]:
        source = "self"
        if prompts is not None:
            (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
            source = str(tmp_path / "prompts.jsonl")
        output = tmp_path / "out" / "responses.jsonl"
        command = ["drafter", "synthesize", "--target", str(chat_model), "--prompts", source]
        options = ("--output", str(output), "--threads", "1", "--max-new-tokens", "20", *options)
        monkeypatch.setattr(sys, "argv", [*command, *options])
        main()
        return read_responses(output)

    return run


def texts(chat_model: Path, response: Response) -> str:
    text: str = Target.load(str(chat_model)).tokenizer.decode(response.token_ids)
    return text


def test_the_target_answers_every_turn(synthesize: Synthesize, chat_model: Path, tmp_path: Path) -> None:
    prompts: list[dict[str, object]] = [{"turns": [f"first {i}", "second"], "domain": "chat"} for i in range(5)]
    responses = synthesize(prompts, "--batch-size", "4")
    assert {response.prompt_index for response in responses} == set(range(5))
    for index in range(5):
        mine = [response for response in responses if response.prompt_index == index]
        assert sum(len(response.response_spans) for response in mine) == 2
        last = texts(chat_model, mine[-1])
        assert last.startswith("<start>system\nbe kind<end>\n<start>user\nfirst ")
        assert "<end>\n<start>user\nsecond<end>\n<start>assistant\n" in last, "a later turn sees the earlier ones"
    for response in responses:
        for start, end in response.response_spans:
            assert 1 not in response.token_ids[start : end - 1]
            assert end - start == 20 or response.token_ids[end - 1] == 1
    facts = json.loads((tmp_path / "out" / "responses.jsonl.provenance.json").read_text())
    assert facts["counts"]["conversations"] == 5
    assert facts["counts"]["response_tokens"] == sum(response.num_response_tokens for response in responses)
    assert len(facts["prompts_sha256"]) == 64


def test_it_writes_its_own_user_turns(synthesize: Synthesize, chat_model: Path) -> None:
    responses = synthesize(None, "--limit", "3", "--batch-size", "2")
    assert {response.prompt_index for response in responses} == {0, 1, 2}
    for response in responses:
        text = texts(chat_model, response)
        assert text.startswith("<start>system\nbe kind<end>\n<start>user\n")
        ((start, _),) = response.response_spans
        before = Target.load(str(chat_model)).tokenizer.decode(response.token_ids[:start])
        assert before.endswith("<end>\n<start>assistant\n"), "only the answer counts as a response"


def test_a_killed_run_is_taken_up_again(synthesize: Synthesize, tmp_path: Path) -> None:
    prompts: list[dict[str, object]] = [{"turns": [f"prompt {i}"]} for i in range(8)]
    first = synthesize(prompts, "--limit", "5")
    output = tmp_path / "out" / "responses.jsonl"
    kept = output.read_bytes()
    lines = kept.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:4]) + lines[4][:30])  # killed in the middle of the fifth line
    resumed = synthesize(prompts)
    assert resumed[:4] == first[:4]
    assert output.read_bytes().startswith(b"".join(lines[:4]))
    assert sorted(response.prompt_index for response in resumed) == list(range(8))


@pytest.mark.parametrize("ending", ["", "\n", '\n{"turns": ["b"]}'])
def test_a_file_that_it_did_not_write_is_left_as_it_is(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a"]}' + ending)
    with pytest.raises(ValueError, match=r"prompts\.jsonl.* not a response"):
        recover(path)
    assert path.read_text() == '{"turns": ["a"]}' + ending


@pytest.mark.parametrize("size", [1, 5, 20])
def test_the_beginning_of_a_response_is_cut_off(tmp_path: Path, size: int) -> None:
    path = tmp_path / "responses.jsonl"
    line = response_line(Response((5, 6, 7), ((1, 3),)))
    for kept in ("", line):
        path.write_text(kept + line[:size])
        assert len(recover(path)) == bool(kept)
        assert path.read_text() == kept


def test_the_budget_of_response_tokens_ends_it_without_cutting_answers(synthesize: Synthesize) -> None:
    prompts: list[dict[str, object]] = [{"turns": [f"prompt {i}"]} for i in range(50)]
    responses = synthesize(prompts, "--max-response-tokens", "100", "--batch-size", "2", "--max-length", "512")
    total = sum(response.num_response_tokens for response in responses)
    assert 100 <= total <= 100 + 2 * 20
    assert all(r.num_response_tokens == 20 or r.token_ids[-1] == 1 for r in responses)


def test_a_prompt_with_no_room_for_an_answer_is_left_out(synthesize: Synthesize) -> None:
    responses = synthesize([{"turns": ["x" * 100]}, {"turns": ["y"]}], "--max-length", "90")
    assert [len(response.response_spans) for response in responses] == [1]
    assert all(len(response.token_ids) <= 90 for response in responses)


def test_endless_synthesis_is_refused(synthesize: Synthesize) -> None:
    with pytest.raises(SystemExit, match="--prompts self never ends"):
        synthesize(None)
