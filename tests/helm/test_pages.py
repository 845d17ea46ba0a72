"""What the pages tell an operator to write and to type goes through the chart."""

from __future__ import annotations

import functools
import re
import shlex
from typing import Any

import pytest
import yaml

from deployments.config import parse_config
from tests.helm.render import CHART, PRESETS, chart, manifests, one, with_

ROOT = CHART.parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *PRESETS.values(), CHART / "values.yaml"]
TEXT = re.sub(r"\\\n#? *", " ", "\n".join(page.read_text() for page in PAGES))
COMMANDS = {line.split("  #")[0].strip() for line in re.findall(r"\bhelm (?:template|upgrade|install) [^|`\n]*", TEXT)}
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "kubernetes.md").read_text(), re.MULTILINE | re.DOTALL)
FILES = {
    name: f"# {name}\n{text}"
    for name, text in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
}
"""Blocks whose first line names a file."""


def read(name: str) -> str:
    """A file that a command names: of the project, or of the pages."""
    if name == "canary.yaml":  # the page makes it with sed
        served = yaml.safe_load(FILES["my-values.yaml"])["serveConfigV2"]
        return re.sub("drafter_source: .*", "drafter_source: /var/cache/dspark/drafters/new", served)
    return FILES[name] if name in FILES else (ROOT / name).read_text()


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """As Helm lays one file over another."""
    both = {key: merged(below[key], above[key]) for key in below.keys() & above.keys() if isinstance(above[key], dict)}
    return below | above | both


def values_of_command(command: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    words = iter(shlex.split(command)[3 + ("--install" in command) :])
    assert next(words) == "helm/dspark"
    for option in words:
        argument = next(words)
        match option:
            case "-f":
                values = merged(values, yaml.safe_load(read(argument)))
            case "--set":
                values = functools.reduce(lambda v, pair: with_(v, *pair.split("=")), argument.split(","), values)
            case "--set-file":
                values = with_(values, argument.split("=")[0], read(argument.split("=")[1]))
            case _:
                raise AssertionError(f"{option} of {command}")
    return values


def test_the_commands_are_found() -> None:
    assert FILES.keys() == {"my-values.yaml", "canary-values.yaml"} and len(COMMANDS) > 5


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_of_the_pages_goes_through_and_can_be_repeated(command: str) -> None:
    values = values_of_command(command)
    manifests(values)
    assert values["image"]["repository"] != chart().values["image"]["repository"], "a name that no cluster can pull"
    assert not command.startswith("helm install"), "which fails the second time"
    (application,) = yaml.safe_load(one("RayService", values)["spec"]["serveConfigV2"])["applications"]
    parse_config(application["args"])


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.startswith(" ")])
def test_a_block_of_values_is_what_the_schema_knows(block: str) -> None:
    chart().validate_schema(merged(yaml.safe_load(read("my-values.yaml")), yaml.safe_load(block)))


def test_the_file_scales_when_it_is_changed_as_the_page_says() -> None:
    (line,) = re.findall(r"^ +(autoscaling_config: .*)$", "".join(BLOCKS), re.MULTILINE)
    (beside,) = [block for block in BLOCKS if block.startswith("autoscaling:")]
    changed = yaml.safe_load(read("my-values.yaml").replace("num_replicas: 1", line))
    said = {
        "half": manifests(changed)["NOTES.txt"],
        "whole": manifests(merged(changed, yaml.safe_load(beside)))["NOTES.txt"],
    }
    assert "let autoscaling.enabled add workers" in said["half"]
    assert "max_replicas" not in said["whole"] and "number is fixed" not in said["whole"]
