"""What a step costs: seconds to verify a flat batch, by tokens and context, and to draft a block, by requests.

Knows numbers that somebody measured and their provenance; measures nothing itself and keeps no clock.
A curve never falls as tokens or context grow: measurement noise must not tempt the budget to verify more.
Between grid points it is linear; an engine that pads its batches describes each stair by the two points of its edge.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.corrections import Corrections
from cluster.messages import CostCurveError

Array = NDArray[np.float64]

FLAT_BELOW = 1.02
"""A curve whose dearest batch costs less than this many cheapest ones says nothing about load."""
CONTEXT_OCTAVES = 0.5
"""Neighbouring columns of a table count as so far apart: a busy machine slows all contexts down alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a curve was measured on. A curve serves only an engine that matches in all but the date."""

    model: str
    dtype: str
    device: str
    num_threads: int
    versions: str
    """The libraries that set the speed, e.g. "torch 2.13.0, dspark 0.1.0"."""
    date: str
    """ISO day of the measurement."""
    sizes: str = ""
    """The settings that say which steps were measured, e.g. "max_num_seqs 32, kv_block_size 16"."""

    def difference(self, other: Provenance) -> str:
        """The first fields that differ, for an error message; empty when the curve fits."""
        names = [item.name for item in fields(self) if item.name != "date"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return ", ".join(f"{name} {mine!r} instead of {theirs!r}" for name, mine, theirs in pairs if mine != theirs)


@dataclass(frozen=True, slots=True)
class VerifySample:
    """One timed target forward."""

    num_tokens: int
    """Rows of the flat batch."""
    context_tokens: int
    """Context of all its sequences together."""
    seconds: float


@dataclass(frozen=True, slots=True)
class DraftSample:
    """One timed draft pass."""

    num_requests: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class CostCurve:
    """Seconds per verify and per draft pass. Built by `fit` or `load`; a value, so `observed` returns a new one."""

    provenance: Provenance
    tokens: Array
    """[T] increasing."""
    contexts: Array
    """[C] increasing."""
    measured: Array
    """[T, C] seconds, as fitted."""
    corrections: Corrections
    """[T * C] learned from real steps since."""
    draft_requests: Array
    """[D] increasing; empty for an engine without a drafter."""
    measured_draft: Array
    """[D] seconds, as fitted."""
    draft_corrections: Corrections
    """[D] learned since."""
    verify: Array
    """[T, C] seconds in use: measured * corrections, made monotone."""
    draft: Array
    """[D] seconds in use, likewise."""

    @classmethod
    def fit(
        cls, samples: Iterable[VerifySample], draft_samples: Iterable[DraftSample], provenance: Provenance
    ) -> CostCurve:
        """Samples of any (tokens, context) pairs, in any order: seconds = base(tokens) + slope * context.

        Batches of as many tokens differ in context by their number of sequences, so a full grid can't be measured; one
        slope is shared by all, and real steps then correct each cell (`observed`). Raises CostCurveError if there are
        no samples, a time is not positive, or the curve is flat.
        """
        cells = _medians(((s.num_tokens, s.context_tokens), s.seconds) for s in samples)
        drafts = _medians(((d.num_requests, 0), d.seconds) for d in draft_samples)
        if not cells:
            raise CostCurveError("no measurements to fit a cost curve to")
        slope = _context_slope(cells)
        tokens = sorted({pair[0] for pair in cells})
        contexts = sorted({min(pair[1] for pair in cells), max(pair[1] for pair in cells)})
        bases = [median(seconds - slope * c for (t, c), seconds in cells.items() if t == size) for size in tokens]
        table = [[base + slope * context for context in contexts] for base in bases]
        return cls._checked(provenance, tokens, contexts, table, [d for d, _ in sorted(drafts)], _sorted_values(drafts))

    @classmethod
    def load(cls, path: Path, provenance: Provenance) -> CostCurve:
        """Read what `save` wrote. Raises CostCurveError if it is missing, broken, flat or from another engine."""
        try:
            record = json.loads(path.read_text())
            found = Provenance(**record["provenance"])
            columns = [record[name] for name in ("tokens", "contexts", "verify", "draft_requests", "draft")]
        except FileNotFoundError as error:
            raise CostCurveError(f"{path}: no cost curve there") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CostCurveError(f"{path}: not a cost curve: {error}") from error
        if difference := found.difference(provenance):
            raise CostCurveError(f"{path}: measured with {difference}; measure it again")
        return cls._checked(found, *columns)

    def save(self, path: Path) -> None:
        """Write the curve in use, refreshed as it is, with its provenance, as JSON."""
        record = {
            "provenance": asdict(self.provenance),
            "tokens": self.tokens.tolist(),
            "contexts": self.contexts.tolist(),
            "verify": self.verify.tolist(),
            "draft_requests": self.draft_requests.tolist(),
            "draft": self.draft.tolist(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1))

    @classmethod
    def _checked(
        cls,
        provenance: Provenance,
        tokens: ArrayLike,
        contexts: ArrayLike,
        table: ArrayLike,
        draft_requests: ArrayLike,
        draft: ArrayLike,
    ) -> CostCurve:
        grid = [np.asarray(axis, dtype=np.float64) for axis in (tokens, contexts, draft_requests)]
        measured = np.asarray(table, dtype=np.float64)
        measured_draft = np.asarray(draft, dtype=np.float64)
        if measured.shape != (len(grid[0]), len(grid[1])) or measured_draft.shape != grid[2].shape or not measured.size:
            raise CostCurveError(f"a table of shape {measured.shape} on a grid of {len(grid[0])} x {len(grid[1])}")
        if any((np.diff(axis) <= 0).any() for axis in grid):
            raise CostCurveError("the grid of a cost curve must increase")
        times = np.concatenate([measured.ravel(), measured_draft])
        if not (np.isfinite(times) & (times > 0)).all():
            raise CostCurveError("a cost curve needs positive, finite seconds")
        verify = _monotone(measured)
        if (verify[-1] < FLAT_BELOW * verify[0]).any():
            raise CostCurveError(
                f"flat: {verify[0, 0]:.6f} s for {grid[0][0]:.0f} tokens, {verify[-1, 0]:.6f} s for {grid[0][-1]:.0f}"
            )
        steady = _isotonic(measured_draft)
        columns = np.arange(len(grid[1])) * CONTEXT_OCTAVES
        cells = np.stack(np.meshgrid(np.log2(grid[0]), columns, indexing="ij"), axis=2).reshape(-1, 2)
        corrections, of_drafts = Corrections.none(cells), Corrections.none(np.log2(grid[2])[:, None])
        return cls(provenance, grid[0], grid[1], measured, corrections, grid[2], steady, of_drafts, verify, steady)

    def step_seconds(self, num_tokens: ArrayLike, context_tokens: float) -> Array:
        """Seconds of one target forward over `num_tokens` rows (a number or an array of them): fp64, same shape."""
        column = _interpolate_column(self.contexts, self.verify, context_tokens)
        return _interpolate(self.tokens, column, np.asarray(num_tokens, dtype=np.float64))

    def draft_seconds(self, num_requests: int) -> float:
        """Seconds of one draft pass for `num_requests`; 0 for none, and for an engine without a drafter."""
        if not num_requests or not self.draft_requests.size:
            return 0.0
        return float(_interpolate(self.draft_requests, self.draft, np.asarray(num_requests, dtype=np.float64)))

    def observed(self, samples: Sequence[VerifySample], draft_samples: Sequence[DraftSample] = ()) -> CostCurve:
        """The curve after some real steps and draft passes: the cells around them follow, see cluster/corrections.py.

        No cell leaves 1/4..4 times its measurement.
        """
        curve = self
        if samples:
            ratios = [s.seconds / float(self.step_seconds(s.num_tokens, s.context_tokens)) for s in samples]
            cells = [np.outer(_hat(self.tokens, s.num_tokens), _hat(self.contexts, s.context_tokens)) for s in samples]
            corrections = self.corrections.observed(np.stack(cells).reshape(len(samples), -1), np.array(ratios))
            table = self.measured * corrections.factors.reshape(self.measured.shape)
            curve = replace(curve, corrections=corrections, verify=_monotone(table))
        if draft_samples and self.draft_requests.size:
            ratios = [s.seconds / self.draft_seconds(s.num_requests) for s in draft_samples]
            cells = [_hat(self.draft_requests, s.num_requests) for s in draft_samples]
            corrections = self.draft_corrections.observed(np.stack(cells), np.array(ratios))
            draft = _isotonic(self.measured_draft * corrections.factors)
            curve = replace(curve, draft_corrections=corrections, draft=draft)
        return curve


def _medians(timed: Iterable[tuple[tuple[int, int], float]]) -> dict[tuple[int, int], float]:
    """The median of the times of each key."""
    groups: dict[tuple[int, int], list[float]] = {}
    for key, seconds in timed:
        groups.setdefault(key, []).append(seconds)
    return {key: median(times) for key, times in groups.items()}


def _sorted_values(cells: dict[tuple[int, int], float]) -> list[float]:
    return [cells[key] for key in sorted(cells)]


def _context_slope(cells: dict[tuple[int, int], float]) -> float:
    """Seconds per context token: least squares within the groups of equal tokens, each on its own scale.

    Never negative, and never so steep that a sample's own context would explain all of its time.
    """
    covariance = variance = 0.0
    for size in {tokens for tokens, _ in cells}:
        group = [(context, seconds) for (tokens, context), seconds in cells.items() if tokens == size]
        mean_context = sum(context for context, _ in group) / len(group)
        mean_seconds = sum(seconds for _, seconds in group) / len(group)
        weight = 1 / max(mean_seconds, 1e-9) ** 2
        covariance += weight * sum((c - mean_context) * (s - mean_seconds) for c, s in group)
        variance += weight * sum((c - mean_context) ** 2 for c, _ in group)
    steepest = 0.9 * min((seconds / context for (_, context), seconds in cells.items() if context), default=0.0)
    return min(max(covariance / variance, 0.0), steepest) if variance else 0.0


def _monotone(table: Array) -> Array:
    """Isotonic along tokens, then along contexts: the second keeps the first (isotonic means preserve order)."""
    rising = np.apply_along_axis(_isotonic, 0, table)
    return np.apply_along_axis(_isotonic, 1, rising)


def _isotonic(values: Array) -> Array:
    """The nearest non-decreasing sequence in least squares: pool adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools]).astype(np.float64)


def _interpolate(grid: Array, values: Array, at: Array) -> Array:
    """Linear inside the grid, constant before it, the last slope after it."""
    inside = np.interp(at, grid, values)
    if len(grid) == 1 or at.max(initial=0) <= grid[-1]:
        return np.asarray(inside)
    slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
    return np.asarray(inside + slope * np.maximum(at - grid[-1], 0))


def _interpolate_column(grid: Array, table: Array, at: float) -> Array:
    """[T, C] at one context -> [T], with the same rule as `_interpolate`."""
    if len(grid) == 1 or at <= grid[0]:
        return table[:, 0]
    right = min(int(np.searchsorted(grid, at)), len(grid) - 1)
    share = (at - grid[right - 1]) / (grid[right] - grid[right - 1])
    return np.asarray(table[:, right - 1] + share * (table[:, right] - table[:, right - 1]))


def _hat(grid: Array, at: float) -> Array:
    """[len(grid)] interpolation weights of `at`, clamped to the grid: they sum to 1."""
    weights = np.zeros(len(grid))
    place = float(np.interp(at, grid, np.arange(len(grid))))
    left = int(place)
    weights[left] = 1 - (place - left)
    weights[min(left + 1, len(grid) - 1)] += place - left
    return weights
