"""The mixed traffic is a mix, and what it asks is what the server takes."""

from __future__ import annotations

import json

from cluster.messages import InvalidRequestError
from deployments.openai import ChatRequest, parse_body
from ops.benchmarks.traffic import MISTAKE_EVERY, body_of


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
