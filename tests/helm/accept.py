"""Takes what the chart renders now as the golden output: `python -m tests.helm.accept`, then read the difference."""

from __future__ import annotations

from tests.helm.render import CASES, GOLDEN, golden

if __name__ == "__main__":
    for case in CASES:
        (GOLDEN / f"{case}.yaml").write_text(golden(case))
