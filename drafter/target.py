"""The frozen target for offline work, on Hugging Face's modules: features for training, text for training data.

Knows transformers, chat rendering and fast batched sampling on a CPU; knows nothing of drafters, pages or requests.

Shape letters: B rows of a batch, T tokens, K tapped layers, D hidden size, V vocabulary, H key/value heads, C head
size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter.packing import freeze_linears
from drafter.source import resolve_source

Message = dict[str, str]
Key = TypeVar("Key")
_REFILL_SHARE = 8
"""Rows are refilled, or dropped, when one in this many is free: a prefill of several costs less than several."""
_CLEARED_AHEAD = 64
_PREFILL_ROWS = 4
"""Prompts in one prefill forward: enough rows for full speed, few enough to stay in the processor's cache."""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a resolved model folder; it must have a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer in {folder} has no chat template, so it can't render conversations")
    return tokenizer


def render_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to and including the header of the assistant's next turn.

    The only rendering there is: training, synthesis, evaluation and serving all see these ids.
    """
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
    return [int(token) for token in ids]


def render_user_header(tokenizer: Any) -> list[int]:
    """Token ids up to where the first user turn starts: fed only these, the target writes a user turn of its own."""
    marker = "\x00user\x00"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return [int(token) for token in tokenizer(text.split(marker)[0], add_special_tokens=False)["input_ids"]]


class RowCache:
    """Keys and values of B independent rows, preallocated: what transformers' attention layers call a cache.

    A step writes its tokens at each row's own positions, so rows of different lengths share a batch without padding on
    the left, and a row is reused by starting again at position 0. Memory that no row has come near is never touched.
    """

    def __init__(self, num_layers: int, shape_BHTC: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.keys = [torch.empty(shape_BHTC, dtype=dtype) for _ in range(num_layers)]
        self.values = [torch.empty(shape_BHTC, dtype=dtype) for _ in range(num_layers)]
        self._rows = torch.empty(0)
        self._positions = torch.empty(0)
        self._visible = 0
        self._cleared = 0

    def begin(self, rows_B: Tensor, positions_BT: Tensor, visible: int) -> None:
        """Say where the next forward writes; attention then sees the first `visible` positions (0: only the new)."""
        self._rows, self._positions, self._visible = rows_B[:, None], positions_BT, visible
        if (reach := int(positions_BT.max()) + 1) > self._cleared:
            # A masked value counts 0 times, which is still NaN if fresh memory happens to hold one.
            for tensor in (*self.keys, *self.values):
                tensor[:, :, self._cleared : reach + _CLEARED_AHEAD] = 0
            self._cleared = reach + _CLEARED_AHEAD

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, T, C] and return what attention reads (transformers' interface)."""
        self.keys[layer][self._rows, :, self._positions] = keys.transpose(1, 2)
        self.values[layer][self._rows, :, self._positions] = values.transpose(1, 2)
        if not self._visible:
            return keys, values
        seen = slice(None) if len(self._rows) == len(self.keys[layer]) else self._rows[:, 0]
        return self.keys[layer][seen, :, : self._visible], self.values[layer][seen, :, : self._visible]

    def move(self, rows_B: Tensor, places_BS: Tensor, start_B: Tensor) -> None:
        """Copy what lies at places [B, S] of rows [B] to start, start + 1, ...: the branch that a tree's walk took."""
        goal_BS = start_B[:, None] + torch.arange(places_BS.shape[1])
        for tensor in (*self.keys, *self.values):
            tensor[rows_B[:, None], :, goal_BS] = tensor[rows_B[:, None], :, places_BS]

    def keep(self, rows: list[int]) -> None:
        """Drop every row but these, in this order."""
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype)
                tensors[layer][:, :, : self._cleared] = tensor[rows, :, : self._cleared]


@dataclass(slots=True)
class _Row(Generic[Key]):
    key: Key
    prompt_length: int
    token_ids: list[int] = field(default_factory=list)


class Target:
    """A frozen language model with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, folder: Path, freeze: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.folder = folder
        self.config = model.config
        self.dtype: torch.dtype = model.dtype
        self.embed_weight_VD: Tensor = model.get_input_embeddings().weight
        self.lm_head_weight_VD: Tensor = model.get_output_embeddings().weight
        self.end_token_ids = _end_token_ids(model, tokenizer)
        if freeze:
            freeze_linears(model)

    @classmethod
    def load(cls, source: str, dtype: torch.dtype = torch.bfloat16) -> Target:
        """Load any source that `resolve_source` knows."""
        folder = resolve_source(source)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        return cls(model, load_tokenizer(folder), folder, freeze=True)

    @torch.no_grad()  # not inference_mode: training keeps these tensors for its backward pass
    def features(self, token_ids_BT: Tensor, layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Taps [B, T, K*D] (outputs of the 0-based layers, concatenated) and hidden [B, T, D] after the final norm.

        Rows are padded on the RIGHT with any id: attention is causal, so padding changes nothing before it.
        """
        with self._tapped(layer_ids) as taps:
            hidden_BTD = self.model.base_model(token_ids_BT, use_cache=False).last_hidden_state
        return torch.cat([taps[layer_id] for layer_id in layer_ids], dim=-1), hidden_BTD

    @torch.inference_mode()
    def cached_features(
        self, tokens: Tensor, positions: Tensor, cache: RowCache, rows: Tensor, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """`features` of tokens [B, S] at increasing positions [B, S] of the cache's `rows` [B]; it is extended by them.

        A token sees its row's cache up to itself, so writing a position again takes back what stood there and after.
        """
        visible = int(positions.max()) + 1
        cache.begin(rows, positions, visible)
        mask = (torch.arange(visible) <= positions[..., None])[:, None]
        with self._tapped(layer_ids) as taps:
            hidden_BSD = self._forward(tokens, positions, mask, cache)
        return torch.cat([taps[layer_id] for layer_id in layer_ids], dim=-1), hidden_BSD

    @torch.inference_mode()
    def tree_features(
        self,
        tokens: Tensor,
        depths: Tensor,
        seen: Tensor,
        start: Tensor,
        cache: RowCache,
        rows: Tensor,
        layer_ids: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """`features` of token trees: tokens and depths [B, S] of the nodes, seen [B, S, S] bool: ancestors and itself.

        Node s of row b is written to the cache's place start[b] + s, although it stands at position start[b] + depth:
        siblings share a position. It sees the cache of its row before start [B], and its ancestors.
        """
        places = start[:, None] + torch.arange(tokens.shape[1])
        visible = int(places.max()) + 1
        cache.begin(rows, places, visible)
        mask = (torch.arange(visible) < start[:, None])[:, None].repeat(1, tokens.shape[1], 1)
        mask.scatter_(2, places[:, None].expand_as(seen), seen)
        with self._tapped(layer_ids) as taps:
            hidden_BSD = self._forward(tokens, start[:, None] + depths, mask[:, None], cache)
        return torch.cat([taps[layer_id] for layer_id in layer_ids], dim=-1), hidden_BSD

    @contextlib.contextmanager
    def _tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """The outputs of these layers, by layer, of the forward inside the block."""
        taps: dict[int, Tensor] = {}

        def tap(layer_id: int) -> Callable[[nn.Module, object, Tensor], None]:
            return lambda _module, _inputs, output: taps.__setitem__(layer_id, output)

        layers = self.model.base_model.layers
        hooks = [layers[layer_id].register_forward_hook(tap(layer_id)) for layer_id in layer_ids]
        try:
            yield taps
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in the model's dtype of rows [..., D] after the final norm."""
        result: Tensor = self.model.get_output_embeddings()(hidden)
        return result

    @torch.inference_mode()
    def generate(
        self,
        next_prompt: Callable[[], tuple[Key, list[int]] | None],
        *,
        temperature: float,
        max_new_tokens: int,
        batch_size: int,
        max_length: int,
        generator: torch.Generator,
    ) -> Iterator[tuple[Key, list[int]]]:
        """Answer prompts as they come, `batch_size` at a time; yields (key, response) in the order of completion.

        `next_prompt()` gives a key and prompt ids, or None when there is none for now (a yielded answer may lead to
        another prompt); it ends when there is none and nothing is running. A response ends with an end token, or is cut
        after `max_new_tokens`, or when prompt and response reach `max_length`. Freed rows are refilled in groups; when
        prompts run out, the batch shrinks. Temperature 0 takes the most likely token.
        """
        rows: list[_Row[Key] | None] = [None] * batch_size
        cache = self.row_cache(batch_size, max_length)
        while True:
            free = [slot for slot, row in enumerate(rows) if row is None]
            if len(free) * _REFILL_SHARE >= len(rows):
                started = self._prefill(cache, rows, free, next_prompt, temperature, generator)
                if started < len(free):
                    kept = [slot for slot, row in enumerate(rows) if row is not None]
                    rows = [rows[slot] for slot in kept]
                    cache.keep(kept)
            else:
                self._decode(cache, rows, temperature, generator)
            if not rows:
                return
            for slot, row in enumerate(rows):
                if row is not None and self._finished(row, max_new_tokens, max_length):
                    rows[slot] = None
                    yield row.key, row.token_ids

    def row_cache(self, batch_size: int, max_length: int) -> RowCache:
        """An empty cache for `batch_size` rows of up to `max_length` tokens."""
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch_size, config.num_key_value_heads, max_length, head_dim)
        return RowCache(config.num_hidden_layers, shape, self.dtype)

    def _prefill(
        self,
        cache: RowCache,
        rows: list[_Row[Key] | None],
        free: list[int],
        next_prompt: Callable[[], tuple[Key, list[int]] | None],
        temperature: float,
        generator: torch.Generator,
    ) -> int:
        """Start prompts in free slots, and sample the first token of each; returns how many there were."""
        started: list[tuple[int, list[int]]] = []
        for slot in free:
            prompt = next_prompt()
            if prompt is None:
                break
            rows[slot] = _Row(prompt[0], len(prompt[1]))
            started.append((slot, prompt[1]))
        started.sort(key=lambda item: len(item[1]))  # rows of similar length together: little padding
        for first in range(0, len(started), _PREFILL_ROWS):
            self._prefill_rows(cache, rows, started[first : first + _PREFILL_ROWS], temperature, generator)
        return len(started)

    def _prefill_rows(
        self,
        cache: RowCache,
        rows: list[_Row[Key] | None],
        started: list[tuple[int, list[int]]],
        temperature: float,
        generator: torch.Generator,
    ) -> None:
        slots = torch.tensor([slot for slot, _ in started])
        lengths = torch.tensor([len(prompt) for _, prompt in started])
        padded = torch.zeros(len(started), int(lengths.max()), dtype=torch.int64)
        for index, (_, prompt) in enumerate(started):
            padded[index, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(padded.shape[1]).expand_as(padded)
        cache.begin(slots, positions, visible=0)
        causal = torch.ones(padded.shape[1], padded.shape[1], dtype=torch.bool).tril()[None, None]
        hidden = self._forward(padded, positions, causal, cache)[torch.arange(len(started)), lengths - 1]
        for slot, token in zip(slots.tolist(), self._sample(hidden, temperature, generator), strict=True):
            self._append(rows, slot, token)

    def _decode(
        self, cache: RowCache, rows: list[_Row[Key] | None], temperature: float, generator: torch.Generator
    ) -> None:
        """One token for every running row; a free slot repeats its position 0 and is not read."""
        tokens = torch.tensor([[row.token_ids[-1] if row else 0] for row in rows])
        positions = torch.tensor([[row.prompt_length + len(row.token_ids) - 1 if row else 0] for row in rows])
        visible = int(positions.max()) + 1
        cache.begin(torch.arange(len(rows)), positions, visible)
        mask = (torch.arange(visible) <= positions)[:, None, None]
        hidden = self._forward(tokens, positions, mask, cache)[:, 0]
        for slot, token in enumerate(self._sample(hidden, temperature, generator)):
            if rows[slot] is not None:
                self._append(rows, slot, token)

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: RowCache) -> Tensor:
        output = self.model.base_model(tokens, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _sample(self, hidden: Tensor, temperature: float, generator: torch.Generator) -> list[int]:
        logits = self.logits(hidden).float()
        if temperature == 0:
            return [int(token) for token in logits.argmax(-1)]
        return [int(token) for token in draw(torch.softmax(logits / temperature, dim=-1), generator)]

    @staticmethod
    def _append(rows: list[_Row[Key] | None], slot: int, token: int) -> None:
        row = rows[slot]
        assert row is not None
        row.token_ids.append(token)

    def _finished(self, row: _Row[Key], max_new_tokens: int, max_length: int) -> bool:
        num_tokens = len(row.token_ids)
        if num_tokens >= max_new_tokens or row.prompt_length + num_tokens >= max_length:
            return True
        return row.token_ids[-1] in self.end_token_ids


def draw(probabilities_BV: Tensor, generator: torch.Generator) -> Tensor:
    """One id [B] per row of fp32 probabilities, by inverse CDF, which on a CPU is faster than torch.multinomial."""
    cumulative = probabilities_BV.cumsum(-1)
    thresholds = torch.rand(len(cumulative), 1, generator=generator) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True)[:, 0].clamp(max=cumulative.shape[1] - 1)


def _end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The model's own end tokens (one, or a list, in its generation config) and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return tuple(sorted(int(token) for token in ids if token is not None))
