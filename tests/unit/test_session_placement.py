"""Affinity over four decode workers, beside one worker with the whole pool and beside least_loaded.

Sessions of 12 turns with a system prompt in common (`tests.support.simulated_sessions`), which
each worker has to compute: so much more than one worker do four prefill at least.
"""

import random
from collections import Counter
from functools import cache

import numpy as np
import pytest

from router.dispatch.policy import PrefixAware
from tests.support.pairwise import in_whole
from tests.support.simulated_sessions import SYSTEM, Simulated

SESSIONS, TURNS, ROWS = 16, 12, 64
PAGES = 3200  # hold the whole trace; system prompts of three more workers are 192 of them


@cache
def served(num_workers: int, policy: str = "prefix_aware", *, kills: bool = False) -> Simulated:
    simulated = Simulated(num_workers, PAGES, ROWS, policy_name=policy, seed=1)
    simulated.run(SESSIONS, TURNS, kill_at=9.0 if kills else None)
    return simulated


def test_four_workers_prefill_hardly_more_than_one_that_has_all_pages() -> None:
    whole, four = served(1).num_prefilled, served(4).num_prefilled
    least = whole + 3 * SYSTEM
    print(f"prefilled: {four} tokens of four workers, {whole} of one, {four / whole:.3f} times, at")
    print(f"least {least / whole:.3f}")
    assert four <= 1.1 * whole
    assert four <= 1.01 * least
    assert served(4).num_moved == 0
    prefilled = [worker.num_prefilled for worker in served(4).workers.values()]
    assert max(prefilled) < 1.3 * min(prefilled), "sessions spread"


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_no_first_token_is_later_than_with_least_loaded(q: float) -> None:
    least = served(4, "least_loaded")
    print(f"q {q}: {served(4).first_token_s(q):.3f} s, least_loaded {least.first_token_s(q):.3f} s")
    assert served(4).first_token_s(q) <= least.first_token_s(q)


@pytest.mark.parametrize("named", [True, *in_whole((False,))])
@pytest.mark.parametrize(
    ("sessions", "pages"), [(16, 1600), *in_whole((27, 2700), (48, 4320), (48, 9600))]
)
def test_nor_where_pools_hold_half_of_the_sessions(
    sessions: int, pages: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four traces together: a trace has two turns in its last hundredth."""
    late, prefilled = dict[tuple[int, str], float](), Counter[tuple[int, str]]()
    monkeypatch.setattr(PrefixAware, "follows_sessions", named)
    for kind in ((4, "least_loaded"), (4, "prefix_aware"), (1, "prefix_aware")):
        random.seed(1)  # of equals they take one at random
        waits = list[float]()
        for seed in range(1, 5):
            simulated = Simulated(kind[0], pages, ROWS, policy_name=kind[1], seed=seed)
            simulated.run(sessions, TURNS)
            waits += [turn.told_at - turn.at for turn in simulated.ended]
            prefilled[kind] += simulated.num_prefilled
        late[kind] = float(np.quantile(waits, 0.99))
    least, four, one = prefilled
    print(f"{sessions} sessions, {pages} pages, {named=}: p99 of the first token, s: {late}")
    print(f"prefilled {prefilled[four] / prefilled[one]:.3f} times those of one worker")
    assert late[four] <= late[least]
    assert prefilled[four] <= 0.5 * prefilled[least]


def test_a_killed_worker_s_sessions_move_and_none_fails() -> None:
    killed = served(4, kills=True)
    assert len(killed.ended) == SESSIONS * TURNS
    assert killed.num_moved == SESSIONS / 4
    dead, *others = killed.workers.values()
    assert not dead.lives
    prefilled = [worker.num_prefilled for worker in others]
    assert max(prefilled) < 1.5 * min(prefilled)


def test_turns_without_a_name_find_their_session_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by their text alone; what all have in common draws nobody."""
    named = served(4)
    monkeypatch.setattr(PrefixAware, "follows_sessions", False)
    random.seed(1)  # of equals it takes one at random
    simulated = Simulated(4, PAGES, ROWS, policy_name="prefix_aware", seed=1)
    simulated.run(SESSIONS, TURNS, kill_at=None)
    prefilled = [worker.num_prefilled for worker in simulated.workers.values()]
    print(f"prefilled {prefilled}, {simulated.num_prefilled / named.num_prefilled:.2f} times named")
    assert max(prefilled) < 1.5 * min(prefilled), "sessions spread"
    assert simulated.num_prefilled < 1.1 * named.num_prefilled, "3.4 where all crowd"
