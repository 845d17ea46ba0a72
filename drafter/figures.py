"""Results of experiments as Markdown and PNG. Knows rows; knows nothing of how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def markdown(title: str, content: Mapping[str, Any]) -> str:
    """A page: how it was made, then every list of rows as a table."""
    made = content["provenance"]
    lines = [f"# {title}", "", f"`{' '.join(made['command'])}`", ""]
    lines += [f"{made['machine']}, {made['date']}; " + ", ".join(f"{k} {made[k]}" for k in _FACTS if k in made), ""]
    if content["left_out"]:
        lines += [f"Not trained, and left out: {', '.join(content['left_out'])}.", ""]
    for name, value in content.items():
        if name == "rows" and value and {"drafter", "dataset", "accepted_length"} <= value[0].keys():
            lines += [_accepted_table(value), ""]
        elif name not in ("provenance", "curves") and isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"## {name}", "", table(value), ""]
        elif isinstance(value, dict) and name != "provenance":
            lines += [f"## {name}", "", table([value]), ""]
    return "\n".join(lines)


_FACTS = ("seed", "slots", "response_tokens", "temperature", "max_new_tokens")


def table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _accepted_table(rows: Sequence[Row]) -> str:
    """One line a drafter (and depth, or block size), one column a data set."""
    variants = [key for key in rows[0] if key in ("layers", "block_size")]
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["drafter"], *(row[variant] for variant in variants))
        line = lines.setdefault(key, dict(zip(("drafter", *variants), key, strict=True)))
        line[row["dataset"]] = f"{row['accepted_length']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
    return table(list(lines.values()))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(name: str, title: str, content: Mapping[str, Any], path: Path) -> None:
    """The plot of an experiment. Raises ValueError where matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure  # imported here: a development extra, and slow
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'dspark-serve[dev]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.set_title(title)
    _PLOTS.get(name, _bars)(axes, content)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _bars(axes: Any, content: Mapping[str, Any]) -> None:
    """Accepted length of each drafter by data set, with its interval."""
    rows = [row for row in content["rows"] if row["dataset"] != "macro"]
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    width = 0.8 / len(drafters)
    for number, drafter in enumerate(drafters):
        own = [row for row in rows if row["drafter"] == drafter]
        at = [names.index(row["dataset"]) + (number - len(drafters) / 2 + 0.5) * width for row in own]
        heights = [row["accepted_length"] for row in own]
        errors = [
            [row["accepted_length"] - row["low"] for row in own],
            [row["high"] - row["accepted_length"] for row in own],
        ]
        axes.bar(at, heights, width, label=drafter, yerr=errors, error_kw={"linewidth": 0.7})
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("tokens per round")
    axes.set_ylim(bottom=1)


def _positions(axes: Any, content: Mapping[str, Any]) -> None:
    """Mean over data sets, a line for each drafter."""
    _lines(axes, content["rows"], "position", "acceptance", "drafter")
    axes.set_xlabel("position in the block")
    axes.set_ylabel("P(accepted | those before it were)")


def _depths(axes: Any, content: Mapping[str, Any]) -> None:
    _lines(axes, [row for row in content["rows"] if row["dataset"] == "macro"], "layers", "accepted_length", "drafter")
    axes.set_xlabel("draft layers")
    axes.set_ylabel("tokens per round, mean over data sets")


def _blocks(axes: Any, content: Mapping[str, Any]) -> None:
    rows = [row for row in content["rows"] if row["dataset"] == "macro"]
    _lines(axes, rows, "block_size", "accepted_length", "drafter")
    axes.set_xlabel("block size")
    axes.set_ylabel("tokens per round, mean over data sets")


def _thresholds(axes: Any, content: Mapping[str, Any]) -> None:
    for dataset in dict.fromkeys(row["dataset"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["dataset"] == dataset]
        x, y = ([row[key] for row in rows] for key in ("tokens_per_step", "acceptance_rate"))
        axes.plot(x, y, marker="o", label=dataset)
    axes.set_xlabel("tokens per round")
    axes.set_ylabel("accepted / verified drafts")


def _reliability(axes: Any, content: Mapping[str, Any]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    styles = {"trained": ":", "after STS": "-"}
    curves = content["curves"]
    for position in dict.fromkeys(row["position"] for row in curves):
        color = f"C{position}"
        for stage, style in styles.items():
            rows = [row for row in curves if (row["position"], row["stage"]) == (position, stage)]
            x, y = ([row[key] for row in rows] for key in ("predicted", "observed"))
            axes.plot(x, y, style, color=color, label=f"position {position}, {stage}")
    axes.set_xlabel("predicted survival")
    axes.set_ylabel("observed")


def _lines(axes: Any, rows: Sequence[Row], x: str, y: str, label: str) -> None:
    """A line for each value of `label`: the mean of y at each x."""
    for name in dict.fromkeys(row[label] for row in rows):
        own = [row for row in rows if row[label] == name]
        places = sorted({row[x] for row in own})
        values = [[row[y] for row in own if row[x] == place] for place in places]
        axes.plot(places, [sum(each) / len(each) for each in values], marker="o", label=name)


_PLOTS = {"F2": _positions, "F3": _depths, "F4": _blocks, "F5": _thresholds, "F6": _reliability}
