"""Training data from the target itself: it answers prompts, or writes both sides of a conversation.

Knows conversations, resuming and the response file; knows nothing of how the target computes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from drafter.data import (
    Prompt,
    Response,
    Span,
    prompt_stream,
    provenance,
    read_prompts,
    read_responses,
    response_line,
    write_json,
)
from drafter.target import Message, Target, render_chat, render_user_header


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder, hub id, or pypi:<package>==<version>")
    parser.add_argument(
        "--prompts",
        required=True,
        help='JSONL file of {"turns": [...], "domain"?: ...}, or "self": the target writes the user turns too. '
        "Keep evaluation prompts (eval_*.jsonl) out: a drafter trained on them can't be measured with them",
    )
    parser.add_argument("--output", required=True, type=Path, help="response file; appended to when it exists")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=384, help="longest answer of a turn (default: 384)")
    parser.add_argument("--max-length", type=int, default=2048, help="longest conversation in tokens (default: 2048)")
    parser.add_argument("--batch-size", type=int, default=64, help="conversations at a time (default: 64)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--limit", type=int, help="conversations (default: as many as there are prompts)")
    parser.add_argument("--max-response-tokens", type=int, help="start no conversation after this many response tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffling and the sampling (default: 0)")


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    prompts = None if arguments.prompts == "self" else read_prompts(Path(arguments.prompts))
    limit = arguments.limit or (len(prompts) if prompts else None)
    if limit is None and arguments.max_response_tokens is None:
        raise ValueError("--prompts self never ends by itself: give --limit or --max-response-tokens")
    done = recover(arguments.output)
    stream = prompt_stream(prompts, arguments.seed) if prompts else itertools.repeat(Prompt(()))
    queue = ConversationQueue(itertools.islice(stream, limit), done, arguments.max_response_tokens)
    target = Target.load(arguments.target)
    facts = {
        "target": arguments.target,
        "prompts": arguments.prompts,
        "prompts_sha256": hashlib.sha256(Path(arguments.prompts).read_bytes()).hexdigest() if prompts else None,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
    }
    with arguments.output.open("a", encoding="utf-8") as file:
        synthesize(target, queue, file, arguments)
    responses = read_responses(arguments.output)
    facts["counts"] = {
        "conversations": len({response.prompt_index for response in responses}),
        "responses": len(responses),
        "response_tokens": sum(response.num_response_tokens for response in responses),
    }
    write_json(arguments.output.with_name(arguments.output.name + ".provenance.json"), provenance(**facts))


def recover(output: Path) -> list[Response]:
    """What an earlier run left in `output`, after cutting a last line that it didn't finish.

    Raises ValueError for a file that `synthesize` didn't write, and leaves it as it is.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    output.touch()
    responses = read_responses(output)
    content = output.read_bytes()
    end = content.rfind(b"\n") + 1
    begin = response_line(Response((), ())).partition("]")[0].encode()
    if not begin.startswith(content[end : end + len(begin)]):
        raise ValueError(f"--output: {output} is not a response file; give another, or a new one")
    with output.open("rb+") as file:
        file.truncate(end)
    return responses


@dataclass(slots=True)
class Conversation:
    """One conversation under way: what was said, and which tokens of it the target wrote."""

    index: int
    domain: str
    turns: deque[str]
    """User turns still to come."""
    writes_user: bool
    """The next text is a user turn, which the target writes too."""
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    earlier: list[Response] = field(default_factory=list)

    def prompt(self, tokenizer: Any) -> list[int]:
        """Token ids to continue.

        A later turn is rendered from text, as a server would render it. Mostly that repeats the ids so far; where text
        and ids disagree (a text has several spellings in tokens), the ids so far become a response of their own.
        """
        rendered = render_user_header(tokenizer) if self.writes_user else render_chat(tokenizer, self.messages)
        if self.spans and rendered[: len(self.token_ids)] != self.token_ids:
            self.earlier.append(self.response())
            self.spans = []
        self.token_ids = rendered
        return rendered

    def add(self, token_ids: list[int], tokenizer: Any) -> None:
        """Take what the target wrote: a user turn, or an answer."""
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        if self.writes_user:
            self.writes_user = False
            self.messages.append({"role": "user", "content": text.strip()})
            return
        self.messages.append({"role": "assistant", "content": text})
        self.spans.append((len(self.token_ids), len(self.token_ids) + len(token_ids)))
        self.token_ids = self.token_ids + token_ids

    def next_turn(self) -> bool:
        """Add the next user turn; False when the conversation is over."""
        if self.messages and self.messages[-1]["role"] == "user":
            return True
        if not self.turns:
            return False
        self.messages.append({"role": "user", "content": self.turns.popleft()})
        return True

    def response(self) -> Response:
        return Response(tuple(self.token_ids), tuple(self.spans), self.domain, self.index)


class ConversationQueue:
    """Which conversation goes next: one with another turn before a new one, and none that an earlier run finished."""

    def __init__(self, prompts: Iterable[Prompt], done: Sequence[Response], max_response_tokens: int | None) -> None:
        finished = {response.prompt_index for response in done}
        self._new: Iterator[tuple[int, Prompt]] = (
            (index, prompt) for index, prompt in enumerate(prompts) if index not in finished
        )
        self._waiting: deque[Conversation] = deque()
        self._max_response_tokens = max_response_tokens
        self.num_done = len(finished)
        self.num_response_tokens = sum(response.num_response_tokens for response in done)

    def next(self) -> Conversation | None:
        if self._waiting:
            return self._waiting.popleft()
        if self._max_response_tokens is not None and self.num_response_tokens >= self._max_response_tokens:
            return None
        index, prompt = next(self._new, (0, None))
        if prompt is None:
            return None
        conversation = Conversation(index, prompt.domain, deque(prompt.turns), writes_user=not prompt.turns)
        conversation.next_turn()
        return conversation

    def put_back(self, conversation: Conversation) -> None:
        self._waiting.append(conversation)


def synthesize(target: Target, queue: ConversationQueue, file: TextIO, arguments: argparse.Namespace) -> None:
    """Run the queue to its end; each finished conversation is written and flushed at once."""
    tokenizer, max_length = target.tokenizer, arguments.max_length
    # A resumed run draws other numbers than the run before it did.
    generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + queue.num_response_tokens)

    def next_prompt() -> tuple[Conversation, list[int]] | None:
        while (conversation := queue.next()) is not None:
            prompt = conversation.prompt(tokenizer)
            if len(prompt) < max_length:
                return conversation, prompt
            finish(conversation)  # no room for an answer
        return None

    def finish(conversation: Conversation) -> None:
        responses = [*conversation.earlier, *([conversation.response()] if conversation.spans else [])]
        file.writelines(response_line(response) for response in responses)
        file.flush()
        queue.num_done += bool(responses)

    total = arguments.max_response_tokens
    with tqdm(total=total, initial=queue.num_response_tokens, unit="tok", smoothing=0.05, mininterval=1) as bar:
        answers = target.generate(
            next_prompt,
            temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
            batch_size=arguments.batch_size,
            max_length=max_length,
            generator=generator,
        )
        for conversation, token_ids in answers:
            was_user_turn = conversation.writes_user
            conversation.add(token_ids, tokenizer)
            if not was_user_turn:
                queue.num_response_tokens += len(token_ids)
                bar.update(len(token_ids))
            if conversation.next_turn():
                queue.put_back(conversation)
            else:
                finish(conversation)
            bar.set_postfix(conversations=queue.num_done, refresh=False)
