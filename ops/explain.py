"""`python -m ops.explain`: what the fleet's scheduler lets each engine verify, and why, as a table.

python -m ops.explain --url http://127.0.0.1:8000 --api-key-file key
The same as JSON: GET /v1/dspark/scheduler.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PATH = "/v1/dspark/scheduler"
COLUMNS = ("replica", "mode", "running", "waiting", "cap", "why", "tok/s", "predicted", "plain", "next request", "age")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the application answers")
    parser.add_argument("--api-key-file", type=Path, help="accepted keys, one a line: the first is shown")
    options = parser.parse_args()
    try:
        request = urllib.request.Request(options.url.rstrip("/") + PATH)
        if options.api_key_file:
            request.add_header("Authorization", f"Bearer {_first_key(options.api_key_file)}")
        with urllib.request.urlopen(request, timeout=10) as response:
            print(table(json.load(response)))
    except urllib.error.HTTPError as error:
        print(f"{error.code}: {error.read().decode(errors='replace')}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:  # not reached, no such file, no URL, or no JSON
        print(f"{options.url}: {error}", file=sys.stderr)
        return 1
    return 0


def _first_key(file: Path) -> str:
    """A file of keys is what the server takes, too."""
    keys = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    if not keys:
        raise ValueError(f"{file} holds no key")
    return keys[0]


def table(fleet: dict[str, Any]) -> str:
    """The whole answer as text: a line for each engine, then tiers, calibration and what the words mean."""
    rows = [COLUMNS, *(_row(engine) for engine in fleet["engines"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(
        [
            *lines,
            "",
            f"{len(fleet['engines'])} engines, a scheduler of {fleet['scheduler_age_seconds']:.0f} s",
            *_tiers(fleet),
            *_calibration(fleet),
            "",
            "cap: draft tokens that a step may verify. tok/s, predicted, plain: the engine's output as measured, as",
            "the cost curve expects it under this lease, and without drafts, prompts left out. next request: what",
            "one more would get, by tier, in tok/s, the time of prompts included. age: seconds since the engine last",
            "said something. kept: choices for which all was kept that their tier promises, of those that this HTTP",
            "process judged since it began. calibration error: of the predicted survival lately, by position in the",
            "block and by how drafts are verified.",
        ]
    )


def _row(engine: dict[str, Any]) -> tuple[str, ...]:
    rows = f" of {engine['padded_tokens']} rows" if engine["padded_tokens"] else ""
    return (
        engine["replica"] + (f" (rank {engine['rank']} of {engine['group']})" if engine["group"] else ""),
        engine["mode"],
        str(engine["num_running"]),
        str(engine["num_waiting"]),
        "-" if engine["cap"] is None else f"{engine['cap']}{rows}",
        engine["binding"],
        f"{engine['measured_tokens_per_second']:.1f}",
        f"{engine['predicted_tokens_per_second']:.1f}",
        f"{engine['predicted_plain_tokens_per_second']:.1f}",
        " ".join(f"{speed:.1f}" for speed in engine["speeds"]) or "-",
        f"{engine['report_age_seconds']:.2f}",
    )


def _tiers(fleet: dict[str, Any]) -> list[str]:
    """What each tier promises, and how often that was kept."""
    promised = {tier["name"]: _promise(tier) for tier in fleet["tiers"]}
    # Without tiers in the settings, the one that all are of is named by the ingress only.
    unnamed = "best effort" if fleet["engines"] else "no engine is there"
    lines = []
    for each in fleet["attainment"]:
        name, judged = each["tier"], each["num_judged"]
        kept = f"kept {each['num_kept'] / judged:.1%} of {judged}" if judged else "none judged yet"
        lines.append(f"tier {name}: {promised.get(name, unnamed)}; {kept}")
    return lines


def _promise(tier: dict[str, Any]) -> str:
    promises = []
    if tier["min_tokens_per_second"]:
        promises.append(f">= {tier['min_tokens_per_second']:g} tok/s (weight {tier['weight']:g})")
    if tier["ttft_ms"] is not None:
        promises.append(f"first token within {tier['ttft_ms']:g} ms")
    return ", ".join(promises) or "best effort"


def _calibration(fleet: dict[str, Any]) -> list[str]:
    """A line for each mode of verification: the error of each position that was seen often enough."""
    by_mode: dict[str, list[str]] = {}
    for seen in fleet["calibration"]:
        by_mode.setdefault(seen["mode"], []).append(f"{seen['position']}: {seen['error']:.3f}")
    return [f"calibration error, {mode}: {'  '.join(errors)}" for mode, errors in by_mode.items()] or [
        "calibration error: too few drafts seen yet"
    ]


if __name__ == "__main__":
    sys.exit(main())
