"""The width of windows follows what is accepted and what steps cost."""

import random
from collections.abc import Callable

import pytest

from tests.support.pairwise import more
from worker.plan import MAX_WINDOW_TOKENS, Drawn
from worker.schedule.width import PROBE, WidthPolicy

WIDTHS = (1, 2, 4, 8)
# An H200's steps of the Qwen3-8B shape, ms, by rows and width.
STEP_MS = {
    1: (4.25, 4.33, 4.46, 4.49),
    8: (4.58, 4.54, 4.47, 4.89),
    32: (4.94, 5.29, 5.84, 8.02),
    64: (5.86, 6.36, 8.70, 14.17),
}
STEP_S = {
    (rows, width): ms / 1e3
    for rows, times in STEP_MS.items()
    for width, ms in zip(WIDTHS, times, strict=True)
}


def drawn(width: int, share: float, rng: random.Random) -> Drawn:
    """A window whose drafts are accepted with a probability of `share` each."""
    num = 1
    while num < width and rng.random() < share:
        num += 1
    return Drawn((7,) * num, False, (), (7,) * (width - 1))


def run(
    policy: WidthPolicy,
    rows: int,
    share: float = 0.0,
    steps: int = 2000,
    seed: int = 1,
    slower: Callable[[int, random.Random], float] = lambda step, rng: 1.0,
    window: Callable[..., Drawn] | None = None,
) -> list[int]:
    """The widths of steps that take `slower` times as long as on an H200.

    window: of a row, by step, row, width, the width before and rng; None: as `drawn`.
    """
    draw = window or (lambda step, row, width, before, rng: drawn(width, share, rng))
    rng, widths, before = random.Random(seed), [], 1
    for step in range(steps):
        width = policy.choose(rows)
        widths.append(width)
        policy.observe(width, [draw(step, row, width, before, rng) for row in range(rows)])
        step_s = STEP_S[min(r for r in STEP_MS if r >= rows), width]
        policy.took(rows, width, slower(step, rng) * step_s)
        before = width
    return widths


def rate(rows: int, share: float, width: int) -> float:
    """Tokens a second of a row."""
    return sum(share**place for place in range(width)) / STEP_S[rows, width]


def best(rows: int, share: float) -> int:
    return max(WIDTHS, key=lambda width: rate(rows, share, width))


@pytest.mark.product(rows=(1, 64, 8, 32), share=(0.0, 0.1, 0.5, 0.79, 0.95), measured=(True, False))
def test_it_finds_the_width_of_most_tokens_a_second(rows, share, measured) -> None:
    policy = WidthPolicy(WIDTHS, STEP_S if measured else None)
    widths = run(policy, rows, share)[1500:]
    chosen = max(set(widths), key=widths.count)
    assert rate(rows, share, chosen) >= 0.95 * rate(rows, share, best(rows, share))
    assert widths.count(chosen) > 0.9 * len(widths), "it wavers"


def test_a_width_that_does_not_pay_is_not_used_and_is_tried_again() -> None:
    policy = WidthPolicy(WIDTHS, STEP_S)
    widths = run(policy, 64, 0.0)[200:]
    assert 0 < sum(width > 1 for width in widths) <= 2 * (len(widths) / PROBE + 1)
    assert run(policy, 64, 0.95, steps=20 * PROBE)[-1] > 1, "acceptance came back, unnoticed"


@pytest.mark.parametrize("rows", [32, 64])
def test_drafts_that_do_not_pay_are_soon_given_up(rows: int) -> None:
    """Before as many steps as a choice stands for later on."""
    widths = run(WidthPolicy(WIDTHS, STEP_S), rows, 0.0, steps=64)
    assert widths[0] > 1
    assert set(widths[17:]) == {1}


def test_a_finished_row_and_a_missing_draft_are_no_refusals() -> None:
    policy = WidthPolicy((4,), None)
    before = policy.expected_tokens(4)
    policy.observe(4, [Drawn((1,), True, (), (2, 3, 4))] * 1000)
    policy.observe(4, [Drawn((1,), False, (), (-1, -1, -1))] * 1000)
    assert policy.expected_tokens(4) == before
    policy.observe(4, [Drawn((1, 2), False, (), (2, -1, -1))] * 1000)
    accepted = policy.expected_tokens(2)
    assert 1.9 < accepted < policy.expected_tokens(4)
    policy.observe(4, [Drawn((1,), False, (), (2, 3, 4))] * 20000)
    assert policy.expected_tokens(4) < 1.2


@pytest.mark.parametrize("length", [4000, *more(3, 40)])
def test_acceptance_that_comes_back_is_noticed_though_narrow_steps_draft_little(length) -> None:
    """A step of width W leaves drafts for a window of W; a row's first window has none."""

    def window(step: int, row: int, width: int, before: int, rng: random.Random) -> Drawn:
        there = 1 if (step + row) % length == 0 else min(before, width)
        made = drawn(there, 0.0 if step < 10 * PROBE else 0.9, rng)
        return Drawn(made.tokens, False, (), made.drafts + (-1,) * (width - there))

    rows, steps = 32, 40 * PROBE
    widths = run(WidthPolicy(WIDTHS, STEP_S), rows, steps=steps, seed=3, window=window)
    assert sum(width > 1 for width in widths[5 * PROBE : 10 * PROBE]) <= 10
    last = widths[-5 * PROBE :]
    assert last.count(best(rows, 0.9)) > 0.9 * len(last)


@pytest.mark.parametrize("share", [0.1, 0.79])
def test_longer_contexts_and_slow_steps_do_not_change_the_choice(share: float) -> None:
    """Both make steps of all widths longer, not only of the one that is used."""

    def slower(step: int, rng: random.Random) -> float:
        return (1 + step / (8 * PROBE)) * (10 if rng.random() < 0.02 else 1)

    settled = run(WidthPolicy(WIDTHS, STEP_S), 64, share, 8 * PROBE, 5, slower)[64:]
    assert settled.count(best(64, share)) >= len(settled) * (1 - 2.5 / PROBE)


def test_rows_times_width_have_a_limit() -> None:
    policy = WidthPolicy((4, 16), None)
    assert policy.choose(MAX_WINDOW_TOKENS // 4) == 4
    assert policy.choose(MAX_WINDOW_TOKENS // 4 + 1) == 1
    assert WidthPolicy((16,), None).choose(MAX_WINDOW_TOKENS // 16) == 16
