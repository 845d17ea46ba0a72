"""What real steps teach about measured times: a factor for each cell, and one for how busy the machine is now.

A machine that others share slows all sizes down alike, for seconds; a measurement is wrong about one size, or about a
region of them, for good. Only the second kind says which of two sizes is cheaper: what was seen at different times must
not be compared by when it was seen. So a step's surprise is split by what is known: a Kalman filter, whose state is the
logarithm of the machine's pace, which wanders quickly, and those of the cells' factors, which hardly do. Cells near
each other go wrong together, so a cell that no step has visited follows its neighbours. Pure numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MEASURED_WITHIN = 0.1
"""Standard deviation of a measured cell from what real steps take there, pace aside: other requests, other pages."""
NEARER_BY_OCTAVE = 2.0
"""Cells one octave apart go wrong together by half, two by a quarter."""
PACE_WITHIN, PACE_WANDERS = 0.3, 0.05
"""Of the machine's pace: from that of the measurement, and from step to step."""
CELLS_WANDER = 0.001
"""From step to step: what was learned counts less after hundreds of steps."""
STEP_NOISE, NOISE_BY_OCTAVE = 0.12, 1.0
"""Of one step, and the further outside of the cells it is, the more: it goes by a slope there, so it says little."""
SURPRISING = 2.0
"""Standard deviations. Beyond, a step counts as the noisier, the more it surprises: a page fault says next to nothing,
and a machine that has become three times slower is believed after some twenty steps."""
LARGEST_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Observation:
    """One time that was taken."""

    weights: Array
    """[N] of the cells around it; sum 1."""
    ratio: float
    """To what was measured there at first."""
    octaves_outside: float = 0.0
    """How far it is beyond the largest size that was measured."""


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """A value: `observed` returns a new one. Its state is [N cells .., pace], in logarithms."""

    prior: Array
    """[N, N] covariance of the cells before any step, to which it returns without steps."""
    state: Array
    """[N + 1]"""
    covariance: Array
    """[N + 1, N + 1]"""

    @classmethod
    def none(cls, *surfaces: Array) -> Self:
        """For the cells of some surfaces, at these places [n, axes] in octaves each: surfaces share only the pace."""
        num_cells = sum(len(octaves) for octaves in surfaces)
        prior, start = np.zeros((num_cells, num_cells)), 0
        for octaves in surfaces:
            distance = np.abs(octaves[:, None] - octaves[None]).sum(axis=2)
            own = slice(start, start + len(octaves))
            prior[own, own] = MEASURED_WITHIN**2 * NEARER_BY_OCTAVE**-distance
            start += len(octaves)
        covariance = np.zeros((num_cells + 1, num_cells + 1))
        covariance[:-1, :-1], covariance[-1, -1] = prior, PACE_WITHIN**2
        return cls(prior, np.zeros(num_cells + 1), covariance)

    @property
    def factors(self) -> Array:
        """[N] within 1/4 .. 4, at the machine's pace."""
        limit = np.log(LARGEST_FACTOR)
        return np.asarray(np.exp(np.clip(self.state[:-1] + self.state[-1], -limit, limit)))

    def observed(self, steps: Iterable[Iterable[Observation]]) -> Corrections:
        """After some steps, each with the times that were taken in it."""
        state, covariance = self.state.copy(), self.covariance.copy()
        forgetting = (CELLS_WANDER / MEASURED_WITHIN) ** 2
        limit = np.log(LARGEST_FACTOR)
        for step in steps:
            covariance[:-1, :-1] += forgetting * (self.prior - covariance[:-1, :-1])
            covariance[-1, -1] += PACE_WANDERS**2
            for seen in step:
                weights = np.append(seen.weights, 1.0)
                shared = covariance @ weights
                noise = STEP_NOISE**2 + (NOISE_BY_OCTAVE * seen.octaves_outside) ** 2
                innovation, variance = np.log(seen.ratio) - state @ weights, weights @ shared
                noise *= max(1.0, innovation**2 / (SURPRISING**2 * (variance + noise)))
                gain = shared / (variance + noise)
                state = np.clip(state + gain * innovation, -limit, limit)
                covariance -= np.outer(gain, shared)
        return Corrections(self.prior, state, covariance)
