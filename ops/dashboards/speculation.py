"""Speculation: is it paying?"""

from __future__ import annotations

from ops.dashboards.model import (
    ENGINE,
    GREEN,
    RED,
    YELLOW,
    Dashboard,
    Panel,
    Query,
    Row,
    Threshold,
    rate,
    ratio,
    stat,
)

PROPOSED = "dspark_draft_tokens_proposed_total"
VERIFIED = "dspark_draft_tokens_verified_total"
ACCEPTED = "dspark_draft_tokens_accepted_total"
TRIMMED = "dspark_draft_tokens_trimmed_total"
MEASURED = "dspark_step_measured_seconds_total"
PAYS: tuple[Threshold, ...] = ((None, RED), (0.97, YELLOW), (1.03, GREEN))
"""Below 1 speculation costs; a few per cent either way are noise."""
SPEEDUP = ratio("dspark_step_plain_seconds_total", MEASURED, ENGINE)
ACCEPTED_LENGTH = ratio("dspark_accepted_length_sum", "dspark_accepted_length_count", ENGINE)
DRAFT_SHARE = ratio("dspark_draft_seconds_sum", "dspark_step_seconds_sum", ENGINE)
ROUNDS = rate("dspark_accepted_length_count", ENGINE)
WITHIN = rate("dspark_accepted_length_bucket", f'{ENGINE}, le=~"[1-7](.0)?"', "le")
"""Rounds of at most so many tokens. Longer ones are too rare to draw."""
WASTED = f"{rate(VERIFIED, ENGINE)} - {rate(ACCEPTED, ENGINE)}"


NOW = Row(
    "Now",
    (
        stat(
            "Speed-up",
            "Time that plain decoding would take for the same tokens, by the cost curve, over the time taken.",
            "x",
            SPEEDUP,
            thresholds=PAYS,
            runbook="speculation-does-not-pay",
        ),
        stat(
            "Accepted length",
            "Tokens per verify round: the accepted drafts and one more. 1 is plain decoding.",
            "tokens",
            ACCEPTED_LENGTH,
            thresholds=((None, RED), (1.05, YELLOW), (1.3, GREEN)),
            runbook="dsparkacceptancefell",
        ),
        stat(
            "Accepted of verified",
            "Share of the verified drafts that passed. Low: work for nothing, or a drafter of another model.",
            "percentunit",
            ratio(ACCEPTED, VERIFIED, ENGINE),
            thresholds=((None, RED), (0.15, YELLOW), (0.3, GREEN)),
            runbook="dsparkacceptancefell",
        ),
        stat(
            "Verified of proposed",
            "Share of the proposed drafts that the budget let through. Falls with load, by design.",
            "percentunit",
            ratio(VERIFIED, PROPOSED, ENGINE),
            runbook="many-drafts-are-trimmed",
        ),
        stat(
            "Draft share",
            "Share of the step time that goes into drafting.",
            "percentunit",
            DRAFT_SHARE,
            thresholds=((None, GREEN), (0.3, YELLOW), (0.5, RED)),
            runbook="speculation-does-not-pay",
        ),
        stat(
            "Skipped steps",
            "Share of the steps without a draft pass because the budget was 0: a saturated engine.",
            "percentunit",
            ratio("dspark_drafter_skipped_steps_total", "dspark_steps_total", ENGINE),
            runbook="dsparkdrafterproposesnothing",
        ),
    ),
)

PAYOFF = Row(
    "Does it pay",
    (
        Panel(
            "Speed-up by replica",
            "Over plain decoding, by the cost curve: believe it while the curve itself is right (Scheduler dashboard).",
            "x",
            (
                Query(ratio("dspark_step_plain_seconds_total", MEASURED, ENGINE, "replica"), "replica {{replica}}"),
                Query("vector(1)", "plain decoding"),
            ),
            thresholds=PAYS,
            runbook="speculation-does-not-pay",
            minimum=None,
        ),
        Panel(
            "Accepted length by replica",
            "Tokens per verify round. A fall without a rise of load: traffic or drafter changed.",
            "tokens",
            (
                Query(
                    ratio("dspark_accepted_length_sum", "dspark_accepted_length_count", ENGINE, "replica"),
                    "replica {{replica}}",
                ),
            ),
            thresholds=((None, RED), (1.05, YELLOW), (1.3, GREEN)),
            runbook="dsparkacceptancefell",
            minimum=1,
        ),
        Panel(
            "Where the step time goes",
            "Shares of drafting, and of verification and everything else.",
            "percentunit",
            (Query(DRAFT_SHARE, "draft"), Query(f"1 - {DRAFT_SHARE}", "verify and the rest")),
            stacked=True,
            runbook="speculation-does-not-pay",
            maximum=1,
        ),
    ),
)

POSITIONS = Row(
    "By position in the block (0: first draft token)",
    (
        Panel(
            "Acceptance by position",
            "Of the drafts verified this far, the share that passed this far. Falls along the block by nature; if "
            "position 0 falls as well, it is traffic or drafter, not the budget.",
            "percentunit",
            (Query(f"sort_desc({ratio(ACCEPTED, VERIFIED, ENGINE, 'position')})", "position {{position}}"),),
            kind="bargauge",
            runbook="dsparkacceptancefell",
            maximum=1,
        ),
        Panel(
            "Acceptance by position over time",
            "The same as lines: a slow decline is drifting traffic, a cliff is a deployment.",
            "percentunit",
            (Query(ratio(ACCEPTED, VERIFIED, ENGINE, "position"), "position {{position}}"),),
            runbook="dsparkacceptancefell",
            maximum=1,
        ),
        Panel(
            "Verified per round by position",
            "Share of the rounds that verified this far: how deep the budget lets the engines look ahead.",
            "percentunit",
            (Query(f"{rate(VERIFIED, ENGINE, 'position')} / on() group_left() {ROUNDS}", "position {{position}}"),),
            runbook="many-drafts-are-trimmed",
            maximum=1,
        ),
    ),
)

DRAFTS = Row(
    "What becomes of the drafts",
    (
        Panel(
            "Draft tokens",
            "Per second: accepted ones are gain, wasted ones were verified and rejected, trimmed ones only drafted.",
            "tokens/s",
            (
                Query(rate(ACCEPTED, ENGINE), "accepted"),
                Query(WASTED, "wasted"),
                Query(rate(TRIMMED, ENGINE), "trimmed"),
            ),
            stacked=True,
            runbook="many-drafts-are-trimmed",
        ),
        Panel(
            "Output tokens by origin",
            "Per second: from accepted drafts, or from the round itself (recovered, bonus and first tokens).",
            "tokens/s",
            (
                Query(rate(ACCEPTED, ENGINE), "accepted drafts"),
                Query(f"{rate('dspark_generated_tokens_total', ENGINE)} - {rate(ACCEPTED, ENGINE)}", "plain"),
            ),
            stacked=True,
        ),
        Panel(
            "Accepted length, distribution",
            "Rounds that committed more than so many tokens, as a share of all rounds.",
            "percentunit",
            (Query(f"sort_desc(1 - {WITHIN} / on() group_left() {ROUNDS})", "more than {{le}}"),),
            kind="bargauge",
            maximum=1,
        ),
    ),
)

DASHBOARD = Dashboard("dspark-speculation", "DSpark / Speculation", "Is it paying?", (NOW, PAYOFF, POSITIONS, DRAFTS))
