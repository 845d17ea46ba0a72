"""The mixed traffic is a mix, and what it asks is what the server takes."""

from __future__ import annotations

import json

import pytest

from cluster.messages import InvalidRequestError
from deployments.openai import ChatRequest, parse_body
from ops.benchmarks.traffic import MISTAKE_EVERY, Traffic, body_of
from tests.ops.streaming import CUT, DONE, ERROR, streaming


def test_requests_are_valid_but_for_the_mistakes_and_of_every_kind() -> None:
    taken, refused = [], []
    for number in range(100):
        body = body_of(number, "m", ["batch", "voice"], ["one", "two"])
        assert body == body_of(number, "m", ["batch", "voice"], ["one", "two"])
        try:
            taken.append(parse_body(json.dumps(body).encode(), ChatRequest))
        except InvalidRequestError:
            refused.append(number)
    assert refused == list(range(MISTAKE_EVERY - 1, 100, MISTAKE_EVERY))
    kinds = {(body.stream, body.seed is not None, body.n, body.temperature) for body in taken}
    assert [len({kind[place] for kind in kinds}) for place in range(4)] == [2, 2, 2, 3]
    assert {body.dspark.tier for body in taken if body.dspark} == {"batch", "voice"}


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [(DONE, "answered"), (ERROR, "failed"), (CUT, "lost: IncompleteRead")],
    ids=["done", "error", "cut"],
)
def test_a_stream_that_fails_is_no_answer(ending: bytes, outcome: str) -> None:
    with streaming(ending) as url:
        traffic = Traffic(url, "m", ["default"], ["hi"], most_clients=1)
        assert traffic._ask(1, body_of(1, "m", ["default"], ["hi"])) == outcome
