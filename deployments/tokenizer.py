"""The model's tokenizer as the service needs it: text to ids, and each id to the bytes it stands for.

Knows the two byte alphabets in use (byte-level BPE and SentencePiece with byte fallback). A token's bytes don't depend
on its neighbours, so text can be put together byte by byte in linear time; text_stream.py does that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from cluster.messages import InvalidRequestError
from drafter.target import load_tokenizer, render_chat


class Tokenizer:
    """Loaded once per process; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """`folder`: a resolved model folder. Raises ValueError when its tokenizer's alphabet isn't known."""
        self._tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
        config = json.loads((folder / "config.json").read_text())
        self.vocab_size: int = config["vocab_size"]
        self.end_token_ids = _end_token_ids(folder, config, self._tokenizer.eos_token_id)
        self._bytes = _token_bytes(self._tokenizer, self.vocab_size)
        self._special: dict[int, bytes] = {
            token_id: token.content.encode()
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        }

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text as the model was trained to see it, its own start token included where it has one."""
        return tuple(self._tokenizer(text)["input_ids"])

    def render(self, conversation: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """The ids of a conversation (`role`, `content`) up to the assistant's next turn, by the model's template.

        Raises InvalidRequestError when the template refuses it, as some do for an order of roles.
        """
        try:
            return tuple(render_chat(self._tokenizer, conversation))
        except TemplateError as error:
            raise InvalidRequestError("messages", f"the model's chat template refuses them: {error}") from None

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text: nothing for special tokens and for ids without a token."""
        return self._bytes[token_id]

    def name_bytes(self, token_id: int) -> bytes:
        """What the token is called in logprobs: its text, and for special tokens their name."""
        return self._special.get(token_id, self._bytes[token_id])


def _end_token_ids(folder: Path, config: dict[str, Any], eos_token_id: int | None) -> tuple[int, ...]:
    """Every id that any of the model's files declares as its end, ascending."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    ids: set[int] = set()
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), eos_token_id):
        ids.update([value] if isinstance(value, int) else value or ())
    return tuple(sorted(ids))


def _token_bytes(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> list[bytes]:
    """[vocab_size] the bytes of each id."""
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    if '"ByteLevel"' in decoder:
        to_bytes = _byte_level
    elif '"ByteFallback"' in decoder:
        to_bytes = _byte_fallback
    else:
        raise ValueError(f"the tokenizer decodes by {decoder}; known are ByteLevel and ByteFallback")
    table = [b""] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size:
            table[token_id] = to_bytes(token)
    for token_id, added in tokenizer.added_tokens_decoder.items():
        if token_id < vocab_size:
            table[token_id] = b"" if added.special else added.content.encode()
    return table


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself where it prints, else the next free code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
