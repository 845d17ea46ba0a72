"""Derives the simulator's inputs from published measurements: python -m ops.simulator.fit FOLDER

V4-Flash: the published curve as it is; the survival by position of V4-Pro, since none is published.
V4-Pro: published are only throughputs, by concurrency and fixed length. A step of n requests that verify l drafts each
takes n * (1 + sum of survivals) / throughput seconds, so a monotone verify curve, a linear draft cost and a survival
profile are fitted to the five fixed lengths together. The adaptive column is left out: it is what the simulator must
predict.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from cluster.sps import CostCurve, DraftSample, Provenance, VerifySample
from ops.simulator.inputs import FOLDER

Array = NDArray[np.float64]

FIXED_LENGTHS = (0, 1, 3, 5, 7)
GRID = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048], dtype=np.float64)
BLOCK = 7
SMOOTHNESS = 0.05


class ProModel:
    """Parameters [GRID + 2 + BLOCK]: log seconds of 1 token, log growth between grid points, draft, acceptance."""

    def __init__(self, parameters: Array) -> None:
        self.log_verify = parameters[0] + np.concatenate([[0.0], np.cumsum(np.exp(parameters[1 : len(GRID)]))])
        self.draft = np.exp(parameters[len(GRID) : len(GRID) + 2])
        self.survival = np.cumprod(1 / (1 + np.exp(-parameters[len(GRID) + 2 :])))

    def throughput(self, concurrency: float, length: int) -> float:
        tokens = concurrency * (1 + length)
        seconds = np.exp(np.interp(np.log(tokens), np.log(GRID), self.log_verify))
        if length:
            seconds += self.draft[0] + self.draft[1] * concurrency
        return float(concurrency * (1 + self.survival[:length].sum()) / seconds)


def fit_pro(rows: list[list[float]]) -> tuple[ProModel, float]:
    """rows: concurrency, then a throughput per fixed length. Also returns the largest relative error of the fit."""
    start = np.concatenate([[np.log(0.0095)], np.full(len(GRID) - 1, np.log(0.15)), np.log([0.001, 2e-5])])
    start = np.concatenate([start, np.full(BLOCK, 0.9)])

    def errors(model: ProModel) -> Array:
        ratios = [model.throughput(row[0], n) / row[1 + i] for row in rows for i, n in enumerate(FIXED_LENGTHS)]
        return np.log(ratios)

    def residuals(parameters: Array) -> Array:
        model = ProModel(parameters)
        bends = np.diff(model.log_verify, 2), np.diff(parameters[-BLOCK:], 2)
        published = [max(0.0, 0.72 - model.survival[0]), max(0.0, model.survival[-1] - 0.095)]
        return np.concatenate([errors(model), SMOOTHNESS * np.concatenate(bends), 5 * np.array(published)])

    model = ProModel(least_squares(residuals, start).x)
    return model, float(np.abs(np.expm1(errors(model))).max())


def _write(name: str, curve: CostCurve, survival: list[float], source: str, **facts: Any) -> None:
    path = FOLDER / f"{name}.json"
    curve.save(path)
    record = {"source": source, **facts, "survival": [round(value, 4) for value in survival]}
    record |= json.loads(path.read_text())
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds v4_flash_tp4_b300.json and v4_pro_tp8_b300_throughput.json")
    folder = parser.parse_args().folder

    published = json.loads((folder / "v4_pro_tp8_b300_throughput.json").read_text())
    model, error = fit_pro([row[:6] for row in published["aggregate_tokens_per_second"]])
    made = Provenance(model="DeepSeek-V4-Pro", dtype="", device="TP=8 B300", num_threads=0, versions="", date="")
    fine = np.unique(np.rint(np.geomspace(1, GRID[-1], 60)))
    seconds = np.exp(np.interp(np.log(fine), np.log(GRID), model.log_verify))
    pro = CostCurve.fit(
        [VerifySample(int(n), 0, round(s, 6)) for n, s in zip(fine.tolist(), seconds.tolist(), strict=True)],
        [DraftSample(n, 7, float(model.draft[0] + model.draft[1] * n)) for n in (1, 256)],
        made,
    )
    survival = model.survival.tolist()
    _write("v4_pro_tp8_b300", pro, survival, published["origin"] + "; fitted", largest_fit_error=round(error, 4))

    table = json.loads((folder / "v4_flash_tp4_b300.json").read_text())
    flash = CostCurve.fit(
        [VerifySample(n, 0, ms / 1000) for n, ms in table["verify_ms_by_target_tokens"]],
        [DraftSample(n, 7, ms / 1000) for n, ms in table["draft_ms_by_requests"]],
        Provenance(model="DeepSeek-V4-Flash", dtype="", device="TP=4 B300", num_threads=0, versions="", date=""),
    )
    _write("v4_flash_tp4_b300", flash, survival, table["origin"] + "; survival fitted to V4-Pro's throughputs")
    print(f"V4-Pro: fixed lengths within {error:.1%}; survival {np.round(survival, 3).tolist()}")


if __name__ == "__main__":
    main()
