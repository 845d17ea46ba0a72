"""Our engine as the closed loop drives it, in the three modes that a speed-up compares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import yaml

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.messages import Request, SamplingParams
from cluster.models.decoder import Decoder
from cluster.profiler import cost_curve
from cluster.shard import Shard
from deployments.config import parse_config
from deployments.tokenizer import Tokenizer
from ops.benchmarks.drive import Progress

MODES = ("plain", "fixed", "scheduled")
GOLDEN = 0.618034
"""Its multiples are spread evenly over the unit interval, however many there are."""


def served_config(path: Path) -> EngineConfig:
    """The engine of the first application in a Serve file, without prefix caching: a benchmark's prompts recur."""
    application = yaml.safe_load(path.read_text())["applications"][0]
    return parse_config(application["args"]).engine_config().model_copy(update={"enable_prefix_caching": False})


def in_mode(config: EngineConfig, mode: str) -> EngineConfig:
    """The same engine with another speculation."""
    if mode == "plain":
        return config.model_copy(update={"num_speculative_tokens": 0})
    return config.model_copy(update={"speculation": mode})


class EngineBackend:
    """One engine with the same sampling for every request."""

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine = engine
        self._sampling = sampling

    def add(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> None:
        self._engine.add(self.request(request_id, prompt_token_ids))

    def request(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> Request:
        return Request(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling=self._sampling)

    def step(self) -> list[Progress]:
        progress = []
        for event in self._engine.step().events:
            if event.error is not None:
                raise RuntimeError(f"the engine gave request {event.request_id} up: {event.error}")
            rounds, accepted = (event.stats.num_rounds, event.stats.num_accepted) if event.stats else (0, 0)
            finished = event.finish_reason is not None
            progress.append(Progress(event.request_id, len(event.token_ids), finished, rounds, accepted))
        return progress


class TrafficBackend(EngineBackend):
    """Answers have half to one and a half times `sampling.max_tokens`, by the number of the request, and end nowhere
    else: so whoever is compared makes as many tokens from the same prompts.

    Were all of one length, plain decoding would end them in the same steps, and compute their successors' prompts
    together, as no real traffic does.
    """

    def request(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> Request:
        length = max(1, round(self._sampling.max_tokens * (0.5 + int(request_id) * GOLDEN % 1)))
        sampling = replace(self._sampling, max_tokens=length, stop_token_ids=())
        return replace(super().request(request_id, prompt_token_ids), sampling=sampling)


@dataclass(frozen=True)
class Bench:
    """One target in memory, three engines on it, each with pages of its own."""

    decoder: Decoder
    engines: dict[str, Engine]

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """ValueError when the settings name no drafter: there would be nothing to compare."""
        speculative = Shard.load(config)
        if speculative.drafter is None:
            raise ValueError("engine_kwargs.drafter_source: a comparison needs a drafter")
        decoder, drafter = speculative.decoder, speculative.drafter
        plain, fixed, scheduled = (in_mode(config, mode) for mode in MODES)
        return cls(
            decoder,
            {
                # Without a drafter, as it would be served: plain decoding must not pay for draft context.
                "plain": Engine(plain, Shard(decoder, None, plain), None),
                "fixed": Engine(fixed, Shard(decoder, drafter, fixed), None),
                "scheduled": Engine(scheduled, speculative, cost_curve(config, speculative)),
            },
        )


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer of the model in `folder`."""
    return Tokenizer(folder).end_token_ids
