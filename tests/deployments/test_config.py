from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.messages import SlaTier
from deployments.app import _replica_options, build_app
from deployments.config import LLMConfig, parse_config

FOLDER = Path(__file__).parents[2] / "deployments"
YAML = FOLDER / "dspark_cpu.yaml"
MODEL = {"model_loading_config": {"model_id": "m"}}
FAST = {"name": "fast", "min_tokens_per_second": 20.0}
SCALED = {"max_replicas": 4, "target_ongoing_requests": 8}


SHIPPED = {
    "dspark_cpu": "smollm2-135m-instruct",
    "dspark_moe_cpu": "smollm2-135m-instruct-moe",
    "dspark_qwen3_moe": "qwen3-30b-a3b",
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_valid_and_local(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "there")  # where GPUs may come later: a Ray of another test has none
    document = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    (application,) = document["applications"]
    assert document["http_options"]["host"] == "127.0.0.1"
    assert application["import_path"] == "deployments.app:build"
    config = parse_config(application["args"])
    assert config.model_id == SHIPPED[name]
    build_app(config)


def test_every_file_of_the_folder_is_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == SHIPPED.keys()


def test_ranks_are_placed_by_what_they_need() -> None:
    """One rank on CPUs: no placement group; several: a bundle each; lockstep groups: gangs of whole replicas."""
    plain = _replica_options(parse_config({**MODEL, "deployment_config": {"ray_actor_options": {"num_cpus": 2}}}))
    assert not plain.keys() & {"placement_group_bundles", "gang_scheduling_config"}
    laptop = _replica_options(parse_config({**MODEL, "engine_kwargs": {"tensor_parallel_size": 2}}))
    assert "placement_group_bundles" not in laptop
    group = {
        "engine_kwargs": {"tensor_parallel_size": 2, "data_parallel_size": 3},
        "accelerator_type": "H100",
        "deployment_config": {"num_replicas": 6, "ray_actor_options": {"num_cpus": 2}},
    }
    placed = _replica_options(parse_config({**MODEL, **group}))
    assert placed["placement_group_bundles"] == [{"CPU": 2, "GPU": 1, "accelerator_type:H100": 0.001}] * 2
    assert placed["gang_scheduling_config"].gang_size == 3
    assert placed["num_replicas"] == 6
    assert "placement_group_strategy" not in placed, "a gang has one placement group, and Serve a setting of its own"


def test_bundles_can_say_more_than_a_rank_reserves() -> None:
    bundles = [{"CPU": 4, "GPU": 1, "island": 1}, {"CPU": 2, "GPU": 1}]
    args = {
        **MODEL,
        "engine_kwargs": {"tensor_parallel_size": 2},
        "accelerator_type": "H100",
        "deployment_config": {"ray_actor_options": {"num_cpus": 2}},
        "placement_group_config": {"bundles": bundles, "strategy": "STRICT_SPREAD"},
    }
    placed = _replica_options(parse_config(args))
    assert placed["placement_group_bundles"] == [{"accelerator_type:H100": 0.001, **bundle} for bundle in bundles]
    assert placed["placement_group_strategy"] == "STRICT_SPREAD"
    build_app(parse_config({**args, "accelerator_type": None}))
    # Without bundles, each rank's is what it reserves; one rank alone has a placement group only when asked to.
    alone = {**MODEL, "deployment_config": {"ray_actor_options": {"num_cpus": 2}}}
    placed = _replica_options(parse_config({**alone, "placement_group_config": {"strategy": "SPREAD"}}))
    assert placed["placement_group_bundles"] == [{"CPU": 2}]
    gang = {"engine_kwargs": {"data_parallel_size": 2}, "placement_group_config": {"bundles": [{"island": 1}]}}
    placed = _replica_options(parse_config({**MODEL, **gang}))
    assert placed["placement_group_bundles"] == [{"island": 1}]
    spread = {**gang, "placement_group_config": {"bundles": [{"island": 1}], "strategy": "SPREAD"}}
    placed = _replica_options(parse_config({**MODEL, **spread}))
    assert placed["gang_scheduling_config"].gang_placement_strategy == "SPREAD"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({**MODEL, "modle": 1}, "modle: unknown key"),
        ({**MODEL, "engine_kwargs": {"dtyp": "bfloat16"}}, "engine_kwargs.dtyp: unknown key"),
        ({**MODEL, "deployment_config": {"replicas": 2}}, "deployment_config.replicas: unknown key"),
        ({**MODEL, "http_config": {"api_keys": {"keys": ["x"]}}}, "http_config.api_keys.keys: unknown key"),
        ({**MODEL, "engine_kwargs": {"max_num_seqs": 0}}, "engine_kwargs.max_num_seqs: Input should be greater"),
        ({**MODEL, "engine_kwargs": {"model_source": "x"}}, "engine_kwargs: Value error, model_source is set in"),
        ({**MODEL, "http_config": {"api_keys": {}}}, "exactly one of file and environment_variable"),
        (
            {**MODEL, "deployment_config": {"ray_actor_options": {"num_gpu": 1}}},
            "deployment_config.ray_actor_options.num_gpu: unknown key",
        ),
        (
            {**MODEL, "deployment_config": {"num_replicas": 2, "autoscaling_config": SCALED}},
            "at most one of num_replicas",
        ),
        (
            {**MODEL, "deployment_config": {"autoscaling_config": {**SCALED, "min_replicas": 9}}},
            "min_replicas = 9 exceeds max_replicas = 4",
        ),
        (
            {**MODEL, "engine_kwargs": {"tensor_parallel_size": 0}},
            "engine_kwargs.tensor_parallel_size: Input should be",
        ),
        (
            {**MODEL, "engine_kwargs": {"data_parallel_size": 2}, "deployment_config": {"num_replicas": 3}},
            "num_replicas = 3 is no multiple of engine_kwargs.data_parallel_size = 2",
        ),
        (
            {**MODEL, "engine_kwargs": {"data_parallel_size": 2}, "deployment_config": {"autoscaling_config": SCALED}},
            "autoscaling_config: lockstep groups (data_parallel_size > 1) don't scale",
        ),
        (
            {**MODEL, "engine_kwargs": {"data_parallel_size": 2}},
            "ray_actor_options.num_cpus: a lockstep group (data_parallel_size > 1) reserves its place at once",
        ),
        (
            {**MODEL, "placement_group_config": {"strategy": "SPREAD"}},
            "placement_group_config: there is nothing to place",
        ),
        (
            {**MODEL, "placement_group_config": {"bundles": [{"CPU": 1}] * 2}},
            "placement_group_config.bundles: 2 bundles for the 1 ranks of a replica",
        ),
        (
            {**MODEL, "placement_group_config": {"bundles": [{"CPU": 1}]}, "accelerator_type": "H100"},
            "placement_group_config.bundles.0: a rank reserves 1 GPU, and the bundle has 0",
        ),
        (
            {**MODEL, "placement_group_config": {"bundles": [{"CPU": 1}], "strategy": "TIGHT"}},
            "placement_group_config.strategy: Input should be 'PACK'",
        ),
        (
            {
                **MODEL,
                "engine_kwargs": {"data_parallel_size": 2},
                "placement_group_config": {"bundles": [{"CPU": 1}], "strategy": "STRICT_SPREAD"},
            },
            "placement_group_config.strategy: STRICT_SPREAD is not to be had for a lockstep group",
        ),
        (
            {**MODEL, "placement_group_config": {"bundles": [{"CPU": 0}]}},
            "placement_group_config.bundles.0.CPU: Input should be greater than 0",
        ),
        ({}, "model_loading_config: Field required"),
        (
            {**MODEL, "sla_tiers": [{"name": "a"}, {"name": "a"}]},
            "sla_tiers: the name 'a' is given to more than one tier",
        ),
        ({**MODEL, "sla_tiers": [{"name": "no spaces"}]}, "sla_tiers.0.name: String should match pattern"),
        ({**MODEL, "sla_tiers": [{"name": "a"}, {}]}, "sla_tiers.1.name: Field required"),
        ({**MODEL, "sla_tiers": [{"name": "a", "speed": 3}]}, "sla_tiers.0.speed: unknown key"),
        ({**MODEL, "sla_tiers": [{"name": f"t{i}"} for i in range(256)]}, "sla_tiers: Tuple should have at most 255"),
        ({**MODEL, "sla_tiers": [{**FAST, "min_tokens_per_second": -1}]}, "sla_tiers.0.min_tokens_per_second: Input"),
        (
            {**MODEL, "sla_tiers": [{**FAST, "min_tokens_per_second": float("inf")}]},
            "sla_tiers.0.min_tokens_per_second",
        ),
        ({**MODEL, "sla_tiers": [{**FAST, "ttft_ms": 0}]}, "sla_tiers.0.ttft_ms: Input should be greater than 0"),
        (
            {**MODEL, "sla_tiers": [{**FAST, "weight": 0.5}]},
            "sla_tiers.0.weight: Input should be greater than or equal",
        ),
        (
            {**MODEL, "sla_tiers": [{**FAST, "when_unmet": "drop"}]},
            "sla_tiers.0.when_unmet: Input should be 'serve' or",
        ),
        ({**MODEL, "sla_tiers": [{"name": "a", "weight": 2}]}, "sla_tiers.0: Value error, weight needs min_tokens_per"),
        ({**MODEL, "sla_tiers": [{"name": "a", "when_unmet": "shed"}]}, "sla_tiers.0: Value error, when_unmet needs"),
        (
            {**MODEL, "sla_tiers": [FAST], "default_sla_tier": "b"},
            "default_sla_tier: 'b' is none of the sla_tiers (fast)",
        ),
        ({**MODEL, "default_sla_tier": "b"}, "default_sla_tier: 'b' is none of the sla_tiers (there are none)"),
        (
            {**MODEL, "sla_tiers": [{**FAST, "ttft_ms": 60_000}]},
            "sla_tiers.0.ttft_ms: half of it is waited for a replica, which must be less than http_config.submit_timeo",
        ),
    ],
)
def test_wrong_keys_are_named_by_their_path(args: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match="invalid configuration") as raised:
        parse_config(args)
    assert expected in str(raised.value)


def test_every_offence_is_told_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        parse_config({**MODEL, "a": 1, "b": 2})
    assert "a: unknown key" in str(raised.value)
    assert "b: unknown key" in str(raised.value)


def test_effective_configuration_can_be_used_again() -> None:
    config = parse_config({**MODEL, "engine_kwargs": {"max_num_seqs": 3}})
    again = yaml.safe_load(config.effective_yaml())
    assert again["engine_kwargs"]["max_num_seqs"] == 3
    assert parse_config(again) == config


@pytest.mark.parametrize(
    "deployment_config", [{}, {"num_replicas": 3, "ray_actor_options": {"num_cpus": 2}}, {"autoscaling_config": SCALED}]
)
def test_serve_takes_every_way_to_say_how_many_replicas(deployment_config: dict[str, object]) -> None:
    build_app(parse_config({**MODEL, "deployment_config": deployment_config}))


def test_tiers_are_named_for_clients_and_numbered_for_engines() -> None:
    tiers = [{"name": "slow"}, {**FAST, "ttft_ms": 500, "weight": 4}]
    config = parse_config({**MODEL, "sla_tiers": tiers, "default_sla_tier": "fast"})
    assert config.promises == (SlaTier("slow"), SlaTier("fast", 20.0, 4.0, 500.0))
    assert [tier.name for tier in config.tiers] == ["slow", "fast"]
    assert config.default_tier == 1
    assert parse_config({**MODEL, "sla_tiers": tiers}).default_tier == 0, "the first"
    assert config.tiers[1].longest_wait_seconds == 0.25
    assert parse_config(yaml.safe_load(config.effective_yaml())) == config


def test_without_tiers_there_is_one_that_promises_nothing() -> None:
    config = parse_config(MODEL)
    assert config.promises == ()
    assert [tier.promise for tier in config.tiers] == [SlaTier("default")]
    assert config.default_tier == 0


def test_model_source_reaches_the_engine() -> None:
    config = LLMConfig.model_validate({"model_loading_config": {"model_id": "m", "model_source": "/models/m"}})
    assert config.engine_config().model_source == "/models/m"


def test_the_shipped_drafter_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (application,) = yaml.safe_load(YAML.read_text())["applications"]
    source = parse_config(application["args"]).engine_config().drafter_source
    assert source is not None
    assert (Path(source) / "model.safetensors").is_file()
    named = LLMConfig.model_validate({**MODEL, "engine_kwargs": {"drafter_source": "some/hub-id"}})
    assert named.engine_config().drafter_source == "some/hub-id"
