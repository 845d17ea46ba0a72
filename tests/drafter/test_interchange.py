"""Checkpoints that travel: the speculators format there and back, and what other systems' loaders ask for."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import speculators
from drafter.checkpoint import checkpoint_problems, load_drafter, read_config, save_checkpoint
from drafter.source import models_folder
from drafter.speculators import export_speculators, import_speculators
from tests.drafter.conftest import drafter_config, random_drafter

VARIANTS: list[dict[str, object]] = [
    {},
    {"markov_head_type": "gated", "draft_vocab_size": 40},
    {"markov_head_type": "rnn", "num_hidden_layers": 1},
    {"markov_rank": 0, "enable_confidence_head": False, "block_size": 3},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_there_and_back(tmp_path: Path, changes: dict[str, object]) -> None:
    model = random_drafter(drafter_config(**changes))
    flat, foreign, back = (tmp_path / name for name in ("flat", "foreign", "back"))
    save_checkpoint(model, flat, torch.float32)
    (flat / "calibration.json").write_text(json.dumps({"sts_temperatures": [2.0] * model.block_size}))
    export_speculators(flat, foreign, "some/target")
    config = json.loads((foreign / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [layer + 1 for layer in model.target_layer_ids]
    assert config["sample_from_anchor"] is True
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    import_speculators(foreign, back, num_target_layers=8)
    assert read_config(back) == model.config
    assert json.loads((back / "config.json").read_text()) == json.loads((flat / "config.json").read_text())
    before, after = (load_file(folder / "model.safetensors") for folder in (flat, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded = load_drafter(back, model.embed_tokens, model.embed_tokens, torch.float32)
    assert loaded.sts_temperatures.tolist() == [2.0] * model.block_size


def test_a_reduced_vocabulary_gets_its_second_map(tmp_path: Path) -> None:
    model = random_drafter(drafter_config(draft_vocab_size=40))
    save_checkpoint(model, tmp_path / "flat")
    export_speculators(tmp_path / "flat", tmp_path / "foreign", "t")
    tensors = load_file(tmp_path / "foreign" / "model.safetensors")
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], model.target_ids)
    assert torch.equal(tensors["d2t"] + torch.arange(40), model.target_ids)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("sample_from_anchor",), None, "sample_from_anchor is missing"),
        (("sample_from_anchor",), False, "sample_from_anchor false"),
        (("speculators_model_type",), "eagle3", "'eagle3', not 'dspark'"),
        (("topk_context",), 64, "topk_context"),
        (("transformer_layer_config", "attention_bias"), True, "attention_bias"),
        (("transformer_layer_config", "layer_types"), ["sliding_attention"] * 2, "layer_types"),
        (("transformer_layer_config", "rope_scaling"), {"rope_type": "yarn", "factor": 4.0}, "rope_scaling"),
        (("transformer_layer_config", "hidden_size"), None, "'hidden_size' is missing"),
        (("aux_hidden_state_layer_ids",), [0, 2], "target_layer_ids"),
        (("markov_rank",), 9, "markov_head"),
        (("confidence_head_with_markov",), False, "confidence head"),
    ],
)
def test_what_can_not_run_here_is_refused(tmp_path: Path, path: tuple[str, ...], value: object, message: str) -> None:
    save_checkpoint(random_drafter(drafter_config()), tmp_path / "flat")
    export_speculators(tmp_path / "flat", tmp_path / "foreign", "t")
    file = tmp_path / "foreign" / "config.json"
    content = json.loads(file.read_text())
    holder = content if len(path) == 1 else content[path[0]]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        import_speculators(tmp_path / "foreign", tmp_path / "back", 8)
    assert not (tmp_path / "back").exists()


def test_the_command_turns_either_into_the_other(
    tmp_path: Path, tiny_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    speculators.add_arguments(parser)
    flat, foreign, back = (str(tmp_path / name) for name in ("flat", "foreign", "back"))
    save_checkpoint(random_drafter(drafter_config()), Path(flat))
    (tmp_path / "back").mkdir()
    for name in ("calibration.json", "provenance.json"):  # of a drafter that was there before
        (tmp_path / "back" / name).write_text('{"sts_temperatures": [2.0, 2.0, 2.0, 2.0, 2.0]}')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shutil.copytree(tiny_target.folder, models_folder() / "tiny-1.0")  # as if it had been downloaded
    for source, output in ((flat, foreign), (foreign, back)):
        speculators.run(parser.parse_args([source, output, "--target", "pypi:tiny==1.0"]))
    assert read_config(Path(back)) == drafter_config()
    assert sorted(path.name for path in Path(back).iterdir()) == ["config.json", "model.safetensors"]
    verifier = json.loads((tmp_path / "foreign" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(models_folder() / "tiny-1.0"), "nobody else knows pypi:"
    with pytest.raises(ValueError, match="another folder"):
        speculators.run(parser.parse_args([flat, flat, "--target", "t"]))


def test_problems_are_named(tmp_path: Path) -> None:
    save_checkpoint(random_drafter(drafter_config(draft_vocab_size=40)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    assert checkpoint_problems(config, tensors) == []
    del tensors["d2t"], tensors["fc.weight"]
    tensors["layers.7.extra"] = torch.zeros(1)
    tensors["norm.weight"] = torch.zeros(3)
    assert checkpoint_problems(config, tensors) == [
        "missing d2t",
        "missing fc.weight",
        "unexpected layers.7.extra",
        "norm.weight has shape (3,), expected (64,)",
    ]


@pytest.mark.parametrize("draft_vocab_size", [97, 40])
def test_vllm_reads_both_formats(tmp_path: Path, draft_vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own rules: its translation of the nested config, and its renaming of tensors."""
    reason = "vLLM with DSpark is not installed: its loader's rules can't be asked"
    module = pytest.importorskip("vllm.model_executor.models.qwen3_dspark", reason=reason)
    base = pytest.importorskip("vllm.transformers_utils.configs.speculators.base", reason=reason)
    model = random_drafter(drafter_config(draft_vocab_size=draft_vocab_size))
    save_checkpoint(model, tmp_path / "flat")
    export_speculators(tmp_path / "flat", tmp_path / "foreign", "t")
    flat = json.loads((tmp_path / "flat" / "config.json").read_text())
    nested = json.loads((tmp_path / "foreign" / "config.json").read_text())
    translated = base.SpeculatorsConfig.extract_transformers_pre_trained_config(nested)
    for key in ("architectures", "target_layer_ids", "mask_token_id", "block_size", "markov_rank", "markov_head_type"):
        assert translated[key] == flat[key], key
    seen: dict[str, tuple[int, ...]] = {}

    class Recorder:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def load_weights(self, weights: Any, mapper: Any = None) -> set[str]:
            seen.update({name: tuple(value.shape) for name, value in mapper.apply(weights)})
            return set(seen)

    monkeypatch.setattr(module, "AutoWeightsLoader", Recorder)
    inner = SimpleNamespace(confidence_head=object(), _build_fused_kv_buffers=lambda: None)
    sizes = SimpleNamespace(vocab_size=97, draft_vocab_size=draft_vocab_size)
    loader = SimpleNamespace(config=sizes, target_vocab_size=97, model=inner)
    for folder in ("flat", "foreign"):
        seen.clear()
        tensors = load_file(tmp_path / folder / "model.safetensors")
        module.Qwen3DSparkForCausalLM.load_weights(loader, tensors.items())
        outside = {"d2t": "draft_id_to_target_id", "lm_head.weight": "lm_head.weight"}
        kept = {name: value for name, value in tensors.items() if name != "t2d"}
        assert seen == {outside.get(name, f"model.{name}"): tuple(value.shape) for name, value in kept.items()}


def test_tensors_in_several_files_are_read(tmp_path: Path) -> None:
    save_checkpoint(random_drafter(drafter_config()), tmp_path / "flat")
    export_speculators(tmp_path / "flat", tmp_path / "foreign", "t")
    file = tmp_path / "foreign" / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    names = sorted(tensors)
    for part, chosen in enumerate((names[:9], names[9:]), 1):
        save_file({name: tensors[name] for name in chosen}, file.with_name(f"model-0000{part}-of-00002.safetensors"))
    import_speculators(tmp_path / "foreign", tmp_path / "back", 8)
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()
