"""What a simulation runs on: a cost curve, and how drafts are accepted.

Acceptance is logistic-normal: slot k of request r passes with probability c = sigmoid(offset_k + u_r + v_rt + w_rtk),
where u is the request's own ease (drawn once), v the step's and w the slot's (drawn each step). The confidence is c
itself, so calibration is perfect here. Spreads are set by how well real confidences tell drafts apart: AUROC 0.81-0.91
by position in the DSpark paper (arXiv 2607.05147). Offsets then follow from the mean survival by position.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.sps import CostCurve, Provenance

Array = NDArray[np.float64]

FOLDER = Path(__file__).parent / "inputs"
REQUEST_SPREAD, STEP_SPREAD, SLOT_SPREAD = 0.8, 0.8, 0.8
NUM_SAMPLES = 20_000


@dataclass(frozen=True)
class Acceptance:
    """How drafts pass."""

    offsets: tuple[float, ...]
    """[G] log-odds of a middling slot k, given that the slots before it passed."""
    request_spread: float = REQUEST_SPREAD
    step_spread: float = STEP_SPREAD
    slot_spread: float = SLOT_SPREAD

    @classmethod
    def of_survival(cls, survival: Sequence[float], **spreads: float) -> Acceptance:
        """The acceptance whose prefixes of 1, 2, .. slots pass so often on average: by bisection on a fixed sample."""
        flat = cls(offsets=(0.0,) * len(survival), **spreads)
        generator = np.random.default_rng(0)
        logits = flat.logits(flat.ease(NUM_SAMPLES, generator), generator)
        before, offsets = np.ones(NUM_SAMPLES), []
        for slot, target in enumerate(survival):
            low, high = -12.0, 12.0
            for _ in range(40):
                middle = (low + high) / 2
                mean = (before * _sigmoid(logits[:, slot] + middle)).mean()
                low, high = (middle, high) if mean < target else (low, middle)
            offsets.append(round((low + high) / 2, 4))
            before = before * _sigmoid(logits[:, slot] + offsets[-1])
        return cls(tuple(offsets), **spreads)

    def ease(self, num_requests: int, generator: np.random.Generator) -> Array:
        """[R] what is peculiar to each request."""
        return generator.normal(0.0, self.request_spread, num_requests)

    def logits(self, ease: Array, generator: np.random.Generator) -> Array:
        """[R, G] log-odds of one step."""
        steps = generator.normal(0.0, self.step_spread, (len(ease), 1))
        slots = generator.normal(0.0, self.slot_spread, (len(ease), len(self.offsets)))
        return np.asarray(ease[:, None] + steps + slots + np.array(self.offsets))

    def confidences(self, ease: Array, generator: np.random.Generator) -> Array:
        """[R, G] P(slot passes | slots before it passed) of one step."""
        return _sigmoid(self.logits(ease, generator))


@dataclass(frozen=True)
class Hardware:
    """A target on a machine, as published, with where the numbers come from."""

    name: str
    source: str
    curve: CostCurve
    survival: tuple[float, ...]
    """[G] mean survival by position."""

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of_survival(self.survival)


def load_hardware(name: str, folder: Path = FOLDER) -> Hardware:
    """Read what `ops.simulator.fit` derived."""
    path = folder / f"{name}.json"
    record = json.loads(path.read_text())
    curve = CostCurve.load(path, Provenance(**record["provenance"]))
    return Hardware(name, record["source"], curve, tuple(record["survival"]))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
