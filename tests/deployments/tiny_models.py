"""Tiny random models that speak SmolLM2's vocabulary, so that the server can serve them, with a drafter for each."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from cluster.profiler import _provenance
from cluster.shard import Shard
from cluster.sps import CostCurve, DraftSample, VerifySample
from deployments.config import parse_config
from deployments.tokenizer import Tokenizer
from drafter.checkpoint import save_checkpoint
from drafter.config import DrafterConfig
from drafter.dspark import DSpark

VOCAB_SIZE = 49152
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class TinyModel:
    folder: Path
    drafter_folder: Path
    truth: Any
    """Hugging Face's."""
    tokenizer: Tokenizer

    def greedy_text(self, prompt: list[int], num_tokens: int) -> str:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.truth.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
            )
        return b"".join(map(self.tokenizer.text_bytes, out[0, len(prompt) :].tolist())).decode(errors="replace")


def tiny_llama(folder: Path, tokenizer_folder: Path) -> TinyModel:
    torch.manual_seed(0)
    return _saved(LlamaForCausalLM(LlamaConfig(**SHAPE)), folder, tokenizer_folder)


def tiny_mixtral(folder: Path, tokenizer_folder: Path) -> TinyModel:
    torch.manual_seed(0)
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return _saved(MixtralForCausalLM(config), folder, tokenizer_folder)


def _saved(model: Any, folder: Path, tokenizer_folder: Path) -> TinyModel:
    model = model.float().eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "model")
    for path in tokenizer_folder.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(path, folder / "model")
    save_checkpoint(_drafter(model), folder / "drafter", torch.float32)
    return TinyModel(folder / "model", folder / "drafter", model, Tokenizer(folder / "model"))


def _drafter(model: Any) -> DSpark:
    """Random weights: it proposes, and hardly any proposal passes."""
    target_ids = torch.arange(64) * (VOCAB_SIZE // 64)
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=len(target_ids),
        num_target_layers=4,
        target_layer_ids=(0, 2),
        block_size=4,
        mask_token_id=0,
        markov_rank=8,
    )
    torch.manual_seed(1)
    weight = model.get_input_embeddings().weight.detach()
    return DSpark(config, weight, weight[target_ids], target_ids).eval().requires_grad_(False)


def keep_curve(path: Path, settings: dict[str, Any]) -> None:
    """A curve of this very engine on which a draft costs as much as it does on a loaded GPU. The times are long, so
    that whatever real steps take, all of the curve is corrected alike (to its limit, a quarter)."""
    config = parse_config(settings).engine_config()
    samples = [VerifySample(n, 100, 10.0 + n) for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    CostCurve.fit(
        samples, [DraftSample(1, 1, 0.01), DraftSample(16, 1, 0.01)], _provenance(config, Shard.load(config))
    ).save(path)


def model_args(model: TinyModel, model_id: str, **engine_kwargs: Any) -> dict[str, Any]:
    """The part of an application's `args` that says what is served; in float32, so that texts can be compared."""
    return {
        "model_loading_config": {"model_id": model_id, "model_source": str(model.folder)},
        "engine_kwargs": {
            "drafter_source": str(model.drafter_folder),
            "dtype": "float32",
            "num_threads": 1,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            "num_kv_blocks": 512,
            **engine_kwargs,
        },
    }
