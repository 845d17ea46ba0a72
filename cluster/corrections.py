"""What real steps teach about a measured cost curve: factors by cell, shared with the cells that no step has visited.

A curve that was measured while the machine was busy is wrong in whole regions, and the sizes that a scheduler avoids
because they look dear are never visited. So a cell that nothing is known of follows its neighbours, the nearer the
more, and stops doing so as steps visit it. Pure numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PRIOR_STEPS = 5.0
"""The measurement that a curve starts from counts as so many real steps: those differ from it by more than from each
other. Each step at a cell counts as much as those before it, at first."""
LEAST_RATE = 1 / 160
"""Later a cell follows about its latest 160 steps: a budget hangs on differences of a few percent."""
LARGEST_SURPRISE = 1.5
"""One step counts at most as so many times, or as that part of, what was expected: a page fault moves a size that no
step has visited by a twelfth, and later hardly."""
LARGEST_FACTOR = 4.0
NEARER_BY_OCTAVE = 4.0
"""A neighbour at half of the distance in octaves of the size counts so many times as much."""
DOUBT = 0.01
"""What a cell's measurement counts beside a well-known neighbour at no distance: one that is three octaves away is
believed by 60%."""


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """One factor per cell. A value: `observed` returns a new one.

    Each cell's own estimate follows its visits and starts from what its neighbours say, which may change meanwhile:
    so the part that is the cell's own, and how much of the estimate that is, are kept apart.
    """

    closeness: Array
    """[N, N] what a neighbour's estimate counts; 0 for a cell itself."""
    own: Array
    """[N] the cell's own part of the logarithm of its factor."""
    visited: Array
    """[N] which share of its estimate is its own: 0 without a visit, towards 1."""

    @classmethod
    def none(cls, octaves: Array) -> Self:
        """For cells at these places [N, axes], distances being sums over axes."""
        distance = np.abs(octaves[:, None] - octaves[None]).sum(axis=2)
        closeness = NEARER_BY_OCTAVE**-distance * (1 - np.eye(len(octaves)))
        return cls(closeness, np.zeros(len(octaves)), np.zeros(len(octaves)))

    @property
    def logarithms(self) -> Array:
        """[N]"""
        # A neighbour's estimate is own / visited, and counts visited squared: the first visits are mostly noise.
        weighted = self.closeness @ (self.visited * self.own)
        neighbours = weighted / (self.closeness @ self.visited**2 + DOUBT)
        limit = np.log(LARGEST_FACTOR)
        return np.clip(self.own + (1 - self.visited) * neighbours, -limit, limit)

    @property
    def factors(self) -> Array:
        """[N] within 1/4 .. 4."""
        return np.exp(self.logarithms)

    def observed(self, weights_SN: Array, ratios_S: Array) -> Corrections:
        """After S steps, each of a time ratios_S times the expected one, at cells of these weights, rows of sum 1."""
        surprises_S = np.log(np.clip(ratios_S, 1 / LARGEST_SURPRISE, LARGEST_SURPRISE))
        aims_SN = self.logarithms + surprises_S[:, None]
        own, visited = self.own, self.visited
        for weights, aim in zip(weights_SN, aims_SN, strict=True):
            rates = weights * np.maximum((1 - visited) / PRIOR_STEPS, LEAST_RATE)
            own, visited = own + rates * (aim - own), visited + rates * (1 - visited)
        return Corrections(self.closeness, own, visited)
