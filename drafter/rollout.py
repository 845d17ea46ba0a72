"""Speculative decoding offline: what really happens when a drafter drafts for its target, round by round.

Many conversations advance in lockstep, each by its own accepted length; no pages, no scheduler, every slot verified.
Evaluation and calibration read the record. Knows prompts, the target and the drafter; knows nothing of metrics.

Shape letters: B conversations, T positions, G block positions, S rows of a block (1 + G), K tapped layers,
D hidden size, L draft layers, H heads, C head size, N rounds.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from drafter.baselines.chain import ChainDrafter
from drafter.baselines.ngram import NgramDrafter
from drafter.checkpoint import load_drafter
from drafter.data import prompt_stream, read_prompts, read_responses
from drafter.dspark import DSpark
from drafter.interface import Draft, Drafter
from drafter.speculative import SamplingRows, draft_sampler, round_seeds, verify
from drafter.target import RowCache, Target, render_chat


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt to answer, and the data set it belongs to."""

    dataset: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rounds:
    """N verify rounds."""

    conversation: Tensor
    """[N] int64 index into the conversations."""
    confidence_logits: Tensor
    """[N, G] fp32, not calibrated."""
    num_accepted: Tensor
    """[N] int64: drafts that passed verification."""
    num_tokens: Tensor
    """[N] int64: tokens committed, the recovered or bonus token included; an accepted end token is the last one."""
    num_slots: Tensor
    """[N] int64: slots whose outcome counts, those up to an accepted end token."""
    confidence_inputs: Tensor
    """[N, G, D + r]: what the confidence head computed the logits from; [N, G, 0] unless it was asked for."""


@dataclass(slots=True)
class Lane:
    """The tensors of the conversations that run at the same time, by absolute position."""

    cache: RowCache
    context_keys: Tensor
    """[L, B, T, H, C]"""
    context_values: Tensor
    tokens: list[list[int]]
    """Committed tokens; the last one is the anchor."""
    running: list[int]
    """Rows of B that have not ended."""


class Rollout:
    """Decodes conversations at one temperature with every draft verified."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        temperature: float,
        max_new_tokens: int,
        keep_inputs: bool = False,
        seed: int | None = None,
    ) -> None:
        """keep_inputs: record what the confidence head sees, too. seed: None takes a new one."""
        self._sts_temperatures = torch.ones(drafter.block_size)
        if isinstance(drafter, DSpark):
            self._sts_temperatures = drafter.sts_temperatures
        self._target = target
        self._drafter = drafter
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._rows_per_round = 1 + drafter.block_size
        self._seed = secrets.randbits(62) if seed is None else seed
        self._step = 0
        self._record: list[tuple[Tensor, ...]] = []
        self._inputs = torch.empty(0)
        if keep_inputs and isinstance(drafter, DSpark) and drafter.confidence_head is not None:
            drafter.confidence_head.register_forward_pre_hook(self._see_inputs)

    def _see_inputs(self, _head: nn.Module, inputs: tuple[Tensor, Tensor | None]) -> None:
        hidden, previous = inputs
        self._inputs = hidden if previous is None else torch.cat((hidden, previous.to(hidden.dtype)), dim=-1)

    @torch.inference_mode()
    def run(self, conversations: Sequence[Conversation], batch_size: int) -> Rounds:
        """All rounds of all conversations, in an order that doesn't matter."""
        order = sorted(range(len(conversations)), key=lambda index: len(conversations[index].prompt_ids))
        with tqdm(total=len(order), unit="conversation") as bar:
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                self._run_batch(chosen, [list(conversations[index].prompt_ids) for index in chosen], bar)
        return Rounds(*(torch.cat(column) for column in zip(*self._record, strict=True)))

    def _run_batch(self, indices: list[int], prompts: list[list[int]], bar: tqdm[None]) -> None:
        lane = self._prefill(prompts)
        limits = [len(prompt) + self._max_new_tokens for prompt in prompts]
        while lane.running:
            self._round(lane, indices)
            ended = [row for row in lane.running if self._ended(lane.tokens[row], limits[row], len(prompts[row]))]
            lane.running = [row for row in lane.running if row not in ended]
            bar.update(len(ended))

    def _ended(self, tokens: list[int], limit: int, prompt_length: int) -> bool:
        return len(tokens) >= limit or tokens[-1] in self._target.end_token_ids and len(tokens) > prompt_length

    def _prefill(self, prompts: list[list[int]]) -> Lane:
        longest = max(map(len, prompts))
        length = longest + self._max_new_tokens + self._rows_per_round
        layers, heads, size = self._drafter.context_shape
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in prompts])
        lane = Lane(
            cache=self._target.row_cache(len(prompts), length),
            context_keys=torch.zeros(layers, len(prompts), length, heads, size, dtype=self._target.dtype),
            context_values=torch.zeros(layers, len(prompts), length, heads, size, dtype=self._target.dtype),
            tokens=[list(prompt) for prompt in prompts],
            running=list(range(len(prompts))),
        )
        positions = torch.arange(longest).expand_as(padded)
        slots = torch.arange(len(prompts))
        ends = torch.tensor([len(ids) - 1 for ids in prompts])
        taps, hidden = self._forward(lane, slots, padded, positions)
        last = hidden[slots, ends]
        rows = self._rows(torch.tensor([len(ids) for ids in prompts]), torch.arange(len(prompts)))
        starts = torch.arange(len(prompts) + 1)
        first = verify(self._target.logits(last), starts, None, torch.zeros(len(prompts), dtype=torch.int64), rows)
        self._extend_context(lane, slots, taps, positions, _next_tokens(padded, ends, first.next_tokens))
        for tokens, token in zip(lane.tokens, first.next_tokens.tolist(), strict=True):
            tokens.append(token)
        lane.running = [row for row in lane.running if lane.tokens[row][-1] not in self._target.end_token_ids]
        return lane

    def _forward(self, lane: Lane, slots: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, S] at positions [B, S] of lanes `slots` [B]: features [B, S, K*D] and hidden [B, S, D]."""
        return self._target.cached_features(tokens, positions, lane.cache, slots, self._drafter.target_layer_ids)

    def _extend_context(
        self, lane: Lane, slots: Tensor, features: Tensor, positions: Tensor, next_tokens: Tensor
    ) -> None:
        """Write context rows at positions [B, S] of lanes `slots` [B].

        Rows of rejected drafts are written too: they lie at or after the next anchor, where nothing looks before the
        next round overwrites them.
        """
        keys, values = self._drafter.project_context(features, positions, next_tokens)
        lane.context_keys[:, slots[:, None], positions] = keys
        lane.context_values[:, slots[:, None], positions] = values

    def _rows(self, positions: Tensor, keys: Tensor) -> SamplingRows:
        """Sampling of rows that predict `positions` [M]; `keys` [M] int64 tells conversations apart."""
        size = len(positions)
        coupled = torch.zeros(size, dtype=torch.bool)
        self._step += 1
        return SamplingRows(
            temperature=torch.full((size,), self._temperature),
            top_k=torch.zeros(size, dtype=torch.int64),
            top_p=torch.ones(size),
            min_p=torch.zeros(size),
            seeds=round_seeds(self._seed + keys, coupled, self._step),
            positions=positions,
            coupled=coupled,
        )

    def _round(self, lane: Lane, indices: list[int]) -> None:
        block = self._drafter.block_size
        slots, anchors, at = self._anchors(lane)
        draft = self._propose(lane, slots, anchors, at)
        tokens = torch.cat((anchors[:, None], draft.tokens), dim=1)
        positions = at[:, None] + torch.arange(1 + block)
        features, hidden = self._forward(lane, slots, tokens, positions)
        logits = self._target.logits(hidden).flatten(0, 1)
        starts = torch.arange(len(slots) + 1) * (1 + block)
        rows = self._rows((positions + 1).flatten(), slots.repeat_interleave(1 + block))
        lengths = torch.full((len(slots),), block)
        result = verify(logits, starts, draft, lengths, rows, self._drafter.target_ids)
        next_tokens = _next_tokens(tokens, result.num_accepted, result.next_tokens)
        self._extend_context(lane, slots, features, positions, next_tokens)
        self._commit(lane, indices, draft.tokens, draft.confidences, result.num_accepted, result.next_tokens)

    def _anchors(self, lane: Lane) -> tuple[Tensor, Tensor, Tensor]:
        """Of the running lanes: slots, anchor tokens, and the anchors' positions, each [B]."""
        anchors = torch.tensor([lane.tokens[row][-1] for row in lane.running])
        at = torch.tensor([len(lane.tokens[row]) - 1 for row in lane.running])
        return torch.tensor(lane.running), anchors, at

    def _propose(self, lane: Lane, slots: Tensor, anchors: Tensor, at: Tensor) -> Draft:
        drafter, reach = self._drafter, int(at.max())
        sampler = draft_sampler(self._rows(at + 1, slots), drafter.block_size, drafter.target_ids)
        context = (lane.context_keys[:, slots, :reach], lane.context_values[:, slots, :reach])
        return drafter.propose(anchors, at, *context, at, sampler, drafter.block_size)

    def _commit(
        self,
        lane: Lane,
        indices: list[int],
        drafted: Tensor,
        confidences: Tensor,
        num_accepted: Tensor,
        next_tokens: Tensor,
    ) -> None:
        num_tokens, num_slots = [], []
        for row, accepted, proposed, token in zip(
            lane.running, num_accepted.tolist(), drafted.tolist(), next_tokens.tolist(), strict=True
        ):
            new = [*proposed[:accepted], token]
            end = next((i for i, t in enumerate(new) if t in self._target.end_token_ids), len(new) - 1)
            lane.tokens[row] += new[: end + 1]
            num_tokens.append(end + 1)
            # Slots behind an accepted end token were never a question.
            num_slots.append(end + 1 if end < accepted else self._drafter.block_size)
        logits = torch.logit(confidences.double().clamp(1e-9, 1 - 1e-9)).float() * self._sts_temperatures
        conversation = torch.tensor([indices[row] for row in lane.running])
        inputs = self._inputs if self._inputs.numel() else logits.new_empty(*logits.shape, 0)
        tokens, slots = torch.tensor(num_tokens), torch.tensor(num_slots)
        self._record.append((conversation, logits, num_accepted, tokens, slots, inputs))


def _next_tokens(tokens: Tensor, ends: Tensor, last: Tensor) -> Tensor:
    """The committed token behind each of tokens [B, S] up to column `ends` [B], whose own is `last` [B]."""
    behind = tokens.roll(-1, dims=1)
    behind[torch.arange(len(tokens)), ends] = last
    return behind


def add_rollout_arguments(
    parser: argparse.ArgumentParser, limit: int | None = None, max_new_tokens: int = 256, batch_size: int = 32
) -> None:
    """What `evaluate`, `calibrate` and `experiment` have in common; the other arguments are defaults."""
    parser.add_argument("--target", required=True, help="folder, hub id, or pypi:<package>==<version>")
    parser.add_argument("--prompts", required=True, type=Path, nargs="+", help="JSONL files; each is a data set")
    parser.add_argument("--exclude", type=Path, help="response file: prompts that were trained on are left out")
    parser.add_argument(
        "--limit", type=int, default=limit, help=f"prompts of each file, domains mixed (default: {limit or 'all'})"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, help="longest answer (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=batch_size, help="conversations at a time (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts (default: 0)")


def load_for_rollout(target: Target, folder: Path) -> DSpark | ChainDrafter | NgramDrafter:
    """The drafter of a checkpoint folder, or prompt look-up for `ngram`, unless that is a folder."""
    if str(folder) == "ngram" and not folder.exists():
        return NgramDrafter(7, target.config.vocab_size)
    drafter = load_drafter(folder, target.embed_weight_VD, target.lm_head_weight_VD, dtype=target.dtype)
    drafter.freeze()
    return drafter


def choose_conversations(target: Target, arguments: argparse.Namespace) -> list[Conversation]:
    """The prompts that the arguments name, rendered."""
    known = _trained_prompts(arguments.exclude) if arguments.exclude else set()
    conversations = []
    for path in arguments.prompts:
        prompts = read_prompts(path)
        limit = min(arguments.limit or len(prompts), len(prompts))
        chosen: dict[tuple[int, ...], None] = {}  # in order, each once
        # The stream is endless; small domains come round again before large ones are used up.
        for prompt in itertools.islice(prompt_stream(prompts, arguments.seed), 20 * len(prompts)):
            ids = tuple(render_chat(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}]))
            if ids not in known:
                chosen[ids] = None
            if len(chosen) == limit:
                break
        if not chosen:
            raise ValueError(f"{path}: no prompt is left after leaving out those of {arguments.exclude}")
        conversations += [Conversation(path.stem.removeprefix("eval_"), ids) for ids in chosen]
    return conversations


def _trained_prompts(responses: Path) -> set[tuple[int, ...]]:
    return {response.token_ids[: response.response_spans[0][0]] for response in read_responses(responses)}
