"""A tiny random Llama with Hugging Face as the truth, drafters of known quality, and an engine around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.messages import Request, SamplingParams, SlaTier, StepResult, TokenEvent
from cluster.models.loader import load_decoder
from cluster.shard import Shard
from drafter.baselines.chain import ChainDrafter
from drafter.checkpoint import build_drafter
from drafter.config import DrafterConfig, Family
from drafter.dspark import DSpark
from drafter.interface import Draft, Drafter, Sampler

TAPS = (0, 2)


def tiny_llama(folder: Path, vocab_size: int) -> tuple[Path, Any]:
    """A random model in fp32, saved where the engine loads it; its logits are spread enough to be no tie."""
    from transformers import LlamaConfig, LlamaForCausalLM  # here: processes that only run engines do without it

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.25,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    model = model.float().eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder, model


class TinyDrafter:
    """Proposes from logits that a function makes up; its context rows are the target's features themselves."""

    target_layer_ids = TAPS
    temperatures: tuple[float, ...] = ()
    """Its confidence is made up, not learned."""

    def __init__(
        self,
        logits: Callable[[int, int, int], Tensor],
        target_ids: Tensor,
        block_size: int = 4,
        confidence: float = 0.7,
        features_size: int = 64,
    ) -> None:
        """`logits(anchor, position, slot) -> [V]`, position being the anchor's."""
        self._logits = logits
        self.target_ids = target_ids
        self.block_size = block_size
        self.context_shape = (1, 1, features_size)
        self._confidence = confidence
        self.seen: list[tuple[int, int, Tensor, Tensor]] = []
        """(anchor, position, context keys [T, C], context values [T, C]) of every request of every propose."""

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        raise AssertionError("there is nothing to calibrate")

    def project_context(
        self, features: Tensor, positions: Tensor, next_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert next_tokens is not None
        values = torch.zeros_like(features)
        values[:, 0], values[:, 1] = positions, next_tokens
        return features[None, :, None, :], values[None, :, None, :]

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        context_lengths: Tensor,
        sampler: Sampler,
        num_slots: int,
    ) -> Draft:
        rows = list(zip(anchors.tolist(), positions.tolist(), strict=True))
        for r, (anchor, position) in enumerate(rows):
            length = int(context_lengths[r])
            assert length == position
            keys, values = context_keys[0, r, :length, 0].clone(), context_values[0, r, :length, 0].clone()
            self.seen.append((anchor, position, keys, values))
        drawn = [
            sampler(slot, torch.stack([self._logits(anchor, position, slot) for anchor, position in rows]))
            for slot in range(num_slots)
        ]
        ids = torch.stack([ids for ids, _ in drawn], dim=1)
        return Draft(
            tokens=self.target_ids[ids],
            draft_ids=ids,
            probabilities=torch.stack([p for _, p in drawn], dim=1),
            confidences=torch.full(ids.shape, self._confidence),
        )


def random_drafter(vocab_size: int, block_size: int = 4, spread: float = 1.0) -> TinyDrafter:
    """Knows nothing: logits from a seeded generator."""

    def logits(anchor: int, position: int, slot: int) -> Tensor:
        generator = torch.Generator().manual_seed(anchor * 100_003 + position * 101 + slot)
        return torch.randn(vocab_size, generator=generator) * spread

    return TinyDrafter(logits, torch.arange(vocab_size), block_size)


def knowing_drafter(references: list[list[int]], vocab_size: int, error_every: int = 5) -> TinyDrafter:
    """Nearly right: it has read the sequences, and errs at each `error_every`-th position. Half a vocabulary is enough
    for it: it drafts even token ids only."""
    following = {(tokens[i], i): tokens[i + 1 :] for tokens in references for i in range(len(tokens) - 1)}
    target_ids = torch.arange(0, vocab_size, 2)

    def logits(anchor: int, position: int, slot: int) -> Tensor:
        result = torch.zeros(len(target_ids))
        tokens = following.get((anchor, position), [])
        if slot < len(tokens) and (position + slot) % error_every:
            result[tokens[slot] // 2] = 20.0
        return result

    return TinyDrafter(logits, target_ids)


def dspark_drafter(model: Any, draft_vocab_size: int) -> DSpark:
    """The real thing with random weights, on the tiny model's embedding and every second row of its head."""
    parallel = {"num_hidden_layers": 2, "target_layer_ids": TAPS, "block_size": 5, "markov_rank": 8}
    drafter = _random_weights(model, draft_vocab_size, **parallel)
    assert isinstance(drafter, DSpark)
    return drafter


def chain_drafter(model: Any, family: Family, draft_vocab_size: int) -> ChainDrafter:
    """EAGLE-3 or MTP, likewise."""
    taps = TAPS if family == "eagle3" else (3,)
    chain = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 0, "enable_confidence_head": False}
    drafter = _random_weights(model, draft_vocab_size, family=family, target_layer_ids=taps, **chain)
    assert isinstance(drafter, ChainDrafter)
    return drafter


def _random_weights(model: Any, draft_vocab_size: int, **kind: Any) -> DSpark | ChainDrafter:
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=model.config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_target_layers=4,
        mask_token_id=0,
        **kind,
    )
    torch.manual_seed(1)
    weight = model.get_input_embeddings().weight.detach()
    target_ids = torch.arange(draft_vocab_size) * (model.config.vocab_size // draft_vocab_size)
    return build_drafter(config, weight, weight[target_ids], target_ids).eval().requires_grad_(False)


def make_engine(
    folder: Path, drafter: Drafter | None, curve: Any = None, tiers: tuple[SlaTier, ...] = (), **settings: Any
) -> Engine:
    defaults = {
        "model_source": str(folder),
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_block_size": 4,
        "num_kv_blocks": 512,
        "speculation": "fixed",
    }
    config = EngineConfig(**{**defaults, **settings})
    decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
    return Engine(config, Shard(decoder, drafter, config), curve, tiers=tiers)


_numbers = itertools.count()


def request(prompt: list[int], request_id: str = "", **sampling: Any) -> Request:
    sampling = {"max_tokens": 16, "temperature": 0.0, **sampling}
    return Request(
        request_id=request_id or f"r{next(_numbers)}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),
    )


class Outputs:
    """Collects what an engine emits."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, TokenEvent] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.steps: list[StepResult] = []

    def observe(self, result: StepResult) -> None:
        self.steps.append(result)
        for event in result.events:
            assert event.request_id not in self.last, "an event after the last one"
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            self.logprobs.setdefault(event.request_id, []).extend(event.logprobs or ())
            if event.finish_reason:
                self.last[event.request_id] = event


def run(engine: Engine, requests: list[Request], concurrency: int | None = None) -> Outputs:
    """Run the requests to their end, at most `concurrency` at once; then nothing may be left in the pool."""
    outputs, pending = Outputs(), list(requests)
    while pending or engine.has_work:
        while pending and (concurrency is None or len(engine.request_ids()) < concurrency):
            engine.add(pending.pop(0))
        outputs.observe(engine.step())
    assert engine.num_running == engine.num_waiting == 0
    return outputs


def prompts(count: int, vocab_size: int = 96, shortest: int = 1, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy_truth(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Hugging Face's own greedy continuation."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()
