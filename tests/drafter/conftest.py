"""A tiny random Llama and a drafter for it, shared by the drafter's tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafter.config import DrafterConfig, default_target_layer_ids
from drafter.data import Response
from drafter.dspark import DSpark
from drafter.target import Target

VOCABULARY = 97
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<start>system\nbe kind<end>\n{% endif %}"
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def tiny_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)  # sharper than at initialisation, so that there is something to learn
    folder: Path = tmp_path_factory.mktemp("tiny-target")
    model.save_pretrained(folder)
    return Target(model, SimpleNamespace(eos_token_id=2, chat_template=""), folder)


@pytest.fixture(scope="session")
def tiny_responses(tiny_target: Target) -> list[Response]:
    torch.manual_seed(1)
    prompts = torch.randint(3, VOCABULARY, (48, 4))
    sequences = tiny_target.model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=40, min_new_tokens=40, top_k=0
    )
    return [Response(tuple(sequence.tolist()), ((4, 44),)) for sequence in sequences]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama over bytes with a chat template, on disk."""
    folder = tmp_path_factory.mktemp("chat-model")
    specials = ["<start>", "<end>"]
    words = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<start>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def drafter_config(**changes: object) -> DrafterConfig:
    values: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "num_target_layers": 8,
        "target_layer_ids": default_target_layer_ids(8),
        "block_size": 5,
        "mask_token_id": 0,
        "markov_rank": 8,
        "max_position_embeddings": 256,
    }
    return DrafterConfig(**{**values, **changes})  # type: ignore[arg-type]


def random_drafter(config: DrafterConfig, seed: int = 0) -> DSpark:
    """Every tensor random: heads that start at zero would hide a misplaced index."""
    torch.manual_seed(seed)
    target_ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    model = DSpark(config, embedding, embedding[target_ids], target_ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()
