"""Results as tables: on the screen, and in the README between its markers, so that no number is typed by hand.

python -m ops.benchmarks.report        # rewrites README.md from ops/results/*.json
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "ops" / "results"
SPEEDUP, ALONE, PEERS = (RESULTS / name for name in ("speedup.json", "speedup_alone.json", "peers.json"))
DRAFTER = RESULTS / "drafters" / "smollm2-135m-instruct.json"
LABORATORY = RESULTS / "drafters" / "T1.json"

Row = dict[str, Any]


def provenance() -> Row:
    """What a reader needs to repeat a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "ray", "transformers")},
        },
        "machine": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "system": platform.system()},
    }


def _command() -> str:
    """What was typed; of absolute paths only the name, since folders of this machine tell nobody anything."""
    spec = sys.modules["__main__"].__spec__
    program = f"python -m {spec.name}" if spec else Path(sys.argv[0]).name
    return " ".join([program, *[Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]])


def _commit() -> str:
    result = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "not a git checkout"


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: words to the left, numbers to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(_is_number(row[column]) for row in cells[1:]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)) + "|"
    return "\n".join([line(cells[0]), rule, *[line(row) for row in cells[1:]]])


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()


def speedup_table(rows: Sequence[Row]) -> str:
    """One line for each point of a speed-up run: what either way of speculating makes of plain decoding."""
    points: dict[tuple[str, float, int], dict[str, Row]] = {}
    for row in rows:
        points.setdefault((row["dataset"], row["temperature"], row["concurrency"]), {})[row["mode"]] = row
    lines = []
    for (dataset, temperature, concurrency), modes in points.items():
        plain, fixed, scheduled = (modes[mode] for mode in ("plain", "fixed", "scheduled"))
        better = max(plain["tokens_per_second"], fixed["tokens_per_second"])
        lines.append(
            [
                dataset,
                f"{temperature:g}",
                str(concurrency),
                f"{plain['tokens_per_second']:.1f}",
                _over_plain(fixed),
                _over_plain(scheduled),
                f"{fixed['accepted_length']:.2f} / {scheduled['accepted_length']:.2f}",
                f"{scheduled['tokens_per_second'] / better:.2f}x",
            ]
        )
    header = ["prompts", "temperature", "concurrency", "plain tok/s", "fixed over plain", "scheduled over plain"]
    return table([*header, "accepted length, fixed / scheduled", "scheduled over the better"], lines)


def _over_plain(row: Row) -> str:
    low, high = row["speedup_interval"]
    return f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})"


def step_time_table(seconds_by_tokens: dict[str, float]) -> str:
    return table(
        ["tokens in a step", *seconds_by_tokens],
        [["milliseconds", *[f"{1000 * seconds:.1f}" for seconds in seconds_by_tokens.values()]]],
    )


def peers_table(rows: Sequence[Row]) -> str:
    cells = [
        [
            row["system"],
            row["dataset"],
            str(row["concurrency"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second_per_user']:.1f}",
            f"{row['over_vllm']:.2f}x" if row["over_vllm"] else "-",
        ]
        for row in rows
    ]
    return table(["system", "prompts", "concurrency", "tok/s", "tok/s/user", "over vLLM"], cells)


def drafter_section(results: Row) -> str:
    """What `python -m drafter evaluate --json` found: acceptance by data set, calibration by position."""
    slots = range(len(results["auroc"]))
    acceptance = [
        [row["dataset"], f"{row['accepted_length']:.2f}", *[f"{value:.2f}" for value in row["conditional"]]]
        for row in results["rows"]
    ]
    calibration = [
        [name, *[f"{value:.3f}" for value in results[key]], f"{sum(results[key]) / len(slots):.3f}"]
        for name, key in (("ECE before STS", "ece_before_sts"), ("ECE after", "ece_after_sts"), ("AUROC", "auroc"))
    ]
    positions = [f"position {k + 1}" for k in slots]
    return "\n\n".join(
        [
            _decoded_on(results["provenance"]),
            table(["prompts", "accepted length", *positions], acceptance),
            table(["survival", *positions, "mean"], calibration),
        ]
    )


def laboratory_section(results: Row) -> str:
    """What `python -m drafter experiment T1` found: each drafter by data set, and what the first gains over it."""
    lengths = {(row["drafter"], row["dataset"]): row for row in (*results["rows"], *results["macro"])}
    drafters = list(dict.fromkeys(row["drafter"] for row in results["rows"]))
    datasets = list(dict.fromkeys(row["dataset"] for row in results["rows"]))
    gains = {row["over"]: row for row in results["gains"] if row["dataset"] == "macro"}
    passes = results["draft_passes"]
    lines = []
    for drafter in drafters:
        mean = lengths[drafter, "macro"]
        lines.append(
            [
                drafter,
                *[f"{lengths[drafter, dataset]['accepted_length']:.2f}" for dataset in datasets],
                f"{mean['accepted_length']:.2f} ({mean['low']:.2f}-{mean['high']:.2f})",
                _gain(gains[drafter]) if drafter in gains else "-",
                f"{1000 * passes[drafter]:.1f}" if drafter in passes else "-",
            ]
        )
    made = results["provenance"]
    header = ["drafter", *datasets, "mean", f"{results['gains'][0]['drafter']} over it", "draft pass, ms"]
    return "\n\n".join(
        [
            _decoded_on(made, f"{made['slots']:,} slots each, "),
            table(header, lines),
        ]
    )


def _decoded_on(made: Row, training: str = "") -> str:
    """The origin of what `python -m drafter` measured."""
    return (
        f"Measured {made['date'][:10]} on {made['machine']}, torch {made['versions']['torch']}, at temperature "
        f"{made['temperature']:g}, {training}with `{' '.join(made['command'])}`."
    )


def _gain(row: Row) -> str:
    return f"{row['percent']:+.1f}% ({row['low']:+.1f}..{row['high']:+.1f})"


def speedup_section(results: Row) -> str:
    """The README's words around a speed-up run's tables."""
    limit = results["memory_bandwidth_limit"]
    return "\n\n".join(
        [
            _measured_on(results),
            speedup_table(results["rows"]),
            "Ratios are of tok/s, with their 95% intervals. One step of the target, by the tokens in it:",
            step_time_table(results["step_time_seconds_by_tokens"]),
            f"A step of one token reads {limit['weight_bytes'] / 1e6:.0f} MB of weights and runs at "
            f"{limit['fraction']:.0%} of this machine's measured read bandwidth "
            f"({limit['bytes_per_second'] / 1e9:.1f} GB/s).",
        ]
    )


def _measured_on(results: Row) -> str:
    machine, versions = results["machine"], results["versions"]
    return (
        f"Measured {results['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, torch {versions['torch']}, "
        f"with `{results['command']}`."
    )


def fill(text: str, section: str, content: str) -> str:
    """`text` with what stands between the section's two markers replaced. Raises ValueError without the markers."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    head, found_begin, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"no markers {begin} ... {end}")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    if SPEEDUP.exists():
        text = fill(text, "speedup", speedup_section(json.loads(SPEEDUP.read_text())))
    if ALONE.exists():
        results = json.loads(ALONE.read_text())
        text = fill(text, "alone", f"{_measured_on(results)}\n\n{speedup_table(results['rows'])}")
    if DRAFTER.exists():
        text = fill(text, "drafter", drafter_section(json.loads(DRAFTER.read_text())))
    if LABORATORY.exists():
        text = fill(text, "laboratory", laboratory_section(json.loads(LABORATORY.read_text())))
    if PEERS.exists():
        results = json.loads(PEERS.read_text())
        text = fill(text, "peers", f"{_measured_on(results)}\n\n{peers_table(results['rows'])}")
    readme.write_text(text)


if __name__ == "__main__":
    main()
