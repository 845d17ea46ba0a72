"""What a fresh clone relies on: packages are named, imports are declared, pins agree, targets say what they do."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_architecture import OURS, read_sources

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def _declared() -> list[Requirement]:
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def test_every_package_folder_is_packaged() -> None:
    folders = {
        file.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in ("drafter", "cluster", "deployments")
        for file in (ROOT / package).rglob("__init__.py")
    }
    assert folders == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_import_of_the_packages_is_declared() -> None:
    """A dependency that only comes along with another one vanishes the day that one changes its mind."""
    declared = {canonicalize_name(requirement.name) for requirement in _declared()}
    owners = packages_distributions()
    missing = set()
    for source in read_sources(ROOT):
        for line, module in source.imports:
            top = module.split(".")[0]
            if top in OURS or top in sys.stdlib_module_names:
                continue
            if not declared & {canonicalize_name(name) for name in owners.get(top, [])}:
                missing.add(f"{source.path}:{line} {top}")
    assert not missing, f"not in pyproject.toml: {sorted(missing)}"


def test_constraints_are_exact_and_agree_with_the_ranges() -> None:
    pins = _pins()
    for name, pin in pins.items():
        assert [spec.operator for spec in pin.specifier] == ["=="], name
    for requirement in _declared():
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is not None:
            tested = next(iter(pin.specifier)).version
            assert requirement.specifier.contains(tested), f"{requirement} excludes the tested {tested}"
    assert "torch" in pins and "ray" in pins


def test_make_help_explains_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    # A make inside a make announces its folders, unless told not to.
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    explained = {line.split()[1] for line in shown.splitlines() if len(line.split()) > 2}
    assert explained == set(phony[1].split())


def test_an_old_python_is_refused_with_a_reason(tmp_path: Path) -> None:
    """The set-up rule runs in a copy, with an interpreter that says it is 3.10."""
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    result = subprocess.run(["make", "setup", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert "Python 3.11 or later is needed" in result.stderr and "3.10.1" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_what_the_makefile_names() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
    assert re.search(r"^exec make check test$", script.read_text(), re.MULTILINE)


def test_the_licence_is_the_one_that_is_declared() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_readmes_curl_asks_for_the_model_that_make_serve_serves() -> None:
    config = yaml.safe_load((ROOT / "deployments" / "dspark_cpu.yaml").read_text())
    model_id = config["applications"][0]["args"]["model_loading_config"]["model_id"]
    assert f'"model": "{model_id}"' in (ROOT / "README.md").read_text()


def test_every_link_in_the_documents_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "ops" / "runbook.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
