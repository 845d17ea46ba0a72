"""Drafters of one target under equal conditions: trains what is missing, decodes with it, and remembers both.

An arm is one drafter; arms that several experiments share are trained and decoded once. Whatever was finished before a
kill is found again in the runs folder, and a training that was cut goes on. Knows training and decoding; knows nothing
of what the experiments make of the records.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from drafter.baselines.ngram import NgramDrafter
from drafter.calibration import calibrate
from drafter.checkpoint import load_drafter
from drafter.config import TrainConfig
from drafter.data import write_json
from drafter.dspark import DSpark
from drafter.initial import initial_drafter
from drafter.interface import Drafter
from drafter.presets import PRESETS, preset_config
from drafter.ranks import Ranks
from drafter.rollout import Conversation, Rollout, Rounds, choose_conversations
from drafter.supervision import FeatureMemory
from drafter.target import Target
from drafter.train import Trainer, finish, run_vocabulary, trainable
from drafter.tree_rollout import TreeRollout

BASE_SLOTS = 1_000_000
"""Supervised block positions of each arm at --budget 1: about a quarter of an hour on one core with features in memory,
twice that for the first arm, which computes them."""
SAVE_MINUTES = 5.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One drafter of an experiment."""

    preset: str
    """One of PRESETS, or "ngram"."""
    layers: int = 2
    block_size: int = 7
    full_vocabulary: bool = False
    detach_confidence: bool = False

    @property
    def name(self) -> str:
        """Its folder; says all that it is."""
        marks = ("-full-vocabulary" * self.full_vocabulary, "-detached" * self.detach_confidence)
        return f"{self.preset}-{self.layers}x{self.block_size}{''.join(marks)}"

    @property
    def is_trained(self) -> bool:
        return self.preset in PRESETS


@dataclass(frozen=True, slots=True)
class Record:
    """What decoding the evaluation prompts with one drafter gave."""

    conversations: Sequence[Conversation]
    rounds: Rounds


class Laboratory:
    """One target, its responses, and the arms trained on them with one budget."""

    def __init__(self, target: Target, arguments: argparse.Namespace, ranks: Ranks) -> None:
        """arguments: of `python -m drafter experiment`. ranks: the processes that train together."""
        self.target = target
        self._ranks = ranks
        self.slots = max(1, int(BASE_SLOTS * arguments.budget))
        self._arguments = arguments
        self._responses = trainable(arguments.responses, TrainConfig().max_length, ranks)
        self._root: Path = arguments.runs / f"{self.slots}-slots"
        with ranks.leader_first():
            self._claim_root()
        self._memory: FeatureMemory | None = None
        self._memory_layers: tuple[int, ...] = ()
        self._conversations: list[Conversation] | None = None

    def _claim_root(self) -> None:
        """Note what its drafters are trained with; ValueError naming what differs from what lies there already."""
        arguments = self._arguments
        names = ["target", "draft_vocabulary", "markov_rank", "mask_token_id", "seed"]
        names += ["sequences_per_step", "anchors_per_sequence"]
        settings = {name: getattr(arguments, name) for name in names} | {"response_tokens": self.num_response_tokens}
        path = self._root / "laboratory.json"
        if not path.exists():
            self._root.mkdir(parents=True, exist_ok=True)
            write_json(path, settings)
        known = json.loads(path.read_text())
        different = [f"{name} {known.get(name)}" for name, value in settings.items() if known.get(name) != value]
        if different:
            raise ValueError(
                f"--runs: the drafters in {self._root} are those of {', '.join(different)}; use another folder"
            )

    @property
    def num_response_tokens(self) -> int:
        return sum(response.num_response_tokens for response in self._responses)

    def train(self, arms: Sequence[Arm]) -> None:
        """Train those that aren't yet, one after the other; says how long the rest will take."""
        missing = [arm for arm in arms if arm.is_trained and not self._is_complete(arm)]
        for number, arm in enumerate(missing):
            self._say(f"[{number + 1}/{len(missing)}] training {arm.name}, {self.slots:,} slots")
            started = time.monotonic()
            self._train(arm)
            seconds, left = time.monotonic() - started, len(missing) - number - 1
            if left:
                minutes = seconds / 60
                self._say(f"took {minutes:.0f} minutes; {left} more, about {left * minutes:.0f} minutes left")

    def trained(self, arms: Sequence[Arm]) -> list[Arm]:
        """Those that can be measured now."""
        return [arm for arm in arms if not arm.is_trained or self._is_complete(arm)]

    def _say(self, line: str) -> None:
        if self._ranks.is_leader:
            tqdm.write(line)

    def decode(self, arm: Arm, tree_nodes: int | None = None) -> Record:
        """Decode the evaluation prompts; the rounds of an earlier run are read back."""
        arguments = self._arguments
        conversations = self.conversations()
        settings = (arguments.temperature, arguments.max_new_tokens, arguments.seed, tree_nodes)
        path = self._folder(arm) / f"rounds-{_digest(settings, conversations)}.pt"
        if path.exists():
            return Record(conversations, Rounds(*torch.load(path, weights_only=True)))
        tqdm.write(f"decoding with {arm.name}" + (f", trees of {tree_nodes}" if tree_nodes else ""))
        rollout = self._rollout(self.load(arm), tree_nodes)
        rounds = rollout.run(conversations, arguments.batch_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save([getattr(rounds, field.name) for field in dataclasses.fields(rounds)], partial)
        partial.replace(path)
        return Record(conversations, rounds)

    def calibrated(self, arm: Arm) -> DSpark:
        """A copy of a trained arm, calibrated on the calibration prompts; not frozen."""
        arguments = self._arguments
        if arguments.calibration_prompts is None:
            raise ValueError("--calibration-prompts: this experiment calibrates, and needs prompts nobody trained on")
        chosen = {
            "prompts": [arguments.calibration_prompts],
            "exclude": arguments.responses,
            "limit": arguments.calibration_limit,
        }
        options = argparse.Namespace(**{**vars(arguments), **chosen})
        settings = (arguments.temperature, arguments.max_new_tokens)
        digest = _digest(settings, choose_conversations(self.target, options))
        options.drafter = folder = self._folder(arm) / f"calibrated-{digest}"
        if not (folder / "calibration.json").exists():
            shutil.copytree(self._folder(arm) / "checkpoint", folder, dirs_exist_ok=True)
            calibrate(self.target, options)
        target = self.target
        drafter = load_drafter(folder, target.embed_weight_VD, target.lm_head_weight_VD, dtype=target.dtype)
        assert isinstance(drafter, DSpark)
        return drafter

    def decode_with(self, drafter: Drafter) -> Record:
        """Decode the evaluation prompts with a drafter that is no arm; nothing is remembered."""
        conversations = self.conversations()
        return Record(conversations, self._rollout(drafter, None).run(conversations, self._arguments.batch_size))

    def load(self, arm: Arm) -> Drafter:
        """A trained arm, frozen; prompt look-up needs no training."""
        if not arm.is_trained:
            return NgramDrafter(arm.block_size, self.target.config.vocab_size)
        target = self.target
        weights = target.embed_weight_VD, target.lm_head_weight_VD
        drafter = load_drafter(self._folder(arm) / "checkpoint", *weights, dtype=target.dtype)
        drafter.freeze()
        return drafter

    def conversations(self) -> list[Conversation]:
        """The evaluation prompts: the same for all."""
        if self._conversations is None:
            self._conversations = choose_conversations(self.target, self._arguments)
        return self._conversations

    def _folder(self, arm: Arm) -> Path:
        return self._root / arm.name

    def _is_complete(self, arm: Arm) -> bool:
        return (self._folder(arm) / "checkpoint" / "provenance.json").exists()

    def _train(self, arm: Arm) -> None:
        arguments, preset = self._arguments, PRESETS[arm.preset]
        preset = dataclasses.replace(
            preset,
            num_hidden_layers=arm.layers,
            block_size=arm.block_size,
            markov_rank=arguments.markov_rank if preset.markov_rank else 0,
        )
        config = TrainConfig(
            slots=self.slots,
            sequences_per_step=arguments.sequences_per_step,
            anchors_per_sequence=arguments.anchors_per_sequence,
            distillation_fraction=preset.distillation_fraction,
            position_decay=preset.position_decay,
            detach_confidence=arm.detach_confidence,
            seed=arguments.seed,
        )
        folder = self._folder(arm)
        vocabulary = torch.arange(self.target.config.vocab_size)
        with self._ranks.leader_first():
            folder.mkdir(parents=True, exist_ok=True)
            if not arm.full_vocabulary:
                vocabulary = run_vocabulary(self._root, arguments.draft_vocabulary, self._responses, self.target)
        torch.manual_seed(arguments.seed)
        shape = preset_config(preset, self.target, len(vocabulary), arguments.mask_token_id)
        model = initial_drafter(self.target, shape, vocabulary)
        features, origin = self._features(model.target_layer_ids), {"target": arguments.target}
        finish(Trainer(model, features, self._responses, config, self._ranks, origin), folder, SAVE_MINUTES)

    def _features(self, layers: tuple[int, ...]) -> FeatureMemory:
        """Shared by arms that read the same layers, so that only the first of them needs the target."""
        if self._memory is None or self._memory_layers != layers:
            self._memory = None  # gives its gigabytes back first
            self._memory = FeatureMemory(self.target, layers, int(self._arguments.feature_memory_gib * 2**30))
            self._memory_layers = layers
        return self._memory

    def _rollout(self, drafter: Drafter, tree_nodes: int | None) -> Rollout:
        arguments = self._arguments
        lengths = (arguments.temperature, arguments.max_new_tokens)
        if tree_nodes is None:
            return Rollout(self.target, drafter, *lengths, seed=arguments.seed)
        assert isinstance(drafter, DSpark)
        return TreeRollout(self.target, drafter, *lengths, tree_nodes, seed=arguments.seed)


def _digest(settings: tuple[object, ...], conversations: Sequence[Conversation]) -> str:
    """Names what was decoded, and how."""
    prompts = [(conversation.dataset, conversation.prompt_ids) for conversation in conversations]
    return hashlib.sha256(repr((settings, prompts)).encode()).hexdigest()[:12]
