"""What deciding costs: `allocate` for a fleet, `admit` for one engine, and the bytes of a report.

python -m ops.benchmarks.budget                  # the design's sizes: 256 replicas x 256 requests x 7 slots
python -m ops.benchmarks.budget --replicas 8 --json FILE
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cluster.budget import LEVELS, admit
from cluster.fleet import Group, allocate
from cluster.messages import BudgetLease, LoadReport, SlaTier
from cluster.sps import CostCurve, DraftSample, Provenance, VerifySample
from ops.benchmarks.machine import median_seconds
from ops.benchmarks.report import Row, provenance, table

NOWHERE = Provenance(model="none", dtype="none", device="none", num_threads=1, versions="", date="")
STAIR_TOKENS = 32
ALLOCATE_GOAL_MS, ADMIT_GOAL_MS, REPORT_GOAL_BYTES = 20.0, 0.3, 4096


def staircase(num_tokens: int) -> CostCurve:
    """Seconds that rise from stair to stair: 5 ms for a small batch, 1.5 ms more for every 100 tokens."""
    edges = range(STAIR_TOKENS, num_tokens + STAIR_TOKENS, STAIR_TOKENS)
    points = [(tokens, 0.005 + 15e-6 * edge) for edge in edges for tokens in (edge - STAIR_TOKENS + 1, edge)]
    samples = [VerifySample(tokens, 0, seconds) for tokens, seconds in points]
    return CostCurve.fit(samples, [DraftSample(1, 7, 0.001), DraftSample(256, 7, 0.005)], NOWHERE)


def random_report(generator: np.random.Generator, num_requests: int, num_slots: int) -> LoadReport:
    """Requests of different predictability; every fifth is in the second tier."""
    ease = generator.uniform(2.0, 8.0, (num_requests, 1))
    survival = generator.beta(ease, 1.5, (num_requests, num_slots)).cumprod(axis=1)
    return LoadReport(
        step=0,
        survival=np.rint(survival * LEVELS).astype(np.uint8).tobytes(),
        tiers=bytes(r % 5 == 0 for r in range(num_requests)),
        num_prefill_tokens=0,
        context_tokens=0,
        num_waiting=0,
        drafted=True,
    )


def measure(num_replicas: int, num_requests: int, num_slots: int, repeats: int) -> list[Row]:
    """One row per question: what was decided, its size, its milliseconds, its goal."""
    generator = np.random.default_rng(0)
    curve = staircase(num_requests * (num_slots + 1))
    reports = [random_report(generator, num_requests, num_slots) for _ in range(num_replicas)]
    alone = [Group([report], curve) for report in reports]
    ranks = min(32, num_replicas)
    lockstep = [Group(reports[first : first + ranks], curve) for first in range(0, num_replicas, ranks)]
    size = f"{num_replicas} x {num_requests} x {num_slots}"
    # Speeds that full blocks at this load don't reach: all of them must be searched for.
    speed = 0.8 / float(curve.step_seconds(num_requests, 0))
    fast = SlaTier("fast", 2 * speed, weight=16.0)
    some, all_ = (SlaTier("standard"), fast), (SlaTier("slow", speed, weight=16.0), fast)
    decided = {tiers: allocate(alone, tiers) for tiers in (some, all_)}
    newer = [random_report(generator, num_requests, num_slots) for _ in range(num_replicas)]

    def standing(tiers: tuple[SlaTier, ...]) -> list[Group]:
        """The usual case: other requests, the same load."""
        return [Group([report], curve, leases) for report, leases in zip(newer, decided[tiers], strict=True)]

    actions: list[tuple[str, str, Callable[[], object], float | None]] = [
        ("allocate, engines alone", size, lambda: allocate(alone), ALLOCATE_GOAL_MS),
        (f"allocate, lockstep groups of {ranks}", size, lambda: allocate(lockstep), ALLOCATE_GOAL_MS),
        ("allocate, a fifth has a promise", size, lambda: allocate(alone, some), ALLOCATE_GOAL_MS),
        ("allocate, all have promises", size, lambda: allocate(alone, all_), ALLOCATE_GOAL_MS),
        (
            "allocate, a fifth has a promise, with last leases",
            size,
            lambda: allocate(standing(some), some),
            ALLOCATE_GOAL_MS,
        ),
        (
            "allocate, all have promises, with last leases",
            size,
            lambda: allocate(standing(all_), all_),
            ALLOCATE_GOAL_MS,
        ),
        ("allocate, lockstep groups, all have promises", size, lambda: allocate(lockstep, all_), ALLOCATE_GOAL_MS),
        ("allocate, one engine", f"1 x {num_requests} x {num_slots}", lambda: allocate(alone[:1]), None),
    ]
    survival = generator.uniform(0.3, 1.0, (num_requests, num_slots)).cumprod(axis=1)
    limits, needs, weights = [num_slots] * num_requests, [2.0] * num_requests, [16.0] * num_requests
    lease = BudgetLease(cap=num_requests * num_slots // 2, price=0.01)
    one = f"1 x {num_requests} x {num_slots}"
    actions.append(("admit, one engine", one, lambda: admit(survival, limits, lease, needs, weights), ADMIT_GOAL_MS))
    return [
        {"what": what, "size": sizes, "milliseconds": 1000 * median_seconds(action, repeats), "goal_milliseconds": goal}
        for what, sizes, action, goal in actions
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--requests", type=int, default=256, help="of each replica")
    parser.add_argument("--slots", type=int, default=7, help="of each request")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers there, with where they come from")
    arguments = parser.parse_args()
    rows = measure(arguments.replicas, arguments.requests, arguments.slots, arguments.repeats)
    report = random_report(np.random.default_rng(0), arguments.requests, arguments.slots)
    num_bytes = len(pickle.dumps(report))
    cells = [
        [row["what"], row["size"], f"{row['milliseconds']:.2f}", str(row["goal_milliseconds"] or "-")] for row in rows
    ]
    print(table(["decision", "replicas x requests x slots", "ms", "goal"], cells))
    print(f"\nA report takes {num_bytes} bytes (goal {REPORT_GOAL_BYTES}).")
    if arguments.json:
        arguments.json.write_text(json.dumps({**provenance(), "report_bytes": num_bytes, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
