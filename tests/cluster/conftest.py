"""Fixtures of the engine's tests; the helpers are in tiny_engine.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from tiny_engine import tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=96)


@pytest.fixture
def known_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unseeded requests get the same seeds in every run: what is tested of their distribution never fails by chance."""
    monkeypatch.setattr("cluster.engine.secrets.randbits", random.Random(5).getrandbits)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes for all tests that need some."""
    pool = Ranks(4)
    yield pool
    pool.close()
