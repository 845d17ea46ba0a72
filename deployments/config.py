"""The settings of one served model, in the names of ray.serve.llm's LLMConfig where the concept is the same.

Knows the keys, their ranges and how to say where a wrong one stands; reads no file and no environment variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.config import EngineConfig
from cluster.messages import SlaTier
from cluster.metrics import DEFAULT_TIER

PROJECT = Path(__file__).resolve().parents[1]
MAX_CHOICES = 128
"""Most sequences that one HTTP request may start: prompts x n."""
MAX_TIERS = 255
"""Reports name a request's tier by one byte."""
DEFAULT_WEIGHT = 16.0
"""Of a promised speed; ops/results/simulator/sla.md shows what weights buy and cost."""


UNPROMISED_WAIT_SECONDS = 1.0
"""How long a request whose first token is promised nothing may wait for a promised speed: time to hear once more from
every replica, since what one said before a burst of requests says little about the next."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelLoadingConfig(_Section):
    """Which model, and what clients call it."""

    model_id: str = Field(min_length=1, description="The `model` of the API")
    model_source: str = Field(
        EngineConfig.model_fields["model_source"].default,
        min_length=1,
        description="A local folder, a hub id, or pypi:<package>==<version>",
    )


class RayActorOptions(_Section):
    """What each rank of a replica's engine reserves in Ray's own count."""

    num_cpus: float = Field(
        default=0,
        ge=0,
        description="0: all ranks run where the replica does. On a cluster num_threads, so that they find nodes",
    )


class PlacementGroupConfig(_Section):
    """Where the ranks of a replica find their place, instead of a bundle of just what each reserves, packed."""

    bundles: tuple[dict[str, Annotated[float, Field(gt=0)]], ...] | None = Field(
        None,
        min_length=1,
        description="Ray resources of each rank's bundle, in order; the first one also holds the replica itself",
    )
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "PACK", description="Ray's: on few nodes or on many, as far as it goes or strictly"
    )


class AutoscalingConfig(_Section):
    """Serve's autoscaling of the replicas, instead of a fixed number."""

    min_replicas: int = Field(default=1, ge=1, description="Replicas that there always are")
    max_replicas: int = Field(ge=1, description="Replicas that there may be")
    target_ongoing_requests: float = Field(gt=0, description="Requests per replica that it steers for")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas = {self.min_replicas} exceeds max_replicas = {self.max_replicas}")
        return self


class DeploymentConfig(_Section):
    """Serve's settings of the replicas; how many requests one takes follows from the engine's own limits."""

    num_replicas: int | None = Field(
        default=None,
        ge=1,
        description="Those of all lockstep groups together. None: one group, or what autoscaling_config decides",
    )
    autoscaling_config: AutoscalingConfig | None = None
    ray_actor_options: RayActorOptions = Field(default_factory=RayActorOptions)
    health_check_period_s: float = Field(default=1.0, gt=0, description="Time between two health checks of a replica")
    health_check_timeout_s: float = Field(default=5.0, gt=0, description="Longest wait for the answer to one")
    graceful_shutdown_timeout_s: float = Field(default=10.0, ge=0, description="Time to finish when stopping")

    @model_validator(mode="after")
    def _one_number(self) -> Self:
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError("give at most one of num_replicas and autoscaling_config")
        return self


class ApiKeysConfig(_Section):
    """Where the accepted API keys are kept, never the keys themselves. One key a line."""

    file: str | None = Field(default=None, description="Path of a file of keys; this or environment_variable")
    environment_variable: str | None = Field(default=None, description="Variable that holds them; this or file")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.file is None) == (self.environment_variable is None):
            raise ValueError("give exactly one of file and environment_variable")
        return self


class HttpConfig(_Section):
    """What the ingress accepts. Host and port are Serve's own (`http_options` beside the application)."""

    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="Larger request bodies are refused with 413")
    submit_timeout_s: float = Field(default=30.0, gt=0, description="Longest wait for a replica, then 503")
    migration_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Longest that a request whose engine was lost waits for another one, or for its successor",
    )
    api_keys: ApiKeysConfig | None = Field(default=None, description="None: everybody may ask")


class SlaTierConfig(_Section):
    """What is promised to a request of this tier. A tier that promises nothing is best effort."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="What clients call it")
    min_tokens_per_second: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Promised speed after the first token; 0 promises none"
    )
    ttft_ms: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Longest time to the first token; none promises none"
    )
    weight: float = Field(
        default=DEFAULT_WEIGHT,
        ge=1,
        le=1000,
        allow_inf_nan=False,
        description="Tokens up to the promised speed count so many times: how much throughput the promise may cost",
    )
    when_unmet: Literal["serve", "shed"] = Field(
        default="serve",
        description="A request whose speed no replica can give waits for half of ttft_ms (1 s without one); then it is "
        "served all the same, or refused with 429",
    )

    @model_validator(mode="after")
    def _nothing_without_a_speed(self) -> Self:
        for key, default in (("weight", DEFAULT_WEIGHT), ("when_unmet", "serve")):
            if getattr(self, key) != default and not self.min_tokens_per_second:
                raise ValueError(f"{key} needs min_tokens_per_second: it says what that speed is worth")
        return self

    @property
    def longest_wait_seconds(self) -> float:
        """How long a request may be held back for a replica that keeps its speed: its prompt takes time, too."""
        return UNPROMISED_WAIT_SECONDS if self.ttft_ms is None else self.ttft_ms / 2000

    @property
    def promise(self) -> SlaTier:
        """The tier as the engine takes it."""
        weight = self.weight if self.min_tokens_per_second else 1.0
        return SlaTier(self.name, self.min_tokens_per_second, weight, self.ttft_ms)


BEST_EFFORT = SlaTierConfig(name=DEFAULT_TIER)
"""The tier of all requests where none are configured."""


def _located(source: str) -> str:
    """A relative folder of the project as an absolute one: Serve's workers choose their own working directory."""
    folder = PROJECT / source
    return str(folder) if folder.is_dir() else source


def _not_the_model(engine_kwargs: EngineConfig) -> EngineConfig:
    if "model_source" in engine_kwargs.model_fields_set:
        raise ValueError("model_source is set in model_loading_config")
    return engine_kwargs


class LLMConfig(_Section):
    """`args` of an application: one model and how it is served."""

    model_loading_config: ModelLoadingConfig
    engine_kwargs: Annotated[EngineConfig, AfterValidator(_not_the_model)] = Field(
        default_factory=lambda: EngineConfig.model_validate({})
    )
    accelerator_type: str | None = Field(
        None, min_length=1, description="Ray's name of a GPU, such as H100: each rank gets one. None: ranks use CPUs"
    )
    placement_group_config: PlacementGroupConfig | None = None
    deployment_config: DeploymentConfig = Field(default_factory=DeploymentConfig)
    http_config: HttpConfig = Field(default_factory=HttpConfig)
    sla_tiers: tuple[SlaTierConfig, ...] = Field(
        default=(), max_length=MAX_TIERS, description="What may be promised to a request. None: all are best effort"
    )
    default_sla_tier: str | None = Field(
        default=None, description="The tier of requests that name none; none: the first of sla_tiers"
    )
    unhealthy_after_s: float = Field(
        default=60.0, gt=0, description="An engine with work but no finished step for this long is stuck, and replaced"
    )

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        size, deployment = self.engine_kwargs.data_parallel_size, self.deployment_config
        if size == 1:
            return self
        if deployment.num_replicas is not None and deployment.num_replicas % size:
            raise ValueError(
                f"deployment_config.num_replicas = {deployment.num_replicas} is no multiple of "
                f"engine_kwargs.data_parallel_size = {size}, the replicas of a lockstep group"
            )
        if deployment.autoscaling_config is not None:
            raise ValueError(
                "deployment_config.autoscaling_config: lockstep groups (data_parallel_size > 1) don't scale"
            )
        if not self.bundles:
            raise ValueError(
                "deployment_config.ray_actor_options.num_cpus: a lockstep group (data_parallel_size > 1) reserves its "
                "place at once, so each rank must need something; num_threads is right on a cluster"
            )
        return self

    @model_validator(mode="after")
    def _placed(self) -> Self:
        placed, size = self.placement_group_config, self.engine_kwargs.tensor_parallel_size
        if placed is None:
            return self
        if not self.bundles:
            raise ValueError(
                "placement_group_config: there is nothing to place; say what each rank needs, in bundles or in "
                "deployment_config.ray_actor_options.num_cpus"
            )
        if len(self.bundles) != size:
            raise ValueError(
                f"placement_group_config.bundles: {len(self.bundles)} bundles for the {size} ranks of a replica"
            )
        for index, bundle in enumerate(self.bundles):
            for resource, amount in self.rank_resources.items():  # an accelerator's type is added by `bundles`
                if bundle.get(resource, 0) < amount:
                    raise ValueError(
                        f"placement_group_config.bundles.{index}: a rank reserves {amount:g} {resource}, and the "
                        f"bundle has {bundle.get(resource, 0):g}"
                    )
        if self.engine_kwargs.data_parallel_size > 1 and placed.strategy.startswith("STRICT"):
            raise ValueError(
                f"placement_group_config.strategy: {placed.strategy} is not to be had for a lockstep group "
                "(data_parallel_size > 1), whose replicas share one placement group: PACK or SPREAD"
            )
        return self

    @model_validator(mode="after")
    def _tiers_have_names(self) -> Self:
        names = [tier.name for tier in self.sla_tiers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sla_tiers: the name {twice[0]!r} is given to more than one tier")
        if self.default_sla_tier is not None and self.default_sla_tier not in names:
            known = ", ".join(names) or "there are none"
            raise ValueError(f"default_sla_tier: {self.default_sla_tier!r} is none of the sla_tiers ({known})")
        for i, tier in enumerate(self.sla_tiers):
            if tier.ttft_ms is not None and tier.longest_wait_seconds >= self.http_config.submit_timeout_s:
                raise ValueError(
                    f"sla_tiers.{i}.ttft_ms: half of it is waited for a replica, which must be less than "
                    f"http_config.submit_timeout_s = {self.http_config.submit_timeout_s:g}"
                )
        return self

    @property
    def tiers(self) -> tuple[SlaTierConfig, ...]:
        """The tiers by their place, which is what requests carry: at least one."""
        return self.sla_tiers or (BEST_EFFORT,)

    @property
    def promises(self) -> tuple[SlaTier, ...]:
        """The tiers as an engine takes them; () when nothing was configured."""
        return tuple(tier.promise for tier in self.sla_tiers)

    @property
    def default_tier(self) -> int:
        """Place of the tier that a request has which names none."""
        names = [tier.name for tier in self.tiers]
        return names.index(self.default_sla_tier) if self.default_sla_tier else 0

    @property
    def is_scheduled(self) -> bool:
        """Whether there is a verify budget to decide about: a drafter, and lengths that aren't fixed."""
        engine = self.engine_kwargs
        drafts = engine.drafter_source is not None and engine.num_speculative_tokens != 0
        return drafts and engine.speculation == "scheduled"

    @property
    def rank_resources(self) -> dict[str, float]:
        """What Ray reserves for each rank; {} when a replica's ranks simply run where the replica does."""
        resources: dict[str, float] = {}
        if num_cpus := self.deployment_config.ray_actor_options.num_cpus:
            resources["CPU"] = num_cpus
        if self.accelerator_type is not None:  # Ray's way to ask for a kind of GPU
            resources |= {"GPU": 1, f"accelerator_type:{self.accelerator_type}": 0.001}
        return resources

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What is reserved for each rank of a replica; [] when they simply run where the replica does."""
        if self.placement_group_config is not None and self.placement_group_config.bundles is not None:
            hint = {name: amount for name, amount in self.rank_resources.items() if name.startswith("accelerator_type")}
            return [{**hint, **bundle} for bundle in self.placement_group_config.bundles]
        return [self.rank_resources] * self.engine_kwargs.tensor_parallel_size if self.rank_resources else []

    @property
    def reserves_bundles(self) -> bool:
        """Whether each rank has a bundle of a placement group. One rank on CPUs is reserved by its replica alone."""
        several = self.engine_kwargs.world_size > 1 or self.accelerator_type is not None
        return bool(self.bundles) and (several or self.placement_group_config is not None)

    @property
    def least_replicas(self) -> int:
        """Replicas that there always are."""
        scaling, fixed = self.deployment_config.autoscaling_config, self.deployment_config.num_replicas
        return scaling.min_replicas if scaling else fixed or self.engine_kwargs.data_parallel_size

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be."""
        scaling = self.deployment_config.autoscaling_config
        return scaling.max_replicas if scaling else self.least_replicas

    @property
    def model_id(self) -> str:
        return self.model_loading_config.model_id

    def engine_config(self) -> EngineConfig:
        """The engine's settings, with the model's place filled in and shipped folders found from wherever it runs."""
        drafter = self.engine_kwargs.drafter_source
        return self.engine_kwargs.model_copy(
            update={
                "model_source": _located(self.model_loading_config.model_source),
                "drafter_source": drafter and _located(drafter),
            }
        )

    def effective_yaml(self) -> str:
        """Every setting with the value in force. Holds no secret: keys are named by where they are kept."""
        return yaml.safe_dump(
            self.model_dump(mode="json", exclude={"engine_kwargs": {"model_source"}}), sort_keys=False
        )


def parse_config(args: Mapping[str, Any]) -> LLMConfig:
    """The configuration in `args`.

    Raises ValueError with one line per offence, each naming the path of the key: `engine_kwargs.dtyp: unknown key`.
    """
    try:
        return LLMConfig.model_validate(dict(args))
    except ValidationError as error:
        lines = []
        for offence in error.errors():
            path = ".".join(str(part) for part in offence["loc"]) or "configuration"
            message = "unknown key" if offence["type"] == "extra_forbidden" else offence["msg"]
            lines.append(f"{path}: {message}")
        raise ValueError("invalid configuration\n  " + "\n  ".join(lines)) from None
