"""Confidence that stays true in production: what became of drafts, by slot, and temperatures refitted from it.

Evidence are two kinds of counts by verification mode and slot. Of slots that were put to the test (admitted, and all
before them passed): how many passed, by the head's raw logit. Of all admitted slots: whether the prefix through them
survived, by predicted survival; the calibration error comes from these.

Why conditional outcomes are safe to fit to. Only admitted slots are observed, and admission prefers confident ones. But
whether slot k is admitted never depends on the token it holds (budget.admit), only on confidences, so among the slots
of one logit those that were tested pass as often as the others would have. Survivals, fitted as offline (drafter/
calibration.py), would take in how much was admitted; and raw logits keep their meaning when temperatures change.

Left out are requests whose logits are edited (`verifier.edits_logits`: bias, which is also how tokens are banned or
listed, penalties, min_tokens): the drafter knows nothing of that, so its failures there say nothing about its head.
Temperature, top-k, top-p and min-p stay in, however small: drafts are drawn under them too, and greedy decoding, the
hardest cut of all, is ordinary traffic.

Pure values and numbers; knows no drafter, no engine and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.messages import PositionCalibration, VerificationMode

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

MODES: tuple[VerificationMode, ...] = ("rejection", "coupled")
NUM_LOGITS, LARGEST_LOGIT = 32, 8.0
"""Logits are counted in halves; beyond +-8 the head is as sure as it can be."""
NUM_SURVIVALS = 20
"""Bins of the calibration error, as in the DSpark paper."""
MIN_TESTED = 500
"""Fewer tested slots change nothing."""
MIN_NATS = 4.5
"""A temperature moves when the evidence is so much likelier under the new one: three standard deviations."""
LARGEST_STEP = 1.2
"""One refit changes a temperature by at most this factor."""
COOLEST, WARMEST = 0.1, 10.0
"""The range that the offline fit searches."""
MIN_COVERED = 200
"""An error of fewer slots would be mostly noise, and is not reported."""
RECENT_SLOTS = 20_000
"""Errors are of about so many slots of the commonest position: when there are more, older ones count half."""

_CENTRES = (np.arange(NUM_LOGITS) + 0.5) / NUM_LOGITS * 2 * LARGEST_LOGIT - LARGEST_LOGIT
_STEPS = LARGEST_STEP ** np.linspace(-1, 1, 41)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The drafted blocks of one step, before they are counted. See `Evidence.of_step`."""

    confidences: NDArray[np.floating]
    """[R, <= G]"""
    num_known: Sequence[int]
    num_passed: Sequence[int]
    coupled: Sequence[bool]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Counts by mode and slot; they add up over steps, engines and time. 14 KB for 7 slots."""

    tested: Counts
    """[M, G, Z] slots that were put to the test, by raw logit."""
    passed: Counts
    """[M, G, Z] those of them that passed."""
    covered: Counts
    """[M, G, B] admitted slots, by predicted survival."""
    survived: Counts
    """[M, G, B] those of them whose whole prefix passed."""
    predicted: Array
    """[M, G, B] their predicted survivals, summed."""

    @classmethod
    def none(cls, num_slots: int) -> Self:
        logits, survivals = ((len(MODES), num_slots, bins) for bins in (NUM_LOGITS, NUM_SURVIVALS))
        tested, passed = np.zeros(logits, np.int64), np.zeros(logits, np.int64)
        return cls(tested, passed, np.zeros(survivals, np.int64), np.zeros(survivals, np.int64), np.zeros(survivals))

    @classmethod
    def of_step(
        cls,
        confidences: ArrayLike,
        temperatures: ArrayLike,
        num_known: ArrayLike,
        num_passed: ArrayLike,
        coupled: ArrayLike,
    ) -> Self:
        """What blocks came to that were drafted with the same temperatures.

        confidences [R, <= G], calibrated by temperatures [G]; num_known [R]: leading slots whose outcome is known (all
        that were admitted; 0 leaves the request out; those up to an end token that passed); num_passed [R] of them
        passed; coupled [R] bool.
        """
        calibrated, softening = np.asarray(confidences, np.float64), np.asarray(temperatures, np.float64)
        known, passed = (np.asarray(x, np.int64)[:, None] for x in (num_known, num_passed))
        slots = np.arange(calibrated.shape[1])
        row = np.asarray(coupled, np.int64)[:, None] * len(softening) + slots
        size = len(MODES) * len(softening)
        inside = np.clip(calibrated, 1e-9, 1 - 1e-9)
        logits = np.log(inside / (1 - inside)) * softening[: len(slots)]
        logit_bins = _bins((logits + LARGEST_LOGIT) / (2 * LARGEST_LOGIT), NUM_LOGITS)
        survivals = calibrated.cumprod(axis=1)
        survival_bins = _bins(survivals, NUM_SURVIVALS)

        def count(chosen: NDArray[np.bool_], bins: Counts, num_bins: int, weights: Array | None = None) -> Array:
            flat = (row * num_bins + bins)[chosen]
            total = np.bincount(flat, None if weights is None else weights[chosen], minlength=size * num_bins)
            return np.asarray(total, np.float64).reshape(len(MODES), -1, num_bins)

        covered, happened = slots < known, slots < np.minimum(passed, known)
        tested = covered & (slots <= passed)
        return cls(
            count(tested, logit_bins, NUM_LOGITS).astype(np.int64),
            count(happened, logit_bins, NUM_LOGITS).astype(np.int64),
            count(covered, survival_bins, NUM_SURVIVALS).astype(np.int64),
            count(happened, survival_bins, NUM_SURVIVALS).astype(np.int64),
            count(covered, survival_bins, NUM_SURVIVALS, survivals),
        )

    @property
    def num_tested(self) -> Counts:
        """[G] tested slots by position, whatever the mode."""
        return np.asarray(self.tested.sum(axis=(0, 2)))

    def __add__(self, other: Evidence) -> Evidence:
        """Both together. ValueError when they are of blocks of different size."""
        if self.tested.shape != other.tested.shape:
            raise ValueError(f"evidence of {other.tested.shape[1]} slots can't be added to {self.tested.shape[1]}")
        return Evidence(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(Evidence)))

    def halved(self) -> Evidence:
        """The same counts at half the weight, as far as halves are whole."""
        counts = self.tested // 2, self.passed // 2, self.covered // 2, self.survived // 2
        return Evidence(*counts, self.predicted / 2)

    def recent(self) -> Evidence:
        """What errors are told of: the past fades as more comes. Of one slot or more."""
        return self.halved() if self.covered.sum(axis=2).max() > RECENT_SLOTS else self

    def without(self, slots: NDArray[np.bool_]) -> Evidence:
        """Forget what is known of these slots, [G] bool."""
        kept = ~slots[None, :, None]
        return Evidence(*(getattr(self, item.name) * kept for item in fields(Evidence)))


def _bins(shares: Array, num_bins: int) -> Counts:
    return np.clip((shares * num_bins).astype(np.int64), 0, num_bins - 1)


def refit(evidence: Evidence, temperatures: tuple[float, ...]) -> tuple[tuple[float, ...], Evidence]:
    """New temperatures, and the evidence that is still to be used: of the slots that have too little yet.

    Each slot's temperature becomes the likeliest within one bounded step, of both modes' outcomes together: a drafter
    has one temperature per slot, so it fits the traffic's mixture. A slot with fewer than MIN_TESTED outcomes keeps
    what it has, as does one whose evidence fits about as well as it is.
    """
    enough = evidence.num_tested >= MIN_TESTED
    tested, passed = evidence.tested.sum(axis=0), evidence.passed.sum(axis=0)
    fitted = tuple(
        _likeliest(tested[slot], passed[slot], temperature) if enough[slot] else temperature
        for slot, temperature in enumerate(temperatures)
    )
    return fitted, evidence.without(enough)


def _likeliest(tested: Counts, passed: Counts, temperature: float) -> float:
    """tested and passed [Z]. The likelihood has one peak, so the best of a bounded step is a step towards it."""
    candidates = np.clip(temperature * _STEPS, COOLEST, WARMEST)
    logits = _CENTRES / candidates[:, None]
    nats = -(passed * np.logaddexp(0, -logits) + (tested - passed) * np.logaddexp(0, logits)).sum(axis=1)
    best = int(nats.argmax())
    return float(candidates[best]) if nats[best] - nats[len(_STEPS) // 2] >= MIN_NATS else temperature


def errors(evidence: Evidence, temperatures: tuple[float, ...]) -> tuple[PositionCalibration, ...]:
    """Expected calibration error of the survival, by mode and position; where too little was seen, none."""
    covered = evidence.covered.sum(axis=2)
    gaps = np.abs(evidence.predicted - evidence.survived).sum(axis=2)
    return tuple(
        PositionCalibration(
            mode, slot, float(gaps[m, slot] / covered[m, slot]), int(covered[m, slot]), temperatures[slot]
        )
        for m, mode in enumerate(MODES)
        for slot in range(len(temperatures))
        if covered[m, slot] >= MIN_COVERED
    )
