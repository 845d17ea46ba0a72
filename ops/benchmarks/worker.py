"""One serving system in a process of its own, blocked on its input while another one is measured.

Started by ops.benchmarks.peers: settings as JSON in the only argument, then one job a line on stdin, one answer a line
on stdout. Imports of a system live where it is built: vLLM's environment has none of our packages, and ours no vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.benchmarks.drive import Measurement, Progress, drive

Prompts = Sequence[tuple[int, ...]]
System = Callable[[Prompts, int], Measurement]


@dataclass(frozen=True)
class Settings:
    """What all systems are told, and alike."""

    system: str
    """plain, scheduled (ours), vllm or transformers."""
    folder: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    num_threads: int
    config: str
    """Our own Serve file; nobody else reads it."""


def ours(settings: Settings) -> System:
    from pathlib import Path

    import torch

    from cluster.messages import SamplingParams
    from ops.benchmarks.engines import Bench, EngineBackend, served_config

    torch.set_num_threads(settings.num_threads)
    bench = Bench.load(served_config(Path(settings.config)))
    sampling = SamplingParams(
        max_tokens=settings.max_tokens, temperature=settings.temperature, stop_token_ids=tuple(settings.stop_token_ids)
    )
    backend = EngineBackend(bench.engines[settings.system], sampling)
    return lambda prompts, concurrency: drive(backend, prompts, concurrency)


class VllmBackend:
    """vLLM's engine, step by step in this process."""

    def __init__(self, settings: Settings) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings.folder,
                dtype=settings.dtype,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                enforce_eager=True,
                enable_prefix_caching=False,
            )
        )
        self._sampling = SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            stop_token_ids=list(settings.stop_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def add(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> None:
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt_token_ids)}, self._sampling)

    def step(self) -> list[Progress]:
        outputs = self._engine.step()
        return [Progress(out.request_id, len(out.outputs[0].token_ids), out.finished) for out in outputs]


def vllm(settings: Settings) -> System:
    backend = VllmBackend(settings)
    return lambda prompts, concurrency: drive(backend, prompts, concurrency)


def transformers(settings: Settings) -> System:
    """Hugging Face's generate on whole batches: a batch counts until its first sequence ends."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.num_threads)
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=getattr(torch, settings.dtype)).eval()
    ends = list(settings.stop_token_ids)

    def measure_batch(batch: Prompts) -> Measurement:
        longest = max(map(len, batch))
        ids = torch.tensor([[ends[0]] * (longest - len(prompt)) + list(prompt) for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        times = [time.perf_counter()]

        def clock(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(batch), dtype=torch.bool)

        sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=settings.max_tokens,
            eos_token_id=ends,
            pad_token_id=ends[0],
            stopping_criteria=[clock],
            **(sampling if settings.temperature else {"do_sample": False}),
        )
        return batch_measurement([_length(row, ends) for row in output[:, longest:].tolist()], times)

    def run(prompts: Prompts, concurrency: int) -> Measurement:
        starts = range(0, len(prompts), concurrency)
        return sum((measure_batch(prompts[start : start + concurrency]) for start in starts), Measurement())

    return run


def _length(row: list[int], ends: list[int]) -> int:
    """Tokens up to and including the first end token."""
    return next((index + 1 for index, token in enumerate(row) if token in ends), len(row))


def batch_measurement(lengths: list[int], times: list[float]) -> Measurement:
    """`times[k]` is when token k of every row was there, `times[0]` when the batch began; as `drive` counts."""
    shortest = min(lengths)
    return Measurement(
        num_tokens=shortest * len(lengths),
        seconds=times[shortest] - times[0],
        user_tokens=sum(length - 1 for length in lengths),
        user_seconds=sum(times[length] - times[1] for length in lengths),
    )


SYSTEMS = {"plain": ours, "scheduled": ours, "vllm": vllm, "transformers": transformers}


def main() -> None:
    # Whatever a library prints goes to stderr: stdout carries answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = Settings(**json.loads(sys.argv[1]))
    system = SYSTEMS[settings.system](settings)
    print(json.dumps({"ready": settings.system}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        measured = system([tuple(prompt) for prompt in job["prompts"]], job["concurrency"])
        print(json.dumps(asdict(measured)), file=answers, flush=True)


if __name__ == "__main__":
    main()
