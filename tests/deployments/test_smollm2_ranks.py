"""SmolLM2 over several ranks behind the real server, with speculation: the text of one process, split either way.

Float32 and greedy, so that texts can be compared to the letter; the other tests of ranks use tiny models.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from conftest import MODEL, MODEL_SOURCE, Server, application

from ops.benchmarks.prompts import BUILT_IN, read_texts

pytestmark = [pytest.mark.server, pytest.mark.dist]

NUM_PROMPTS = 20
MAX_TOKENS = 16
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp3": (MODEL_SOURCE, {"tensor_parallel_size": 3}),
    "ep2": (f"split-experts=2:{MODEL_SOURCE}", {"data_parallel_size": 2}),
}


def args(source: str, **engine_kwargs: Any) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": source},
        "engine_kwargs": {
            "drafter_source": "drafter/checkpoints/smollm2-135m-instruct",
            "dtype": "float32",
            "num_threads": 1,
            "max_model_len": 1024,
            "max_num_seqs": NUM_PROMPTS,
            "num_kv_blocks": 256,
            "speculation": "fixed",
            "collective_timeout_s": 120,  # a slow machine is no lost rank
            **engine_kwargs,
        },
        "deployment_config": {"ray_actor_options": {"num_cpus": 0.25}},
        "http_config": {"submit_timeout_s": 200},
    }


async def answers(server: Server, texts: list[str]) -> list[str | None]:
    async with server.async_openai() as client:
        asked = [
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=MAX_TOKENS, temperature=0
            )
            for text in texts
        ]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]


@pytest.fixture(scope="module")
def one_process(server: Server) -> list[str | None]:
    return asyncio.run(answers(server, read_texts(BUILT_IN)[:NUM_PROMPTS]))


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_target_says_what_one_process_says(
    serve_port: int, model_folder: Path, one_process: list[str | None], split: str
) -> None:
    source, parallel = SPLITS[split]
    with application(serve_port, split, f"/{split}", args(source, **parallel)) as running:
        assert asyncio.run(answers(running, read_texts(BUILT_IN)[:NUM_PROMPTS])) == one_process
        assert len(set(one_process)) == NUM_PROMPTS
        num_accepted = running.metric("dspark_draft_tokens_accepted_total")
        assert num_accepted > NUM_PROMPTS, "speculation is on, and of use"
