"""Whether what a tier promises was kept, as the client of one choice felt it. Pure: times are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.messages import SlaTier
from cluster.metrics import Promise

Ended = Literal["finished", "left", "failed"]
"""How a choice ended: with its last token, because its client left, or refused or given up by the service."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """What one choice has got."""

    num_tokens: int
    first_seconds: float
    """From its arrival to its first token, or until now when there is none."""
    later_seconds: float
    """From its first token to its last."""


def judge(tier: SlaTier, delivered: Delivered, ended: Ended) -> tuple[Promise, ...] | None:
    """The promises that were not kept; None: nothing can be said, and nothing is counted.

    Clients leave because it is slow, so one that left is judged by what it had until then, unless that says nothing
    yet. A choice that failed broke what was promised, if anything was. A tier without promises keeps what it promises.
    """
    if ended == "failed":
        return ("answer",) if tier.ttft_ms is not None or tier.min_tokens_per_second else None
    broken: list[Promise] = []
    if tier.ttft_ms is not None and 1000 * delivered.first_seconds > tier.ttft_ms:
        broken.append("ttft")
    num_later = delivered.num_tokens - 1
    if num_later > 0 and num_later < tier.min_tokens_per_second * delivered.later_seconds:
        broken.append("speed")
    return None if ended == "left" and num_later < 1 and not broken else tuple(broken)
