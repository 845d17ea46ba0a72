from __future__ import annotations

import pytest

from cluster.messages import SlaTier
from deployments.attainment import Delivered, Ended, judge

BOTH = SlaTier("both", min_tokens_per_second=10.0, ttft_ms=500.0)
NOTHING = SlaTier("nothing")


@pytest.mark.parametrize(
    ("delivered", "broken"),
    [
        (Delivered(11, 0.5, 1.0), ()),
        (Delivered(11, 0.501, 1.0), ("ttft",)),
        (Delivered(11, 0.5, 1.01), ("speed",)),
        (Delivered(11, 2.0, 2.0), ("ttft", "speed")),
        (Delivered(1, 0.5, 0.0), ()),
        (Delivered(0, 0.1, 0.0), ()),
    ],
)
def test_a_finished_choice_is_judged_by_what_it_delivered(delivered: Delivered, broken: tuple[str, ...]) -> None:
    assert judge(BOTH, delivered, "finished") == broken
    assert judge(NOTHING, delivered, "finished") == ()


@pytest.mark.parametrize(
    ("delivered", "verdict"),
    [
        (Delivered(0, 0.4, 0.0), None),
        (Delivered(1, 0.4, 0.0), None),
        (Delivered(0, 0.6, 0.0), ("ttft",)),
        (Delivered(3, 0.4, 0.1), ()),
        (Delivered(3, 0.4, 1.0), ("speed",)),
    ],
)
def test_a_client_that_left_hides_nothing(delivered: Delivered, verdict: tuple[str, ...] | None) -> None:
    assert judge(BOTH, delivered, "left") == verdict


@pytest.mark.parametrize(
    ("tier", "verdict"),
    [(BOTH, ("answer",)), (SlaTier("a", ttft_ms=9.0), ("answer",)), (SlaTier("b", 1.0), ("answer",)), (NOTHING, None)],
)
def test_no_answer_breaks_what_was_promised(tier: SlaTier, verdict: tuple[str, ...] | None) -> None:
    ended: Ended = "failed"
    assert judge(tier, Delivered(5, 0.1, 0.1), ended) == verdict
