"""SLA tiers and the router through the real server: two replicas of a tiny model, asked by the real `openai` client.

By their cost curve the engines are slow, so what they think of a promise doesn't depend on the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import Server, application, eventually
from tiny_models import TinyModel, keep_curve, model_args, tiny_llama

pytestmark = pytest.mark.server

MODEL = "tiny"
TIERS: list[dict[str, Any]] = [
    {"name": "besteffort"},
    {"name": "easy", "min_tokens_per_second": 0.001, "ttft_ms": 300_000},
    {"name": "dream", "min_tokens_per_second": 1e9},
    {"name": "hasty", "ttft_ms": 0.001},
    {"name": "proud", "min_tokens_per_second": 1e9, "ttft_ms": 200, "when_unmet": "shed"},
    {"name": "patient", "min_tokens_per_second": 1e9, "ttft_ms": 240_000},
]


def args(model: TinyModel, curve: Path) -> dict[str, Any]:
    return {
        **model_args(model, MODEL, cost_curve_path=str(curve)),
        "deployment_config": {"num_replicas": 2, "graceful_shutdown_timeout_s": 1.0},
        "http_config": {"submit_timeout_s": 200},
        "sla_tiers": TIERS,
        "default_sla_tier": "easy",
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> TinyModel:
    return tiny_llama(tmp_path_factory.mktemp("llama"), model_folder)


@pytest.fixture(scope="module")
def tiered(serve_port: int, llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    curve = tmp_path_factory.mktemp("curve") / "curve.json"
    settings = args(llama, curve)
    keep_curve(curve, settings)
    with application(serve_port, "tiered", "/tiered", settings) as running:
        eventually(lambda: len(by_replica(running, "dspark_requests_running")) == 2, "both replicas report")
        yield running


def by_replica(server: Server, name: str) -> dict[str, float]:
    """A metric's value by replica, for engines that report it."""
    found = {replica: server.samples(name, replica=replica) for replica in ("0", "1")}
    return {replica: sum(values) for replica, values in found.items() if values}


def ask(server: Server, tier: str | None = None, header: str | None = None, **fields: Any) -> Any:
    fields = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, **fields}
    extra: dict[str, Any] = {"ignore_eos": True} | ({"dspark": {"tier": tier}} if tier is not None else {})
    headers = {"x-dspark-tier": header} if header is not None else {}
    with server.openai() as client:
        made = client.completions.create(model=MODEL, extra_body=extra, extra_headers=headers, **fields)
        return list(made) if fields.get("stream") else made


def test_a_request_without_a_tier_has_the_default_one(tiered: Server) -> None:
    answer = ask(tiered)
    assert (answer.dspark["tier"], answer.dspark["tier_met"]) == ("easy", True)


@pytest.mark.parametrize("how", [{"tier": "dream"}, {"header": "dream"}, {"tier": "dream", "header": "dream"}], ids=str)
def test_body_and_header_choose_a_tier(tiered: Server, how: dict[str, str]) -> None:
    last = ask(tiered, stream=True, **how)[-1]
    assert (last.dspark["tier"], last.dspark["tier_met"]) == ("dream", False), "nobody is that fast"


@pytest.mark.parametrize(
    ("how", "param", "message"),
    [
        ({"tier": "gold"}, "dspark.tier", "'gold' is no tier of this server, which has besteffort, easy, dream, hasty"),
        ({"header": "gold"}, "x-dspark-tier", "'gold' is no tier of this server, which has besteffort, easy"),
        ({"tier": "easy", "header": "dream"}, "dspark.tier", "is 'easy', but the header x-dspark-tier says 'dream'"),
    ],
)
def test_wrong_tiers_are_refused(tiered: Server, how: dict[str, str], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        ask(tiered, **how)
    assert raised.value.param == param


def test_attainment_is_counted_by_tier(tiered: Server) -> None:
    names = ("dspark_sla_requests_total", "dspark_sla_requests_good_total")

    def counted(tier: str) -> list[float]:
        broken = [tiered.metric("dspark_sla_promises_broken_total", tier=tier, promise=p) for p in ("ttft", "speed")]
        return [*(tiered.metric(name, tier=tier) for name in names), *broken]

    eventually(lambda: counted("hasty") == [0, 0, 0, 0], "series exist before anything happened")
    expected = {"besteffort": [2, 2, 0, 0], "easy": [2, 2, 0, 0], "dream": [2, 0, 0, 2], "hasty": [2, 0, 2, 0]}
    before = {tier: counted(tier) for tier in expected}
    drafted = tiered.metric("dspark_draft_tokens_proposed_total", tier="hasty")
    for tier in expected:
        ask(tiered, tier, n=2)

    def added(tier: str) -> list[float]:
        return [after - before for after, before in zip(counted(tier), before[tier], strict=True)]

    eventually(lambda: all(added(tier) == expected[tier] for tier in expected), "each choice was judged once")
    eventually(
        lambda: tiered.metric("dspark_draft_tokens_proposed_total", tier="hasty") > drafted, "drafts count by tier"
    )


def test_many_choices_of_one_request_all_find_a_replica(tiered: Server) -> None:
    """They share an id in Serve, whose own router would give a place to only one of them."""
    answer = ask(tiered, n=12)
    assert len({choice.text for choice in answer.choices}) == 1
    assert len(answer.choices) == 12


def test_prompts_that_begin_alike_meet_and_others_spread(tiered: Server) -> None:
    def prompts() -> dict[str, float]:
        return by_replica(tiered, "dspark_prompt_tokens_total")

    def rise(ask_all: Any, num_tokens: int) -> dict[str, float]:
        """What was asked just before may be counted only now; all of that is shorter than one prompt of these."""
        before = prompts()
        ask_all()
        eventually(lambda: sum(prompts().values()) >= sum(before.values()) + num_tokens, "all prompts were counted")
        return {replica: after - before[replica] for replica, after in prompts().items()}

    def alike() -> None:
        for turn in range(6):
            ask(tiered, prompt=[*range(100, 164), turn], max_tokens=1)

    def different() -> None:
        for turn in range(10):
            ask(tiered, prompt=[turn] * 65, max_tokens=1)

    other, chosen = sorted(rise(alike, 6 * 65).values())
    assert other < 65
    assert chosen >= 6 * 65
    assert min(rise(different, 10 * 65).values()) >= 65


async def test_load_comes_before_a_known_prefix(tiered: Server) -> None:
    prompt = [*range(200, 264)]
    await asyncio.to_thread(ask, tiered, prompt=prompt, max_tokens=1)
    before = by_replica(tiered, "dspark_prompt_tokens_total")
    await asyncio.gather(*(asyncio.to_thread(ask, tiered, prompt=prompt, max_tokens=200) for _ in range(8)))
    await asyncio.to_thread(
        eventually,
        lambda: all(after > before[r] for r, after in by_replica(tiered, "dspark_prompt_tokens_total").items()),
        "both replicas got some",
    )


def admissions(server: Server, tier: str) -> dict[str, float]:
    names = ("met", "waited", "unmet", "unknown")
    return {name: server.metric("dspark_sla_admissions_total", tier=tier, outcome=name) for name in names}


def post(server: Server, tier: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 8, "dspark": {"tier": tier}, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


def test_a_promise_that_is_kept_is_met_and_one_that_is_not_is_served_all_the_same(tiered: Server) -> None:
    def served(tier: str, outcome: str) -> bool:
        before = admissions(tiered, tier)
        ask(tiered, tier)
        eventually(lambda: admissions(tiered, tier) != before, "it was counted")
        return admissions(tiered, tier)[outcome] > before[outcome]

    eventually(lambda: served("dream", "unmet"), "the router has heard from every replica")
    eventually(lambda: served("easy", "met"), "a replica keeps the small promise")


def test_a_tier_may_rather_be_refused(tiered: Server) -> None:
    eventually(lambda: post(tiered, "proud").status_code == 429, "the router has heard from every replica")
    refused = post(tiered, "proud")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "tier_unmet")
    assert "'proud'" in error["message"]
    with pytest.raises(openai.RateLimitError):
        ask(tiered, "proud", stream=True)


def test_refusals_are_counted(tiered: Server) -> None:
    def counted() -> list[float]:
        return [
            tiered.metric("dspark_requests_shed_total", tier="proud", reason="tier_unmet"),
            tiered.metric("dspark_sla_promises_broken_total", tier="proud", promise="answer"),
        ]

    eventually(lambda: post(tiered, "proud").status_code == 429, "the router has heard from every replica")
    assert post(tiered, "proud", n=3).status_code == 429
    eventually(lambda: counted()[1] == counted()[0] + 2 > 2, "one of them had three choices")


async def test_who_waits_for_a_promise_holds_up_nobody(tiered: Server) -> None:
    await asyncio.to_thread(eventually, lambda: post(tiered, "proud").status_code == 429, "the router has heard")
    async with tiered.async_openai() as client:
        extra = {"dspark": {"tier": "patient"}}
        waiting = [
            asyncio.create_task(client.completions.create(model=MODEL, prompt=[i], max_tokens=4, extra_body=extra))
            for i in range(12)
        ]
        await asyncio.sleep(2)  # long enough to be with the router; not too long to wait there
        for tier in ("besteffort", "easy"):
            answer = await asyncio.to_thread(ask, tiered, tier)
            assert answer.dspark["tier"] == tier
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(admissions(tiered, "patient").values()) == 0, "who left while waiting never went anywhere"
    await asyncio.to_thread(ask, tiered, n=12)
