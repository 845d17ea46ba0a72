"""Simulates a scenario and writes JSON, Markdown and a plot under ops/results/simulator/.

python -m ops.simulator --scenario NAME
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

from ops.benchmarks.report import RESULTS, provenance, table
from ops.simulator.scenarios import SCENARIOS, Findings, Plot, Row

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 (the backend is chosen first: there may be no screen)

COLUMNS = {
    "replicas": "{}",
    "ranks": "{}",
    "load_spread": "{:g}",
    "hardware": "{}",
    "concurrency": "{}",
    "load": "{}",
    "policy": "{}",
    "tokens_per_second": "{:.0f}",
    "published": "{}",
    "error": "{:+.1%}",
    "tokens_per_second_per_user": "{:.0f}",
    "verified_per_request": "{:.2f}",
    "accepted_length": "{:.2f}",
    "wasted_share": "{:.0%}",
    "step_milliseconds": "{:.1f}",
    "kept": "{:.1%}",
    "over_own": "{:+.1%}",
}
"""Of a row, in this order, what the Markdown shows where the scenario has it."""


def draw(rows: list[Row], plots: list[Plot], path: Path) -> None:
    figure, axes = pyplot.subplots(1, len(plots), figsize=(6 * len(plots), 4), squeeze=False)
    for axis, plot in zip(axes[0], plots, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.get("load_spread") != 0.0:
                lines.setdefault(str(row[plot.by]), []).append((row[plot.x], row[plot.y]))
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
        if plot.log_x:
            axis.set_xscale("log", base=2)
        axis.set(xlabel=plot.x.replace("_", " "), ylabel=plot.y.replace("_", " "), title=plot.title)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def markdown(name: str, question: str, findings: Findings, made: Row) -> str:
    shown = [column for column in COLUMNS if column in findings.rows[0]]
    cells = [[COLUMNS[column].format(row[column]) for column in shown] for row in findings.rows]
    said = "\n".join(f"- {sentence}" for sentence in findings.said)
    return (
        f"# {name}\n\n{question}\n\n{said}\n\n![{name}]({name}.png)\n\n"
        f"{table([column.replace('_', ' ') for column in shown], cells)}\n\n"
        f"Simulated {made['date'][:10]} with `{made['command']}` at commit {made['commit']}; inputs and their sources: "
        "`ops/simulator/inputs/`.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), required=True)
    parser.add_argument("--results", type=Path, default=RESULTS / "simulator", help="folder to write to")
    arguments = parser.parse_args()
    scenario = SCENARIOS[arguments.scenario]
    findings, made = scenario(), provenance()
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / arguments.scenario
    record = {**made, "said": findings.said, "rows": findings.rows}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    draw(findings.rows, findings.plots, path.with_suffix(".png"))
    text = markdown(arguments.scenario, (scenario.__doc__ or "").strip(), findings, made)
    path.with_suffix(".md").write_text(text)
    print("\n".join(findings.said))


if __name__ == "__main__":
    main()
