"""What a step costs: seconds to verify a flat batch, by tokens and context, and to draft, by requests and slots.

Knows numbers that somebody measured and their provenance; measures nothing itself and keeps no clock.
Seconds never fall as a size grows: measurement noise must not tempt the budget to verify or to draft more.
Between grid points they are linear; an engine that pads its batches describes each stair by the two points of its edge.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.corrections import Corrections, Observation
from cluster.messages import CostCurveError

Array = NDArray[np.float64]

FLAT_BELOW = 1.02
"""A curve whose dearest batch costs less than this many cheapest ones says nothing about load."""
COLUMN_OCTAVES = 0.2
"""Neighbouring columns of a surface count as so far apart: what is wrong about a size is so with any context."""


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
    num_slots: int
    """Drafted for each of them."""
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Seconds over a grid of two sizes. A value."""

    rows: Array
    """[X] increasing."""
    columns: Array
    """[Y] increasing."""
    measured: Array
    """[X, Y] seconds, as fitted and made monotone."""
    seconds: Array
    """[X, Y] in use: corrected, and made monotone again."""

    @classmethod
    def of(cls, rows: ArrayLike, columns: ArrayLike, measured: ArrayLike) -> Surface:
        """CostCurveError says what is wrong with the numbers."""
        rows_X, columns_Y, table = (np.asarray(values, dtype=np.float64) for values in (rows, columns, measured))
        if table.shape != (len(rows_X), len(columns_Y)) or not table.size:
            raise CostCurveError(f"a table of shape {table.shape} on a grid of {len(rows_X)} x {len(columns_Y)}")
        if any((np.diff(axis) <= 0).any() for axis in (rows_X, columns_Y)):
            raise CostCurveError("the grid of a cost curve must increase")
        if not (np.isfinite(table) & (table > 0)).all():
            raise CostCurveError("a cost curve needs positive, finite seconds")
        monotone = _monotone(table)
        return cls(rows_X, columns_Y, monotone, monotone)

    def along_rows(self, rows: ArrayLike, column: float) -> Array:
        """Seconds at some rows (a number or an array of them) of one column: fp64, same shape."""
        values = _interpolate_column(self.columns, self.seconds, column)
        return _interpolate(self.rows, values, np.asarray(rows, dtype=np.float64))

    def along_columns(self, row: float, columns: ArrayLike) -> Array:
        """The same at one row of some columns."""
        values = _interpolate_column(self.rows, self.seconds.T, row)
        return _interpolate(self.columns, values, np.asarray(columns, dtype=np.float64))

    def observation(self, row: float, column: float, seconds: float) -> Observation:
        """What a time says about the cells around it."""
        weights = np.outer(_hat(self.rows, row), _hat(self.columns, column)).ravel()
        at_first = replace(self, seconds=self.measured).along_rows(row, column)
        outside = max(float(np.log2(row / self.rows[-1])), 0.0)
        return Observation(weights, seconds / float(at_first), outside)

    def corrected(self, factors: Array) -> Surface:
        """With the measurement times these [X * Y]."""
        return replace(self, seconds=_monotone(self.measured * factors.reshape(self.measured.shape)))

    @property
    def octaves(self) -> Array:
        """[X * Y, 2] where the cells lie."""
        places = np.arange(len(self.columns)) * COLUMN_OCTAVES
        return np.stack(np.meshgrid(np.log2(self.rows), places, indexing="ij"), axis=2).reshape(-1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class CostCurve:
    """Seconds per verify and per draft pass. Built by `fit` or `load`; a value, so `observed` returns a new one."""

    provenance: Provenance
    verify: Surface
    """By tokens and context."""
    draft: Surface | None
    """By requests and slots; None for an engine without a drafter."""
    corrections: Corrections
    """Of the cells of both."""

    @classmethod
    def fit(
        cls, samples: Iterable[VerifySample], draft_samples: Iterable[DraftSample], provenance: Provenance
    ) -> CostCurve:
        """Samples of any (tokens, context) pairs, in any order: seconds = base(tokens) + slope * context.

        Batches of as many tokens differ in context by their number of sequences, so a full grid can't be measured; one
        slope is shared by all, and real steps then correct each cell (`observed`). Raises CostCurveError if there are
        no samples, a time is not positive, or the curve is flat.
        """
        cells = _least(((s.num_tokens, s.context_tokens), s.seconds) for s in samples)
        drafts = _least(((d.num_requests, d.num_slots), d.seconds) for d in draft_samples)
        if not cells:
            raise CostCurveError("no measurements to fit a cost curve to")
        slope = _context_slope(cells)
        tokens = sorted({pair[0] for pair in cells})
        contexts = sorted({min(pair[1] for pair in cells), max(pair[1] for pair in cells)})
        bases = [median(seconds - slope * c for (t, c), seconds in cells.items() if t == size) for size in tokens]
        table = [[base + slope * context for context in contexts] for base in bases]
        return cls._checked(provenance, Surface.of(tokens, contexts, table), _draft_surface(drafts) if drafts else None)

    @classmethod
    def load(cls, path: Path, provenance: Provenance) -> CostCurve:
        """Read what `save` wrote. Raises CostCurveError if it is missing, broken, flat or from another engine."""
        try:
            record = json.loads(path.read_text())
            found = Provenance(**record["provenance"])
            verify = Surface.of(*(record[name] for name in ("tokens", "contexts", "verify")))
            draft = [record[name] for name in ("draft_requests", "draft_slots", "draft")]
            draft_surface = Surface.of(*draft) if draft[0] else None
        except FileNotFoundError as error:
            raise CostCurveError(f"{path}: no cost curve there") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CostCurveError(f"{path}: not a cost curve: {error}") from error
        if difference := found.difference(provenance):
            raise CostCurveError(f"{path}: measured with {difference}; measure it again")
        return cls._checked(found, verify, draft_surface)

    @property
    def snapshot(self) -> CostCurve:
        """For somebody who only asks it: without what it takes to learn, which is most of its size."""
        return replace(self, corrections=Corrections.none())

    def save(self, path: Path) -> None:
        """Write the curve in use, refreshed as it is, with its provenance, as JSON."""
        draft = self.draft
        record = {
            "provenance": asdict(self.provenance),
            "tokens": self.verify.rows.tolist(),
            "contexts": self.verify.columns.tolist(),
            "verify": self.verify.seconds.tolist(),
            "draft_requests": draft.rows.tolist() if draft else [],
            "draft_slots": draft.columns.tolist() if draft else [],
            "draft": draft.seconds.tolist() if draft else [],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1))

    @classmethod
    def _checked(cls, provenance: Provenance, verify: Surface, draft: Surface | None) -> CostCurve:
        seconds = verify.seconds
        if (seconds[-1] < FLAT_BELOW * seconds[0]).any():
            tokens = verify.rows
            raise CostCurveError(
                f"flat: {seconds[0, 0]:.6f} s for {tokens[0]:.0f} tokens, {seconds[-1, 0]:.6f} s for {tokens[-1]:.0f}"
            )
        surfaces = [verify, draft] if draft else [verify]
        return cls(provenance, verify, draft, Corrections.none(*(surface.octaves for surface in surfaces)))

    @property
    def deepens(self) -> bool:
        """Whether a draft pass of more slots takes longer, as far as was measured."""
        return self.draft is not None and len(self.draft.columns) > 1

    def step_seconds(self, num_tokens: ArrayLike, context_tokens: float) -> Array:
        """Seconds of one target forward over `num_tokens` rows (a number or an array of them): fp64, same shape."""
        return self.verify.along_rows(num_tokens, context_tokens)

    def draft_seconds(self, num_requests: int, num_slots: ArrayLike) -> Array:
        """Seconds of one draft pass of so many slots (a number or an array of them) for each request: fp64, same shape.

        0 for no requests, for no slots, and for an engine without a drafter.
        """
        slots = np.asarray(num_slots, dtype=np.float64)
        if not num_requests or not self.draft:
            return np.zeros_like(slots)
        return np.where(slots > 0, self.draft.along_columns(num_requests, slots), 0.0)

    def observed(self, steps: Sequence[tuple[VerifySample, DraftSample | None]]) -> CostCurve:
        """The curve after some real steps: the cells around them follow, see cluster/corrections.py.

        No cell leaves 1/4..4 times its measurement.
        """
        num_verify, num_draft = self.verify.measured.size, self.draft.measured.size if self.draft else 0
        seen = []
        for verify, draft in steps:
            one = self.verify.observation(verify.num_tokens, verify.context_tokens, verify.seconds)
            seen.append([replace(one, weights=np.append(one.weights, np.zeros(num_draft)))])
            if draft and self.draft:
                other = self.draft.observation(draft.num_requests, draft.num_slots, draft.seconds)
                seen[-1].append(replace(other, weights=np.append(np.zeros(num_verify), other.weights)))
        corrections = self.corrections.observed(seen)
        factors = corrections.factors
        return replace(
            self,
            corrections=corrections,
            verify=self.verify.corrected(factors[:num_verify]),
            draft=self.draft and self.draft.corrected(factors[num_verify:]),
        )


def _least(timed: Iterable[tuple[tuple[int, int], float]]) -> dict[tuple[int, int], float]:
    """The least of the times of each key: whatever else a machine does only makes a step longer."""
    least: dict[tuple[int, int], float] = {}
    for key, seconds in timed:
        least[key] = min(seconds, least.get(key, seconds))
    return least


def _draft_surface(cells: dict[tuple[int, int], float]) -> Surface:
    """By (requests, slots). Where a row budget had no room for so many slots, they cost what they cost elsewhere,
    against the most that were measured there."""
    requests, slots = (sorted({pair[axis] for pair in cells}) for axis in (0, 1))
    table = np.array([[cells.get((n, k), np.nan) for k in slots] for n in requests])
    for left, right in pairwise(range(len(slots))):
        growth = np.nanmedian(table[:, right] / table[:, left])
        table[:, right] = np.where(np.isnan(table[:, right]), growth * table[:, left], table[:, right])
    return Surface.of(requests, slots, table)


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
    """Linear inside the grid, constant before it, the slope of the last octave after it."""
    inside = np.interp(at, grid, values)
    if len(grid) == 1 or at.max(initial=0) <= grid[-1]:
        return np.asarray(inside)
    # Over an octave, because the last two points may be the edges of one stair.
    left = min(int(np.searchsorted(grid, grid[-1] / 2)), len(grid) - 2)
    slope = (values[-1] - values[left]) / (grid[-1] - grid[left])
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
