"""What a rank holds of a model that is divided, measured on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.benchmarks.memory import measure, save_random_models

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_random_models(folder)
    return folder


@pytest.mark.parametrize(("model", "dp", "tp"), [("dense", 1, 2), ("experts", 2, 1)])
def test_each_of_two_ranks_holds_about_half(models: Path, model: str, dp: int, tp: int) -> None:
    memory = measure(model, models / model, dp, tp)
    stored = sum(path.stat().st_size for path in (models / model).glob("*.safetensors"))
    assert memory.bytes_of_one_process > 0.95 * stored, "what is measured is all of the weights"
    assert sum(memory.bytes_of_ranks) > 0.95 * stored
    assert memory.largest_share <= 0.6
    assert min(memory.bytes_of_ranks) > 0.4 * memory.bytes_of_one_process
