"""What `make serve` says before it starts anything."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ops.benchmarks.report import ROOT
from ops.serve import address, checked, port_is_taken, served


def test_the_address_is_the_files_or_serves_own() -> None:
    assert address({"http_options": {"host": "127.0.0.1", "port": 9}}) == ("127.0.0.1", 9)
    assert address({}) == ("127.0.0.1", 8000)


def test_each_application_answers_below_its_prefix() -> None:
    applications = [{"args": 1}, {"args": 2, "route_prefix": "/"}, {"args": 3, "route_prefix": "/other"}]
    assert served({"applications": applications[::2]}) == {
        "http://127.0.0.1:8000": 1,
        "http://127.0.0.1:8000/other": 3,
    }
    config = {"http_options": {"port": 9}, "applications": applications[1:2]}
    assert served(config) == {"http://127.0.0.1:9": 2}
    with pytest.raises(ValueError, match="must not be empty"):
        served({"applications": []})


def test_a_taken_port_and_a_wrong_key_are_said_at_once(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "deployments" / "dspark_cpu.yaml").read_text())
    arguments = config["applications"][0]["args"]
    arguments["model_loading_config"]["model_source"] = str(model := tmp_path / "model")
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config["http_options"] = {"host": "127.0.0.1", "port": taken.getsockname()[1]}
        assert port_is_taken(*address(config))
        result = serve(tmp_path, config)
        assert result.returncode == 2 and "is in use" in result.stderr
        arguments["engine_kwargs"]["dtyp"] = "float32"
        for options in ((), ("--check",)):
            result = serve(tmp_path, config, *options)
            assert result.returncode == 2 and "engine_kwargs.dtyp: unknown key" in result.stderr


def test_a_file_can_be_checked_where_it_could_not_be_served() -> None:
    config = yaml.safe_load((ROOT / "deployments" / "dspark_qwen3_moe.yaml").read_text())
    command = [sys.executable, "-m", "ops.serve", "deployments/dspark_qwen3_moe.yaml", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    given, seen = config["applications"][0]["args"], yaml.safe_load(result.stdout)
    assert given["engine_kwargs"].items() <= seen["engine_kwargs"].items()
    assert seen["unhealthy_after_s"] == 60


def test_every_application_is_checked_also_inside_a_charts_values() -> None:
    values = yaml.safe_load((ROOT / "helm" / "dspark" / "values-cpu.yaml").read_text())
    assert "model_id: smollm2-135m-instruct" in checked(values)
    config = yaml.safe_load(values["serveConfigV2"])
    config["applications"].append({"args": {"model_loading_config": {"model_id": "other"}, "http_confg": {}}})
    with pytest.raises(ValueError, match="http_confg: unknown key"):
        checked({"serveConfigV2": yaml.safe_dump(config)})


def serve(folder: Path, config: dict[str, object], *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return subprocess.run(
        [sys.executable, "-m", "ops.serve", str(path), *options], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
