"""Measures at start-up what a step costs: real steps of a real engine over a grid of sequences, drafts and contexts.

Knows how to make an engine run chosen steps and where the curve is kept; the curve itself is cluster/sps.py.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import time
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.messages import CostCurveError, Request, SamplingParams, StepResult
from cluster.shard import Shard
from cluster.sps import CostCurve, DraftSample, Provenance, VerifySample
from drafter.packing import stair
from drafter.source import models_folder

logger = logging.getLogger(__name__)

NUM_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 768)
"""Tokens of each sequence. Drafts are measured with the shorter ones: a row costs as much with any."""
PASSES, REPEATS = 3, 2
"""All kinds of steps are run in turn, several times over, and the least time counts: so a busy moment doesn't make one
size look dear. Measured, curves then differ by half as much from start to start as with medians."""
SECONDS_PER_PASS = 8.0
"""Wider steps than ALWAYS_ROWS are left out once the first pass has taken so long."""
SIZES = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_block_size", "num_kv_blocks")
"""Settings that decide which steps are measured: a curve says nothing about far larger ones."""
ALWAYS_ROWS = 16
"""So wide, at least, is measured on the slowest machine: one point would make no curve."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step: each of `num_sequences` decodes and verifies `num_drafts` tokens."""

    num_sequences: int
    num_drafts: int
    prompt: tuple[int, ...]
    """Of each sequence. They share all but its last token, and so the pages."""

    @property
    def num_rows(self) -> int:
        return self.num_sequences * (1 + self.num_drafts)


def cost_curve(config: EngineConfig, shard: Shard) -> CostCurve:
    """The curve kept for just this engine and machine, or a new one, measured now (about ten seconds) and kept.

    Raises CostCurveError when the measurement is flat.
    """
    provenance = _provenance(config, shard)
    path = _path(config, provenance)
    try:
        return CostCurve.load(path, provenance)
    except CostCurveError as error:
        logger.info("measuring the cost curve: %s", error)
    steps = measure(shard, config)
    curve = CostCurve.fit(
        [
            VerifySample(edge, step.report.context_tokens, step.seconds - step.draft_seconds)
            for step in steps
            for edge in (stair(step.num_tokens) if shard.decoder.pads else {step.num_tokens})
        ],
        [DraftSample(len(s.rounds), s.num_slots, s.draft_seconds) for s in steps if s.report.drafted],
        provenance,
    )
    curve.save(path)
    return curve


def _provenance(config: EngineConfig, shard: Shard) -> Provenance:
    try:
        own = version("dspark-serve")
    except PackageNotFoundError:  # run from a source tree
        own = "source"
    mesh = shard.mesh
    split = f", split {mesh.dp_size} x {mesh.tp_size}" if mesh.size > 1 else ""
    return Provenance(
        model=f"{config.model_source} with drafter {config.drafter_source}",
        dtype=config.dtype,
        device=f"{shard.decoder.device} {torch.backends.cpu.get_cpu_capability()} x {os.cpu_count()}{split}",
        num_threads=config.num_threads,
        versions=f"torch {torch.__version__}, dspark-serve {own}",
        date=datetime.date.today().isoformat(),
        sizes=", ".join(f"{name} {getattr(config, name)}" for name in SIZES),
    )


def _path(config: EngineConfig, provenance: Provenance) -> Path:
    if config.cost_curve_path is not None:
        return Path(config.cost_curve_path).expanduser()
    digest = hashlib.sha256(repr(replace(provenance, date="")).encode()).hexdigest()[:16]
    return models_folder().parent / "cost-curves" / f"{digest}.json"


def measure(shard: Shard, config: EngineConfig) -> list[StepResult]:
    """A few real steps of each kind, narrow kinds first. Overwrites the shard's pages.

    Raises ValueError when max_model_len has no room for them.
    """
    settings = config.model_copy(
        update={"speculation": "fixed", "num_speculative_tokens": None, "enable_prefix_caching": True}
    )
    num_tokens = (shard.num_draft_slots + 1) * (REPEATS + 2)
    longest = config.max_model_len - num_tokens
    if longest < 1:
        raise ValueError(f"max_model_len is {config.max_model_len}; scheduling this drafter needs {num_tokens + 1}")
    engine = Engine(settings, shard, None)
    prompts = []
    for context in sorted({min(context, longest) for context in CONTEXTS}):
        # A block's last token is computed, the blocks before it are shared: all sequences see the same pages.
        length = (context - 1) // config.kv_block_size * config.kv_block_size + 1
        prompts.append(tuple(i * 7919 % shard.vocab_size for i in range(length)))
        _decode(engine, Cell(1, 0, prompts[-1]), num_tokens)
    kinds = [(drafts, prompts[0]) for drafts in {0, 1, shard.num_draft_slots}]
    kinds += [(0, prompt) for prompt in prompts[1:]]
    return _measure(engine, _cells(config, kinds), num_tokens)


def _measure(engine: Engine, cells: list[Cell], num_tokens: int) -> list[StepResult]:
    """Steps of each cell in all passes; cells that don't fit the pool or the time are left out."""
    measured: dict[Cell, list[StepResult]] = {}
    for number in range(PASSES):
        started = time.perf_counter()
        for cell in cells if number == 0 else list(measured):
            if steps := _decode(engine, cell, num_tokens):
                measured.setdefault(cell, []).extend(steps)
            slow = number == 0 and time.perf_counter() - started > SECONDS_PER_PASS
            if slow and cell.num_rows >= ALWAYS_ROWS:
                break
    return [step for steps in measured.values() for step in steps]


def _cells(config: EngineConfig, kinds: list[tuple[int, tuple[int, ...]]]) -> list[Cell]:
    """What fits the row budget, by rows. kinds: drafts and prompt of each sequence."""
    cells = [
        Cell(num_sequences, num_drafts, prompt)
        for num_sequences in NUM_SEQUENCES
        for num_drafts, prompt in kinds
        if num_sequences <= config.max_num_seqs
    ]
    fitting = [cell for cell in cells if cell.num_rows <= config.max_num_batched_tokens]
    return sorted(fitting, key=lambda cell: (cell.num_rows, cell.num_sequences, len(cell.prompt)))


def _decode(engine: Engine, cell: Cell, num_tokens: int) -> list[StepResult]:
    """Steps in which all of the cell's sequences decode; [] when the pool can't hold them."""
    sampling = SamplingParams(max_tokens=num_tokens, max_draft_tokens=cell.num_drafts)
    for index in range(cell.num_sequences):
        engine.add(Request(request_id=str(index), prompt_token_ids=cell.prompt, sampling=sampling))
    while engine.step().report.num_prefill_tokens:
        pass
    steps = [engine.step() for _ in range(REPEATS)]
    for request_id in engine.request_ids():
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return [step for step in steps if len(step.rounds) == cell.num_sequences]
