"""The paper's experiments, each as: which arms it needs, and what it makes of their records.

A result is what goes into NAME.json. Knows the laboratory and the comparisons; knows nothing of tables or plots.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from drafter.calibration import (
    auroc_by_position,
    counted,
    errors_by_position,
    passed,
    reliability,
    survival,
)
from drafter.comparison import datasets, gain, macro_score, scores, threshold_sweep
from drafter.dspark import DSpark
from drafter.evaluate import acceptance_by_dataset
from drafter.interface import Drafter
from drafter.laboratory import Arm, Laboratory, Record
from drafter.speculative import SamplingRows, draft_sampler
from drafter.target import Target

Result = dict[str, object]
"""What a JSON file holds."""

TREE_NODES = 28
"""DDTree verifies four times the rows of a block of 7."""
DEPTHS = (1, 2, 5)
BLOCKS = (3, 7, 11, 15)
THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(10))
LATENCY_ROWS = 128
_DSPARK, _DFLASH, _EAGLE3 = Arm("dspark"), Arm("dflash"), Arm("eagle3", layers=1)
_MTP1 = Arm("mtp", layers=1, block_size=1)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One table or figure of the paper."""

    title: str
    arms: tuple[Arm, ...]
    needs: tuple[Arm, ...]
    """Those without which nothing is said; the others are left out where they aren't trained yet."""
    measure: Callable[[Laboratory], Result]


def _t1(laboratory: Laboratory) -> Result:
    arms = {arm.preset: arm for arm in laboratory.trained(EXPERIMENTS["T1"].arms)}
    records = {name: laboratory.decode(arm) for name, arm in arms.items()}
    records["ddtree"] = laboratory.decode(arms["dflash"], TREE_NODES)
    others = [name for name in records if name != "dspark"]
    gains = [
        gain("dspark", records["dspark"], other, records[other], dataset)
        for other in others
        for dataset in (None, *datasets(records["dspark"]))
    ]
    return {
        "rows": _plain([score for name, record in records.items() for score in scores(name, record)]),
        "macro": _plain([macro_score(name, record) for name, record in records.items()]),
        "gains": _plain(gains),
        "draft_passes": draft_latencies(laboratory, [arm for arm in arms.values() if arm.is_trained]),
        "tree_nodes": TREE_NODES,
    }


def _f2(laboratory: Laboratory) -> Result:
    rows = []
    for arm in laboratory.trained(EXPERIMENTS["F2"].arms):
        record = laboratory.decode(arm)
        for acceptance in acceptance_by_dataset(record.conversations, record.rounds):
            rows += [
                {"drafter": arm.preset, "dataset": acceptance.dataset, "position": position, "acceptance": value}
                for position, value in enumerate(acceptance.conditional, 1)
                if not math.isnan(value)  # never reached
            ]
    return {"rows": rows}


def _f3(laboratory: Laboratory) -> Result:
    rows: list[Result] = []
    for arm in laboratory.trained(EXPERIMENTS["F3"].arms):
        rows += _scored(arm.preset, laboratory.decode(arm), layers=arm.layers)
    pair = laboratory.trained([_DSPARK, Arm("dflash", layers=5)])
    if len(pair) < 2:
        return {"rows": rows}
    shallow, deep = map(laboratory.decode, pair)
    return {"rows": rows, "gains": _plain([gain("dspark, 2 layers", shallow, "dflash, 5 layers", deep)])}


def _f4(laboratory: Laboratory) -> Result:
    rows: list[Result] = []
    gains: list[Result] = []
    latency: list[Result] = []
    for block in BLOCKS:
        pair = laboratory.trained([Arm(preset, block_size=block) for preset in ("dspark", "dflash")])
        if len(pair) < 2:
            continue
        records = {}
        for arm in pair:
            records[arm.preset] = laboratory.decode(arm)
            rows += _scored(arm.preset, records[arm.preset], block_size=block)
        for dataset in (None, *datasets(records["dspark"])):
            found = gain("dspark", records["dspark"], "dflash", records["dflash"], dataset)
            gains.append({"block_size": block, **dataclasses.asdict(found)})
        latency.append(head_latency(laboratory, Arm("dspark", block_size=block)))
    return {"rows": rows, "gains": gains, "latency": latency}


def _f5(laboratory: Laboratory) -> Result:
    drafter = laboratory.calibrated(_DSPARK)
    temperatures = drafter.sts_temperatures
    drafter.freeze()
    record = laboratory.decode_with(drafter)
    return {"rows": _plain(threshold_sweep(record, temperatures, THRESHOLDS))}


def _f6(laboratory: Laboratory) -> Result:
    raw = laboratory.decode(_DSPARK).rounds
    drafter = laboratory.calibrated(_DSPARK)
    temperatures, ones = drafter.sts_temperatures, torch.ones_like(drafter.sts_temperatures)
    drafter.freeze()
    refitted = laboratory.decode_with(drafter).rounds
    stages = (("trained", raw, ones), ("refitted head", refitted, ones), ("after STS", refitted, temperatures))
    rows, curves = [], []
    for stage, rounds, scale in stages:
        errors, areas = errors_by_position(rounds, scale), auroc_by_position(rounds, scale)
        rows += [
            {"stage": stage, "position": position, "ece": error, "auroc": area}
            for position, (error, area) in enumerate(zip(errors, areas, strict=True), 1)
        ]
        predicted, happened, valid = survival(rounds.confidence_logits, scale), passed(rounds), counted(rounds)
        curves += [
            {"stage": stage, "position": k + 1, "predicted": mean, "observed": frequency, "count": number}
            for k in range(0, predicted.shape[1], 2)
            for mean, frequency, number in reliability(predicted[valid[:, k], k], happened[valid[:, k], k])
        ]
    means = {stage: statistics.fmean(errors_by_position(rounds, scale)) for stage, rounds, scale in stages}
    return {"rows": rows, "mean_ece": means, "curves": curves, "sts_temperatures": temperatures.tolist()}


def _ablation(laboratory: Laboratory, arms: Sequence[tuple[str, Arm]]) -> Result:
    rows: list[Result] = []
    records = [(name, laboratory.decode(arm)) for name, arm in arms]
    for name, record in records:
        rounds = record.rounds
        ones = torch.ones(rounds.confidence_logits.shape[1])
        rows += _scored(name, record)
        rows[-1] |= {
            "mean_ece": statistics.fmean(errors_by_position(rounds, ones)),
            "mean_auroc": statistics.fmean(auroc_by_position(rounds, ones)),
        }
    latency = [{"drafter": name, **head_latency(laboratory, arm)} for name, arm in arms]
    (first, one), (second, other) = records
    return {"rows": rows, "gains": _plain([gain(second, other, first, one)]), "latency": latency}


def head_latency(laboratory: Laboratory, arm: Arm, context: int = 200, repetitions: int = 9) -> Result:
    """Median seconds of a round of about LATENCY_ROWS rows, and the share of it that the heads take."""
    target, drafter, bare = laboratory.target, laboratory.load(arm), laboratory.load(arm)
    assert isinstance(drafter, DSpark) and isinstance(bare, DSpark)
    bare.markov_head = bare.confidence_head = None
    rows = 1 + arm.block_size
    requests = max(1, LATENCY_ROWS // rows)
    cache = target.row_cache(requests, context + rows)
    tokens = torch.zeros(requests, rows, dtype=torch.int64)
    positions = (context + torch.arange(rows)).expand(requests, rows)
    whole = torch.zeros(requests, context, dtype=torch.int64)
    target.cached_features(whole, torch.arange(context).expand_as(whole), cache, torch.arange(requests), (0,))

    def verify() -> None:
        _, hidden = target.cached_features(tokens, positions, cache, torch.arange(requests), model_layers)
        target.logits(hidden)

    model_layers = drafter.target_layer_ids
    calls: dict[str, Callable[[], None]] = {
        "draft": lambda: _draft(target, drafter, requests, context),
        "draft without heads": lambda: _draft(target, bare, requests, context),
        "verify": verify,
    }
    medians = _median_seconds(calls, repetitions)
    round_seconds = medians["draft"] + medians["verify"]
    return {
        "block_size": arm.block_size,
        "rows": requests * rows,
        "draft_seconds": medians["draft"],
        "heads_seconds": medians["draft"] - medians["draft without heads"],
        "round_seconds": round_seconds,
        "heads_share": (medians["draft"] - medians["draft without heads"]) / round_seconds,
    }


def draft_latencies(laboratory: Laboratory, arms: Sequence[Arm], context: int = 200, repetitions: int = 9) -> Result:
    """Median seconds of a draft pass of each drafter, for the requests of a round of about LATENCY_ROWS rows."""
    requests = max(1, LATENCY_ROWS // (1 + max(arm.block_size for arm in arms)))
    drafters = {arm.preset: laboratory.load(arm) for arm in arms}
    calls = {
        name: functools.partial(_draft, laboratory.target, drafter, requests, context)
        for name, drafter in drafters.items()
    }
    return dict(_median_seconds(calls, repetitions))


@torch.inference_mode()
def _draft(target: Target, drafter: Drafter, requests: int, context: int) -> None:
    """One draft pass for requests that have `context` tokens each."""
    layers, heads, size = drafter.context_shape
    keys, values = torch.zeros(2, layers, requests, context, heads, size, dtype=target.dtype)
    at = torch.full((requests,), context)
    sampler = draft_sampler(_plain_rows(at + 1), drafter.block_size, drafter.target_ids)
    drafter.propose(torch.zeros_like(at), at, keys, values, at, sampler, drafter.block_size)


def _median_seconds(calls: Mapping[str, Callable[[], None]], repetitions: int) -> dict[str, float]:
    """Of each call; in turns, so that a slow moment of the machine hits all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repetition >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _plain_rows(positions: torch.Tensor) -> SamplingRows:
    """Temperature 1, nothing cut."""
    size = len(positions)
    zeros, ones = torch.zeros(size), torch.ones(size)
    return SamplingRows(
        ones, zeros.long(), ones, zeros, torch.arange(size), positions, torch.zeros(size, dtype=torch.bool)
    )


def _scored(drafter: str, record: Record, **variant: int) -> list[Result]:
    """Its scores, the mean over data sets last, each marked with the variant of the drafter."""
    return [{**variant, **row} for row in _plain([*scores(drafter, record), macro_score(drafter, record)])]


def _plain(rows: Sequence[object]) -> list[Result]:
    return [dataclasses.asdict(row) for row in rows]  # type: ignore[call-overload]


_DETACHED = Arm("dspark", detach_confidence=True)
_FULL = Arm("dspark", full_vocabulary=True)
EXPERIMENTS = {
    "T1": Experiment(
        "Accepted length by data set",
        (
            *(Arm(preset) for preset in ("dspark", "dspark-gated", "dspark-rnn", "dflash", "dflash-l1")),
            _EAGLE3,
            _MTP1,
            Arm("ngram"),
        ),
        (_DSPARK, _DFLASH),
        _t1,
    ),
    "F2": Experiment("Conditional acceptance by position", (_DSPARK, _DFLASH, _EAGLE3), (_DSPARK, _DFLASH), _f2),
    "F3": Experiment(
        "Accepted length by depth",
        tuple(Arm(p, layers=n) for p in ("dspark", "dflash") for n in DEPTHS),
        (_DSPARK, _DFLASH),
        _f3,
    ),
    "F4": Experiment(
        "Accepted length by block size, and what the heads cost",
        tuple(Arm(p, block_size=n) for p in ("dspark", "dflash") for n in BLOCKS),
        (_DSPARK, _DFLASH),
        _f4,
    ),
    "F5": Experiment("Verifying only what is confident", (_DSPARK,), (_DSPARK,), _f5),
    "F6": Experiment("Reliability of the confidence", (_DSPARK,), (_DSPARK,), _f6),
    "detach": Experiment(
        "Ablation: does the confidence loss shape the backbone?",
        (_DSPARK, _DETACHED),
        (_DSPARK, _DETACHED),
        lambda laboratory: _ablation(laboratory, (("attached", _DSPARK), ("detached", _DETACHED))),
    ),
    "vocabulary": Experiment(
        "Ablation: reduced or full draft vocabulary",
        (_DSPARK, _FULL),
        (_DSPARK, _FULL),
        lambda laboratory: _ablation(laboratory, (("reduced", _DSPARK), ("full", _FULL))),
    ),
}
