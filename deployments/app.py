"""The application: which deployments there are and how they hang together.

`serve run deployments/dspark_cpu.yaml` calls `build` with the file's `args`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig, GangPlacementStrategy, GangSchedulingConfig

from cluster.confidence_scheduler import ConfidenceScheduler
from deployments.config import LLMConfig, parse_config
from deployments.ingress import Ingress
from deployments.metrics_hub import MetricsHub
from deployments.replica import SCHEDULER, Replica
from deployments.router import router_config

logger = logging.getLogger("ray.serve")


def build(args: dict[str, Any]) -> Application:
    """The application of these `args`. Raises ValueError naming the path of every wrong key."""
    return build_app(parse_config(args))


def build_app(config: LLMConfig) -> Application:
    """Ingress -> Replicas (one engine each); all three report to the hub. ValueError when it needs GPUs in vain."""
    _check_accelerators(config)
    logger.info("effective configuration:\n%s", config.effective_yaml())
    # Serve must never queue where the engine should decide: its limit sheds with 429, Serve's would let clients hang.
    capacity = config.engine_kwargs.capacity
    limit = 4 * capacity + 64
    graceful = config.deployment_config.graceful_shutdown_timeout_s
    light = {"num_cpus": 0}  # HTTP and the engine share the machine's cores, as the operating system sees fit
    quiet = {"enable_access_log": False}  # the ingress logs each request once, and the hub is called every second
    hub = (
        serve.deployment(MetricsHub)
        .options(ray_actor_options=light, max_ongoing_requests=1024, logging_config=quiet)
        .bind(config.model_id)
    )
    replicas = (
        serve.deployment(Replica)
        .options(
            max_ongoing_requests=limit,
            logging_config=quiet,
            request_router_config=router_config(capacity),
            **_replica_options(config),
        )
        .bind(config, hub)
    )
    ingress = serve.deployment(Ingress).options(
        ray_actor_options=light,
        max_ongoing_requests=limit * config.most_replicas,
        graceful_shutdown_timeout_s=graceful,
    )
    return ingress.bind(config, replicas, hub)


def _replica_options(config: LLMConfig) -> dict[str, Any]:
    """What Serve needs to know of the replicas: how many, where, and which of them live and die together."""
    engine, options = config.engine_kwargs, config.deployment_config.model_dump(exclude_none=True)
    strategy = config.placement_group_config.strategy if config.placement_group_config else "PACK"
    if config.reserves_bundles:
        options["placement_group_bundles"] = config.bundles
    if config.is_scheduled:
        # Those of one version of the application share one scheduler: others may have other tiers.
        options["deployment_actors"] = [
            DeploymentActorConfig(
                name=SCHEDULER, actor_class=ray.remote(ConfidenceScheduler), actor_options={"num_cpus": 0}
            )
        ]
        # Serve gives a deployment up whose actor fails to start so many times in a row, and then replaces no replica
        # either. Ours is only an adviser. Replicas themselves get three tries each, whatever stands here.
        options["max_constructor_retry_count"] = 2**31 - 1
    if engine.data_parallel_size > 1:
        options.setdefault("num_replicas", engine.data_parallel_size)
        options["gang_scheduling_config"] = GangSchedulingConfig(
            gang_size=engine.data_parallel_size, gang_placement_strategy=GangPlacementStrategy(strategy)
        )
    elif config.reserves_bundles:
        options["placement_group_strategy"] = strategy
    return options


def _check_accelerators(config: LLMConfig) -> None:
    """Serve would wait for ever, and say little. In Kubernetes the nodes may still be on their way, so it may wait."""
    kind = config.accelerator_type
    num_needed = config.engine_kwargs.tensor_parallel_size * config.least_replicas
    if kind is None or "KUBERNETES_SERVICE_HOST" in os.environ or not ray.is_initialized():
        return
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_there = int(sum(node.get("GPU", 0) for node in nodes if f"accelerator_type:{kind}" in node))
    if num_there < num_needed:
        raise ValueError(
            f"accelerator_type: {config.model_id} needs {num_needed} GPUs of type {kind}, one for each rank, and this "
            f"Ray cluster has {num_there}. Start a node that has them (`ray status` shows what is there), or serve "
            "without: deployments/dspark_moe_cpu.yaml is a mixture of experts for CPUs, dspark_cpu.yaml a dense model"
        )
