"""`python -m drafter train`: fit a drafter to a frozen target on the target's own responses.

Features are computed on the fly and never stored on disk; a bounded memory keeps those already seen, so that later
epochs need no target forward. What a step learns from is drafter/supervision.py's, the first weights are
drafter/initial.py's; here are Muon + AdamW, the schedule, and a run that survives being killed. Processes that torchrun
starts share the sequences of each step.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from drafter import synthesize
from drafter.baselines.chain import ChainDrafter
from drafter.checkpoint import read_config, save_checkpoint
from drafter.config import TrainConfig
from drafter.data import Response, draft_vocabulary, epoch_batches, fingerprint, provenance, read_responses, write_json
from drafter.dspark import DSpark
from drafter.initial import adapted_drafter, initial_drafter
from drafter.presets import PRESETS, Preset, preset_config
from drafter.ranks import ALONE, Ranks, joined_ranks
from drafter.supervision import Blocks, FeatureMemory, StepSummary, Totals, batch_loss, choose_anchors, step_totals
from drafter.target import Target


def learning_rate_factor(progress: float, config: TrainConfig) -> float:
    """Linear warm-up, then flat, then a cosine to 0 over the last `decay_fraction` of the budget."""
    if progress < config.warmup_fraction:
        return (progress + 1e-3) / (config.warmup_fraction + 1e-3)
    remaining = (1 - progress) / max(config.decay_fraction, 1e-9)
    return 1.0 if remaining >= 1 else 0.5 * (1 - math.cos(math.pi * max(remaining, 0.0)))


class Trainer:
    """Model, optimisers and position in the data; saved as one file, so that a killed run goes on where it was."""

    def __init__(
        self,
        model: DSpark | ChainDrafter,
        memory: FeatureMemory,
        responses: list[Response],
        config: TrainConfig,
        ranks: Ranks = ALONE,
        origin: dict[str, str | None] | None = None,
    ) -> None:
        """origin: what model and features come from, by name; a run that goes on has the same."""
        self.model = model
        self.memory = memory
        self.responses = responses
        if ranks.size > config.sequences_per_step:
            raise ValueError(
                f"--sequences-per-step {config.sequences_per_step} is too few: each of {ranks.size} processes needs one"
            )
        self.config = config
        self.ranks = ranks
        self.origin = origin or {}
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
        """One step of all processes; its means."""
        config = self.config
        indices = self.indices()
        responses = [self.responses[index] for index in indices]
        generator = torch.Generator().manual_seed((config.seed << 32) + self.step)
        blocks = choose_anchors(responses, config.anchors_per_sequence, self.model.block_size, generator)
        totals = step_totals(self.model, responses, blocks, config.position_decay)
        means = torch.zeros(3)
        for rows in self.ranks.share(len(indices), config.gradient_accumulation_steps):
            means += self._backward([indices[row] for row in rows], blocks.of(rows), totals)
        gradients = [_gradient(parameter) for parameter in self.model.parameters() if parameter.requires_grad]
        self.ranks.add_up([*gradients, means])
        self._update()
        self.slots += int(blocks.num_slots_M.sum())
        self.step += 1
        return StepSummary(*means.tolist())

    def _backward(self, indices: list[int], blocks: Blocks, totals: Totals) -> Tensor:
        """Adds the gradient of these sequences; their share of the step's means, in the order of StepSummary [3]."""
        responses = [self.responses[index] for index in indices]
        features = self.memory.get(indices, [response.token_ids for response in responses])
        distill = self._progress < self.config.distillation_fraction
        with torch.autocast("cpu", torch.bfloat16):
            loss, summary = batch_loss(self.model, responses, features, blocks, self.config, distill, totals)
        loss.backward()  # type: ignore[no-untyped-call]
        return torch.tensor(dataclasses.astuple(summary))

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(self._progress, self.config)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @property
    def _progress(self) -> float:
        return self.slots / self.config.slots

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "slots": self.slots,
            "step": self.step,
            "settings": self._settings,
            "num_responses": len(self.responses),
            "responses": fingerprint(self.responses),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote. Raises ValueError naming what that run had otherwise."""
        state = torch.load(path, weights_only=True)
        self._refuse_another(state, path.parent)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.slots, self.step = state["slots"], state["step"]

    def _refuse_another(self, state: dict[str, Any], folder: Path) -> None:
        """Raises ValueError naming what differs; what an older version didn't note is taken to be the same."""
        settings = self._settings
        different = [
            f"{name} {value}" for name, value in state.get("settings", {}).items() if settings.get(name) != value
        ]
        # A file that is still being written has only grown.
        if "responses" in state and state["responses"] != fingerprint(self.responses[: state["num_responses"]]):
            different.append("other responses")
        if different:
            raise ValueError(f"the run in {folder} is one of {', '.join(different)}; use another folder")

    @property
    def _settings(self) -> dict[str, object]:
        """All but what may change when a run goes on: its budget, and the parts in which a step is computed."""
        settings = {**self.origin, **dataclasses.asdict(self.model.config), **dataclasses.asdict(self.config)}
        del settings["slots"], settings["gradient_accumulation_steps"]
        return settings


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Its gradient; zeros where this process had nothing to do with it in this step."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = TrainConfig()
    parser.add_argument("--target", required=True, help="folder, hub id, or pypi:<package>==<version>")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--responses", type=Path, help="file written by `synthesize`")
    data.add_argument(
        "--prompts",
        type=Path,
        help="JSONL of your own traffic: the target answers it first, into OUTPUT/responses.jsonl",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder of the run; a run found there goes on")
    parser.add_argument("--init", type=Path, help="checkpoint folder to start from; its shape is kept")
    parser.add_argument("--preset", choices=list(PRESETS), help="default: dspark")
    parser.add_argument("--layers", type=int, help="draft layers (default: 2; eagle3 and mtp have 1)")
    parser.add_argument("--block-size", type=int, help="drafted tokens per block (default: 7; mtp: 1)")
    parser.add_argument("--markov-rank", type=int, help="rank of the sequential head (default: 256, or none)")
    parser.add_argument("--mask-token-id", type=int, help="reserved row of the embedding (default: 0)")
    parser.add_argument(
        "--draft-vocabulary", type=int, help="most frequent response tokens to draft (default: all, or --init's)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--feature-memory-gib", type=float, default=6.0, help="features that a process keeps (default: 6)"
    )
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0, help="between saves (default: 5)")
    for field in dataclasses.fields(TrainConfig):
        name = "--" + field.name.replace("_", "-")
        default = getattr(defaults, field.name)
        if isinstance(default, bool):
            parser.add_argument(name, action="store_true", help="default: off")
        elif field.name in _PRESET_LOSS:
            parser.add_argument(name, type=float, help=f"default: the preset's; {default} for dspark")
        else:
            parser.add_argument(name, type=type(default), default=default, help=f"default: {default}")


_PRESET_LOSS = ("distillation_fraction", "position_decay")
"""What both a preset and TrainConfig speak of."""


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError for arguments that contradict each other."""
    for name in ("preset", "layers", "block_size", "markov_rank", "mask_token_id"):
        if arguments.init is not None and getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} can't change the drafter that --init names: leave it out")


def run(arguments: argparse.Namespace) -> None:
    check_arguments(arguments)
    torch.set_num_threads(arguments.threads)
    preset = _preset(arguments)
    fields = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(TrainConfig)}
    fields |= {name: getattr(preset, name) for name in _PRESET_LOSS if fields[name] is None}
    config = TrainConfig(**fields)
    with joined_ranks() as ranks:
        path: Path = arguments.responses or arguments.output / "responses.jsonl"
        with ranks.leader_first():
            if ranks.is_leader:
                arguments.output.mkdir(parents=True, exist_ok=True)
                if arguments.responses is None:
                    _answer(arguments, path)
        responses = trainable(path, config.max_length, ranks)
        target = Target.load(arguments.target)
        with ranks.leader_first():
            model = _first_model(arguments, preset, responses, target)
        memory = FeatureMemory(target, model.target_layer_ids, int(arguments.feature_memory_gib * 2**30))
        trainer = Trainer(model, memory, responses, config, ranks, _origin(arguments))
        finish(trainer, arguments.output, arguments.checkpoint_minutes)


def _origin(arguments: argparse.Namespace) -> dict[str, str | None]:
    return {
        "target": arguments.target,
        "init": arguments.init and str(arguments.init),
        "prompts_sha256": arguments.prompts and hashlib.sha256(arguments.prompts.read_bytes()).hexdigest(),
    }


def _first_model(
    arguments: argparse.Namespace, preset: Preset, responses: list[Response], target: Target
) -> DSpark | ChainDrafter:
    """With the weights that training starts from."""
    target_ids = None
    if arguments.draft_vocabulary is not None:
        target_ids = run_vocabulary(arguments.output, arguments.draft_vocabulary, responses, target)
    torch.manual_seed(arguments.seed)
    if arguments.init is not None:
        return adapted_drafter(target, arguments.init, target_ids)
    if target_ids is None:
        target_ids = torch.arange(target.config.vocab_size)
    shape = preset_config(preset, target, len(target_ids), arguments.mask_token_id or 0)
    return initial_drafter(target, shape, target_ids)


def _preset(arguments: argparse.Namespace) -> Preset:
    """What the options ask for. A drafter that is trained on brings its shape, and the losses of its family."""
    if arguments.init is not None:
        family = read_config(arguments.init).family
        return PRESETS["dspark" if family == "block" else family]
    preset = PRESETS[arguments.preset or "dspark"]
    options = {
        "num_hidden_layers": arguments.layers,
        "block_size": arguments.block_size,
        "markov_rank": arguments.markov_rank,
    }
    return dataclasses.replace(preset, **{name: value for name, value in options.items() if value is not None})


def _answer(arguments: argparse.Namespace, path: Path) -> None:
    """Let the target answer --prompts into `path`, as `synthesize` does by default; earlier answers are kept."""
    parser = argparse.ArgumentParser()
    synthesize.add_arguments(parser)
    command = ["--target", arguments.target, "--prompts", str(arguments.prompts), "--output", str(path)]
    command += ["--threads", str(arguments.threads), "--seed", str(arguments.seed)]
    synthesize.run(parser.parse_args([*command, "--max-length", str(arguments.max_length)]))


def trainable(path: Path, max_length: int, ranks: Ranks) -> list[Response]:
    """The responses of a file that are not too long and have an anchor. Raises ValueError where none is left."""
    responses = read_responses(path)
    short = [response for response in responses if len(response.token_ids) <= max_length]
    left_out = f"{len(responses) - len(short)} of {len(responses)} responses are longer than {max_length} tokens"
    chosen = [response for response in short if any(end - start > 1 for start, end in response.response_spans)]
    if not chosen:
        raise ValueError(f"{path} holds nothing to train on: {left_out}, and no other has an answer of two tokens")
    if ranks.is_leader and len(short) < len(responses):
        tqdm.write(f"{path}: {left_out} and left out")
    return chosen


def run_vocabulary(folder: Path, size: int, responses: list[Response], target: Target) -> Tensor:
    """The draft vocabulary of the run in `folder`, fixed by its first start: later ones may count other responses."""
    if not 0 < size <= target.config.vocab_size:
        raise ValueError(f"--draft-vocabulary must lie in 1..{target.config.vocab_size}, got {size}")
    path = folder / "draft_vocabulary.pt"
    if not path.exists():
        ids, coverage = draft_vocabulary(responses, size, target.end_token_ids)
        tqdm.write(f"draft vocabulary: {len(ids)} tokens cover {coverage:.2%} of the responses")
        torch.save(ids, path)
    ids = torch.load(path, weights_only=True)
    assert isinstance(ids, Tensor)
    if len(ids) != size:
        raise ValueError(f"--draft-vocabulary: the run in {folder} has one of {len(ids)} tokens; keep it")
    return ids


def finish(trainer: Trainer, folder: Path, checkpoint_minutes: float) -> None:
    """Train to the end of the budget, from where `folder` has got to, and write its `checkpoint`."""
    state, written = folder / "state.pt", folder / "checkpoint" / "provenance.json"
    if state.exists():
        trainer.load(state)
    trainer.ranks.agree(
        step=trainer.step,
        responses=fingerprint(trainer.responses),
        settings=trainer.config,
        weights=float(sum(parameter.detach().double().abs().sum() for parameter in trainer.model.parameters())),
    )
    ended = trainer.slots >= trainer.config.slots
    if ended and written.exists() and written.stat().st_mtime >= state.stat().st_mtime:
        return  # the checkpoint is that of the state, and may have been calibrated since
    _train(trainer, state, checkpoint_minutes)
    if not trainer.ranks.is_leader:
        return
    save_checkpoint(trainer.model, folder / "checkpoint")
    facts = provenance(
        **trainer.origin,
        train=dataclasses.asdict(trainer.config),
        slots=trainer.slots,
        steps=trainer.step,
        processes=trainer.ranks.size,
        responses=len(trainer.responses),
        response_tokens=sum(response.num_response_tokens for response in trainer.responses),
    )
    write_json(written, facts)


def _train(trainer: Trainer, state: Path, checkpoint_minutes: float) -> None:
    budget, leads = trainer.config.slots, trainer.ranks.is_leader
    saved = time.monotonic()
    with tqdm(
        total=budget, initial=trainer.slots, unit="slot", unit_scale=True, smoothing=0.05, disable=not leads
    ) as bar:
        while trainer.slots < budget:
            summary = trainer.train_step()
            bar.update(trainer.slots - bar.n)
            bar.set_postfix(
                overlap=f"{summary.overlap:.3f}",
                cross_entropy=f"{summary.soft_cross_entropy:.3f}",
                confidence=f"{summary.confidence_loss:.3f}",
                refresh=False,
            )
            if leads and time.monotonic() - saved > 60 * checkpoint_minutes:
                trainer.save(state)
                saved = time.monotonic()
    if leads:
        trainer.save(state)
