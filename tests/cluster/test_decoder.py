"""The decoder against Hugging Face's own models: tiny random weights, fp32, the same rows in every ragged shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cluster.flat_batch import flatten
from cluster.kv_cache import PagedKV
from cluster.messages import Span
from cluster.models.decoder import Decoder
from cluster.models.loader import load_decoder
from drafter.packing import padded_rows

BLOCK = 4
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 6,
    "q_lora_rank": 18,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "num_nextn_predict_layers": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**SIZES, head_dim=6, tie_word_embeddings=True),
    "llama-untied-bias": LlamaConfig(
        **SIZES, head_dim=8, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "llama3-rope": LlamaConfig(**SIZES, head_dim=8, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**SIZES, head_dim=8, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True
    ),
    "qwen3-moe-some-dense": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, mlp_only_layers=[1]
    ),
    "deepseek-v3": DeepseekV3Config(**DEEPSEEK, first_k_dense_replace=1),
    "deepseek-v3-dense": DeepseekV3Config(**DEEPSEEK, first_k_dense_replace=4),
}


class Pair:
    """The same weights twice: Hugging Face's model and ours, with pages and the block tables of a few sequences."""

    def __init__(self, config: PretrainedConfig, folder: Path) -> None:
        torch.manual_seed(0)
        self.reference: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():  # fresh norms are all ones and fresh biases all zeros: a bug there would not show
            for parameter in self.reference.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, buffer in self.reference.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
        self.reference.save_pretrained(folder)
        self.decoder: Decoder = load_decoder(folder, torch.float32)
        self.decoder.pads = not self.decoder.moe_layers  # as where products are packed, which fp32 ones aren't
        self.kv: PagedKV = self.decoder.make_kv(64, BLOCK)
        self.tokens = torch.randint(
            3, SIZES["vocab_size"], (4, 60), generator=torch.Generator().manual_seed(1)
        ).tolist()
        shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist()
        self.blocks = [shuffled[16 * i : 16 * (i + 1)] for i in range(4)]

    def span(self, sequence: int, start: int, end: int) -> Span:
        return Span(self.tokens[sequence][start:end], start, self.blocks[sequence], end - start)

    def run(self, spans: list[Span], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """(logits of the wanted rows, features of all rows)"""
        batch = flatten(spans, BLOCK)
        hidden, features = self.decoder.forward(batch, self.kv, taps)
        return self.decoder.logits(hidden.index_select(0, batch.logits_rows_M)), features

    @torch.no_grad()
    def expected(self, tokens: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        output = self.reference(torch.tensor([tokens]), output_hidden_states=True)
        return output.logits[0], tuple(state[0] for state in output.hidden_states)


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(CONFIGS[request.param], tmp_path_factory.mktemp("model"))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_prefill_equals_hugging_face_and_so_do_the_taps(pair: Pair) -> None:
    logits, features = pair.run([pair.span(0, 0, 60)], taps=(2, 0))
    expected, states = pair.expected(pair.tokens[0])
    close(logits, expected)
    close(features, torch.cat((states[3], states[1]), -1))


def test_chunked_prefill_then_single_rows(pair: Pair) -> None:
    bounds = [0, 7, 8, 21, *range(22, 30), 60]
    logits = torch.cat([pair.run([pair.span(1, a, b)])[0] for a, b in zip(bounds, bounds[1:], strict=False)])
    close(logits, pair.expected(pair.tokens[1])[0])


def test_mixed_batch_of_decode_rows_verify_rows_and_prefill_chunks(pair: Pair) -> None:
    pair.run([pair.span(0, 0, 33), pair.span(1, 0, 9), pair.span(2, 0, 20)])
    spans = [pair.span(0, 33, 34), pair.span(1, 9, 14), pair.span(2, 20, 47), pair.span(3, 0, 25)]
    logits, features = pair.run(spans, taps=(1,))
    ends = [34, 14, 47, 25]
    references = [pair.expected(pair.tokens[i][:end]) for i, end in enumerate(ends)]
    rows = [slice(span.start, end) for span, end in zip(spans, ends, strict=True)]
    close(logits, torch.cat([logits[part] for (logits, _), part in zip(references, rows, strict=True)]))
    close(features, torch.cat([states[2][part] for (_, states), part in zip(references, rows, strict=True)]))


def test_padding_is_written_nowhere(pair: Pair) -> None:
    assert padded_rows(21) > 21
    kv = pair.decoder.make_kv(64, BLOCK)
    batch = flatten([pair.span(0, 0, 9), pair.span(1, 0, 12)], BLOCK)
    hidden, features = pair.decoder.forward(batch, kv, (0,))
    assert len(hidden) == len(features) == 21
    for slots in kv._layer_slots:
        written = slots.abs().sum(1).nonzero()[:, 0]
        assert written.tolist() == sorted(batch.slots_N.tolist())


def test_only_the_wanted_logits_rows(pair: Pair) -> None:
    spans = [Span(pair.tokens[0][:10], 0, pair.blocks[0], 1), Span(pair.tokens[1][:6], 0, pair.blocks[1], 0)]
    spans.append(Span(pair.tokens[2][:5], 0, pair.blocks[2], 2))
    logits, _ = pair.run(spans)
    expected = [pair.expected(pair.tokens[0][:10])[0][-1:], pair.expected(pair.tokens[2][:5])[0][-2:]]
    close(logits, torch.cat(expected))


def test_rejected_rows_are_written_over(pair: Pair) -> None:
    pair.run([pair.span(0, 0, 20)])
    wrong = Span([5, 6, 7, 8, 9, 10], 20, pair.blocks[0], 6)
    pair.run([wrong])  # a verify whose drafts are all rejected: the committed length stays 20
    logits, _ = pair.run([pair.span(0, 20, 23)])
    close(logits, pair.expected(pair.tokens[0][:23])[0][20:])
    later, _ = pair.run([pair.span(0, 23, 24)])  # rows 24.. still hold rejected keys, which nobody may see
    close(later, pair.expected(pair.tokens[0][:24])[0][23:])


def test_sequences_share_the_blocks_of_a_prefix(pair: Pair) -> None:
    pair.run([pair.span(0, 0, 8)])
    shared = pair.blocks[0][:2]
    first = Span([*pair.tokens[0][8:12]], 8, [*shared, *pair.blocks[1][2:]], 4)
    second = Span([*pair.tokens[2][:7]], 8, [*shared, *pair.blocks[2][2:]], 7)
    logits, _ = pair.run([first, second])
    ones = [pair.expected(pair.tokens[0][:8] + list(span.token_ids))[0][8:] for span in (first, second)]
    close(logits, torch.cat(ones))


def test_greedy_equals_generate(pair: Pair) -> None:
    prompts = [tokens[: 5 + 4 * i] for i, tokens in enumerate(pair.tokens)]
    sequences = [list(prompt) for prompt in prompts]
    spans = [Span(prompt, 0, pair.blocks[i], 1) for i, prompt in enumerate(prompts)]
    for _ in range(24):
        logits, _ = pair.run(spans)
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.append(token)
        spans = [Span(seq[-1:], len(seq) - 1, pair.blocks[i], 1) for i, seq in enumerate(sequences)]
    for prompt, sequence in zip(prompts, sequences, strict=True):
        inputs = torch.tensor([prompt])
        reference = pair.reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )[0].tolist()
        # `generate` suppresses the end token below min_new_tokens; ours doesn't, so compare up to it.
        end = sequence.index(2, len(prompt)) if 2 in sequence[len(prompt) :] else len(sequence)
        assert sequence[:end] == reference[:end]


def test_bf16_follows_fp32(tmp_path: Path) -> None:
    pair = Pair(CONFIGS["llama-tied"], tmp_path)
    low = load_decoder(tmp_path, torch.bfloat16)
    batch = flatten([pair.span(0, 0, 40)], BLOCK)
    hidden, _ = low.forward(batch, low.make_kv(64, BLOCK))
    expected = pair.expected(pair.tokens[0][:40])[0]
    error = (low.logits(hidden).float() - expected).norm() / expected.norm()
    assert 0 < error < 0.03


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 16, "use_sliding_window": True}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        ({"num_hidden_layers": 5}, r"lacks the tensor 'model\.layers\.4"),
        ({"num_hidden_layers": 3}, "no place for"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama-tied"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        load_decoder(tmp_path, torch.float32)
