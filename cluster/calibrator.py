"""What one engine keeps of its drafts' outcomes: evidence for whoever asks, and its own refit when nobody does.

With a fleet's scheduler, evidence is taken every few seconds and temperatures come back with the lease. An engine whose
evidence nobody takes refits from its own, by the same function and just as bounded. Either way they are adopted between
two steps, so the confidences of one draft all come from the same temperatures.
"""

from __future__ import annotations

import threading

import numpy as np

from cluster.calibration import Blocks, Evidence, errors, refit
from cluster.messages import PositionCalibration
from drafter.interface import check_temperatures

PATIENCE_STEPS = 2048
"""An engine that was sent no temperatures for so long refits itself."""
REFIT_EVERY_STEPS = 256
REPORT_EVERY_STEPS = 256
COUNTED_TOGETHER = 256
"""Blocks are kept until there are so many: counting one costs as much as counting hundreds, a tenth of a short step."""


class Calibrator:
    """`observe`, `due` and `report` belong to the thread that steps; all else to any."""

    def __init__(self, temperatures: tuple[float, ...]) -> None:
        """Those that the drafter has now; empty for one without confidences, and then nothing is gathered."""
        self.temperatures = temperatures
        self._lock = threading.Lock()
        self._evidence = Evidence.none(len(temperatures))
        self._recent = Evidence.none(len(temperatures))
        self._uncounted: list[Blocks] = []
        self._num_uncounted = 0
        self._offered: tuple[float, ...] | None = None
        self._num_steps = 0
        self._num_steps_alone = 0

    def observe(self, blocks: Blocks) -> None:
        """Of one step, drafted with the temperatures that are in force."""
        with self._lock:
            self._uncounted.append(blocks)
            self._num_uncounted += len(blocks.num_known)
            if self._num_uncounted >= COUNTED_TOGETHER:
                self._count()

    def _count(self) -> None:
        """With the lock held, and before temperatures change: confidences mean nothing without theirs."""
        if not self._uncounted:
            return
        widths = [blocks.confidences.shape[1] for blocks in self._uncounted]
        confidences = np.zeros((self._num_uncounted, max(widths)))
        first = 0
        for blocks, width in zip(self._uncounted, widths, strict=True):
            last = first + len(blocks.num_known)
            confidences[first:last, :width] = blocks.confidences
            first = last
        known, passed, coupled = (
            [each for blocks in self._uncounted for each in getattr(blocks, name)]
            for name in ("num_known", "num_passed", "coupled")
        )
        evidence = Evidence.of_step(confidences, self.temperatures, known, passed, coupled)
        self._uncounted, self._num_uncounted = [], 0
        self._evidence += evidence
        self._recent = (self._recent + evidence).recent()

    def take(self) -> Evidence:
        """All that was gathered since the last time."""
        with self._lock:
            self._count()
            taken, self._evidence = self._evidence, Evidence.none(len(self.temperatures))
        return taken

    def give_back(self, evidence: Evidence) -> None:
        """What was taken, but reached nobody."""
        with self._lock:
            self._evidence += evidence

    def offer(self, temperatures: tuple[float, ...]) -> None:
        """For the next step. ValueError when they don't fit the drafter."""
        check_temperatures(temperatures, len(self.temperatures))
        with self._lock:
            self._offered = temperatures
            self._num_steps_alone = 0

    def due(self) -> tuple[float, ...] | None:
        """Once before each step: the temperatures to draft with from now on, when they are others than before."""
        if not self.temperatures:
            return None
        self._num_steps += 1
        with self._lock:
            self._num_steps_alone += 1
            wanted, self._offered = self._offered, None
            alone = self._num_steps_alone >= PATIENCE_STEPS
            if wanted is None and alone and self._num_steps % REFIT_EVERY_STEPS == 0:
                self._count()
                wanted, self._evidence = refit(self._evidence, self.temperatures)
            if wanted is None or wanted == self.temperatures:
                return None
            self._count()
            self.temperatures = wanted
        return wanted

    def report(self) -> tuple[PositionCalibration, ...]:
        """Once after each step: how true confidences are lately, every REPORT_EVERY_STEPS."""
        if not self.temperatures or self._num_steps % REPORT_EVERY_STEPS:
            return ()
        with self._lock:
            self._count()
            return errors(self._recent, self.temperatures)
