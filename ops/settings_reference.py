"""Writes docs/settings.md from the models that read them: `python -m ops.settings_reference > docs/settings.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deployments.config import LLMConfig

HEADER = """# Settings

Made by `python -m ops.settings_reference > docs/settings.md`; don't edit.

Every key of an application's `args`, by its path: `engine_kwargs.max_num_seqs` is `max_num_seqs` under `engine_kwargs`
under `args`; `[]` stands for each entry of a list. [Serve a model](serving.md) explains the ones that people change
first. A key that isn't here is refused, and so is a value outside its range; both are named.

| key | value | default | meaning |
|---|---|---|---|
"""

Schema = dict[str, Any]
NOT_THERE = {"engine_kwargs.model_source"}
"""Refused: model_loading_config has it."""


def reference() -> str:
    """The whole page, Markdown."""
    schema = LLMConfig.model_json_schema()
    rows = [row for row in _rows(schema, schema["$defs"], "") if row[0] not in NOT_THERE]
    return HEADER + "".join(f"| `{key}` | {' | '.join(cells)} |\n" for key, *cells in rows)


def _rows(section: Schema, sections: Schema, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """(key, value, default, meaning) of every setting of a section, the sections inside it included."""
    for name, field in section["properties"].items():
        path, inner = prefix + name, _section(field, sections)
        if inner is not None:
            yield from _rows(inner, sections, f"{path}[]." if "items" in _kinds(field)[0] else f"{path}.")
        else:
            default = "required" if name in section.get("required", ()) else _default(field.get("default"))
            meaning = field.get("description", "").replace("<", "&lt;")
            yield path, " or ".join(map(_value, _kinds(field))), default, meaning


def _kinds(field: Schema) -> list[Schema]:
    """What a field may be, but for nothing at all."""
    return [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]


def _section(field: Schema, sections: Schema) -> Schema | None:
    """The settings inside a field, or inside each of its entries."""
    kind = _kinds(field)[0]
    name = kind.get("items", kind).get("$ref")
    return sections[name.split("/")[-1]] if name else None


def _value(kind: Schema) -> str:
    if "enum" in kind:
        return ", ".join(f"`{choice}`" for choice in kind["enum"])
    if kind["type"] == "array":
        return f"list of {_value(kind['items'])}s"
    if kind["type"] == "object":
        return "mapping"
    words = {"string": "text", "boolean": "`true`, `false`", "integer": "integer", "number": "number"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    limits = [f"{sign} {kind[key]:g}" for key, sign in bounds.items() if key in kind]
    return " ".join([words[kind["type"]], ", ".join(limits)]).strip()


def _default(value: object) -> str:
    if value is None or value == []:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(reference(), end="")
