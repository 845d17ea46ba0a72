"""Files of prompts and responses, and the batches that training reads.

Knows JSON lines, shuffling and the draft vocabulary; knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """User turns of one conversation; the target answers each in order."""

    turns: tuple[str, ...]
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """One conversation in token ids; the tokens inside the spans were written by the target."""

    token_ids: tuple[int, ...]
    response_spans: tuple[Span, ...]
    """Half-open [start, end) ranges of token_ids, in order, none empty, none overlapping, none starting at 0."""
    domain: str = ""
    prompt_index: int = -1
    """Which conversation of the prompt stream this is (of a conversation's several lines, too); what resuming reads."""

    @property
    def num_response_tokens(self) -> int:
        return sum(end - start for start, end in self.response_spans)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file of {"turns": [...], "domain"?: ...}. Raises ValueError naming the line."""
    prompts = []
    # Not splitlines(): JSON allows U+2028 and others of its line ends inside a string.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            turns = entry["turns"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{path}, line {number}: expected an object like {{"turns": ["..."]}}') from error
        if not turns or not isinstance(turns, list) or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f"{path}, line {number}: turns must be a list of at least one non-empty string")
        prompts.append(Prompt(tuple(turns), str(entry.get("domain", ""))))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def prompt_stream(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    """Endless, deterministic; every domain is equally likely at every place.

    What a file holds most of is rarely what is served most, so a domain counts once, whatever its size. Each domain is
    shuffled, and starts over when it is used up: at a temperature, a second answer is another answer.
    """
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    dice = random.Random(seed)
    endless = [_endless(members, random.Random(f"{seed} {name}")) for name, members in sorted(domains.items())]
    while True:
        yield next(dice.choice(endless))


def _endless(prompts: list[Prompt], dice: random.Random) -> Iterator[Prompt]:
    while True:
        yield from dice.sample(prompts, len(prompts))


def response_line(response: Response) -> str:
    """One line of a response file, with its newline."""
    return (
        json.dumps(
            {
                "token_ids": response.token_ids,
                "response_spans": response.response_spans,
                "domain": response.domain,
                "prompt_index": response.prompt_index,
            },
            separators=(",", ":"),
        )
        + "\n"
    )


def read_responses(path: Path) -> list[Response]:
    """Responses of a file that `synthesize` wrote, or is still writing: a torn last line is left out."""
    responses = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                break
            try:
                responses.append(_parse_response(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a response ({error})") from error
    return responses


def fingerprint(responses: Iterable[Response]) -> str:
    """Tells whether two runs learn from the same: tokens, and which of them the target wrote."""
    digest = hashlib.sha256()
    for response in responses:
        digest.update(repr((response.token_ids, response.response_spans)).encode())
    return digest.hexdigest()


def _parse_response(entry: dict[str, object]) -> Response:
    token_ids, spans = entry["token_ids"], entry["response_spans"]
    if not isinstance(token_ids, list) or not isinstance(spans, list):
        raise ValueError("token_ids and response_spans must be lists")
    response = Response(
        tuple(token_ids),
        tuple((int(start), int(end)) for start, end in spans),
        str(entry.get("domain", "")),
        int(str(entry.get("prompt_index", -1))),
    )
    previous_end = 1
    for start, end in response.response_spans:
        if not previous_end <= start < end <= len(token_ids):
            raise ValueError(f"span [{start}, {end}) is empty, overlaps another or lies outside 1..{len(token_ids)}")
        previous_end = end
    return response


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Which rows make each batch of an epoch: every row once, the last batch may be smaller.

    Deterministic, so that resuming needs only a step number. Batches hold rows of similar length: shuffled, sorted by
    length within pools of 32 batches, and the batches shuffled again.
    """
    if not lengths:
        raise ValueError("there are no responses to train on")
    dice = random.Random(f"{seed} {epoch}")
    shuffled = dice.sample(range(len(lengths)), len(lengths))
    batches: list[list[int]] = []
    for pool_start in range(0, len(shuffled), 32 * batch_size):
        pool = sorted(shuffled[pool_start : pool_start + 32 * batch_size], key=lengths.__getitem__)
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    dice.shuffle(batches)
    return batches


def draft_vocabulary(responses: Iterable[Response], size: int, always: Sequence[int] = ()) -> tuple[Tensor, float]:
    """The `size` most frequent response tokens and the share of all response tokens that they cover.

    Sorted int64 target ids [size]. `always` (the end tokens) are in it whatever their counts; where the responses use
    fewer than `size` different tokens, the lowest unused ids fill it up.
    """
    counts: Counter[int] = Counter()
    for response in responses:
        for start, end in response.response_spans:
            counts.update(response.token_ids[start:end])
    if not len(set(always)) <= size:
        raise ValueError(f"a draft vocabulary of {size} can't hold the {len(set(always))} tokens that it must")
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = list(dict.fromkeys([*always, *ranked]))[:size]
    taken = set(chosen)
    unused = (token for token in range(2 * size) if token not in taken)
    chosen += [next(unused) for _ in range(size - len(chosen))]
    covered = sum(counts[token] for token in chosen)
    return torch.tensor(sorted(chosen)), covered / max(1, counts.total())


def provenance(**facts: object) -> dict[str, object]:
    """What made a file: the command, versions, machine and time, and `facts` of the caller's own."""
    return {
        "command": ["python", "-m", "drafter", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("torch", "transformers")}},
        **facts,
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Written beside its place and renamed, so that nobody ever reads half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
