"""Tokens in, text out, for one choice: whole characters, nothing of a stop string, and each token once.

Knows bytes and stop strings; knows nothing of HTTP or of where tokens come from. The result does not depend on how the
tokens were cut into steps: they are looked at one by one, as plain decoding would have delivered them.

What counts: `num_tokens` counts every token up to and including the one that ended the answer (the end token, or the
one that completed a stop string), as vLLM does. A token is *shown* (and gets its logprob entry) when at least its first
character was delivered as text, or when it stands for no text; the end token and tokens inside a stop string are not.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token whose text was delivered."""

    token_id: int
    offset: int
    """Characters of the answer before it."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What can be delivered now."""

    text: str
    tokens: tuple[ShownToken, ...]


class TextStream:
    """Push tokens until `stopped`, or `finish`."""

    def __init__(self, text_bytes: Callable[[int], bytes], stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """`min_tokens`: stop strings within the text of that many first tokens don't count."""
        self._text_bytes = text_bytes
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        """Whole characters that may still turn out to start a stop string."""
        self._num_delivered = 0
        self._waiting: deque[tuple[ShownToken, bool]] = deque()
        """Tokens not yet shown, and whether they stand for text."""
        self.num_tokens = 0
        self.stopped = False
        """A stop string was completed; later tokens are none of the answer's."""

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> Piece:
        """Take the tokens of one step, up to the one that completes a stop string, and return what is certain."""
        text: list[str] = []
        for i, token_id in enumerate(token_ids):
            if self.stopped:
                break
            text.append(self._push_one(token_id, logprobs[i] if logprobs else None))
        return self._piece("".join(text))

    def push_end(self) -> None:
        """Count the end token: it has no text and isn't shown."""
        self.num_tokens += 1

    def finish(self) -> Piece:
        """All that is left. An unfinished character comes out as U+FFFD, as a decoder of the whole would have it."""
        if self.stopped:
            self._waiting.clear()
            return Piece("", ())
        text = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        self._num_delivered += len(text)
        piece = self._piece(text)
        rest = tuple(token for token, _ in self._waiting)  # tokens without text at the very end
        self._waiting.clear()
        return Piece(piece.text, piece.tokens + rest)

    def _push_one(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        """Returns the text that this token makes certain."""
        data = self._text_bytes(token_id)
        self._waiting.append((ShownToken(token_id, self._num_delivered + len(self._held), logprobs), bool(data)))
        self.num_tokens += 1
        self._held += self._utf8.decode(data)
        if self._stop and self.num_tokens > self._min_tokens:
            start = self._match()
            self.stopped = start is not None
            end = self._first_doubtful() if start is None else start
        else:
            end = len(self._held)
        text, self._held = self._held[:end], self._held[end:]
        self._num_delivered += len(text)
        return text

    def _match(self) -> int | None:
        """Where the first stop string in the held text starts."""
        starts = [start for stop in self._stop if (start := self._held.find(stop)) >= 0]
        return min(starts, default=None)

    def _first_doubtful(self) -> int:
        """Where the longest end of the held text that could begin a stop string starts."""
        longest = max(len(stop) for stop in self._stop) - 1
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return len(self._held)

    def _piece(self, text: str) -> Piece:
        shown = []
        while self._waiting:
            token, has_text = self._waiting[0]
            if token.offset >= self._num_delivered + (0 if has_text else 1):
                break
            shown.append(token)
            self._waiting.popleft()
        return Piece(text, tuple(shown))
