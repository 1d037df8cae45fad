"""Conditional disaggregation: local only where the estimate says so."""

import random
from dataclasses import replace

import msgspec
import pytest

from tests.support.pulls import ScriptedSource
from worker.api import Candidate
from worker.config import DisaggregationConfig
from worker.requests.admission import PlacementInputs, to_ask
from worker.transfer.sources import FORGET_S, Link

AUTO = DisaggregationConfig()
COST = PlacementInputs(
    num_uncached_tokens=100,
    num_running=0,
    s_per_token=0.001,
    kv_bytes_per_token=1_000,
    pull_bytes_per_s=dict.fromkeys(("p/1", "q/1"), 1e8),
    num_missing_tokens=100,
    num_uncached_there=100,
    num_tokens=100,
)
IDLE = Candidate("p/1", prefill_s_per_token=0.001)


def prefills_locally(
    inputs: PlacementInputs, candidates: list[Candidate], config: DisaggregationConfig
) -> bool:
    return not to_ask(inputs, candidates, config)


def test_never_and_always_decide_alone() -> None:
    cheap = replace(COST, num_uncached_tokens=1)
    dear = replace(COST, num_uncached_tokens=100_000, num_running=60)
    for cost in (cheap, dear):
        assert prefills_locally(cost, [IDLE], DisaggregationConfig(mode="never"))
        assert not prefills_locally(cost, [IDLE], DisaggregationConfig(mode="always"))


def test_a_rate_that_was_never_measured_is_taken_from_the_others() -> None:
    unknown = replace(COST, s_per_token=0.0)
    assert prefills_locally(unknown, [IDLE], AUTO) == prefills_locally(COST, [IDLE], AUTO)
    busy = replace(unknown, num_running=5)
    assert not prefills_locally(busy, [IDLE], AUTO)


def test_the_estimate_to_the_token() -> None:
    """100 tokens: local 0.1 s; remote 0.003 + 0.1 + 0.001 s plus the queue."""
    assert prefills_locally(COST, [IDLE], AUTO)
    cached = msgspec.structs.replace(IDLE, num_cached_tokens=100)  # 0.004 s
    assert not prefills_locally(COST, [cached], AUTO)
    # remote = 0.004 + (queue + 100 - cached) * 0.001 = 0.1 at queue - cached = -4
    for queued, local in ((95, False), (97, True)):
        candidate = msgspec.structs.replace(IDLE, num_cached_tokens=100, num_queued_tokens=queued)
        assert prefills_locally(COST, [candidate], AUTO) is local


def test_more_load_there_never_makes_remote_and_more_here_never_local() -> None:
    rnd = random.Random(0)
    seen = set()
    for _ in range(5_000):
        num = rnd.randint(1, 2_000)
        cost = PlacementInputs(
            num, rnd.randint(0, 64), rnd.choice((1e-5, 1e-4, 1e-3)), rnd.randint(100, 100_000),
            {"p/1": rnd.choice((1e7, 1e9))}, rnd.randint(0, 99), num_missing_tokens=num,
            num_uncached_there=num, num_tokens=num,
        )  # fmt: skip
        candidate = Candidate(
            "p/1", rnd.randint(0, 5_000), rnd.choice((0.0, 1e-5, 1e-4)), rnd.randint(0, 2_500)
        )
        local = prefills_locally(cost, [candidate], AUTO)
        seen.add(local)
        if local:
            queue = candidate.num_queued_tokens + rnd.randint(0, 1_000)
            busier = msgspec.structs.replace(candidate, num_queued_tokens=queue)
            assert prefills_locally(cost, [busier], AUTO)
            assert prefills_locally(replace(cost, pull_bytes_per_s={"p/1": 1e6}), [candidate], AUTO)
        else:
            busier_here = replace(
                cost,
                num_running=cost.num_running + rnd.randint(0, 9),
                num_queued_tokens=cost.num_queued_tokens + rnd.randint(0, 9),
            )
            assert not prefills_locally(busier_here, [candidate], AUTO)
            assert not prefills_locally(cost, [candidate, IDLE], AUTO)
    assert seen == {True, False}


def test_whoever_is_at_a_much_slower_road_is_asked_last() -> None:
    """With rows to stall both are cheaper than we: 0.104 s over the fast road, and
    0.130 s are a quarter more."""
    far = msgspec.structs.replace(IDLE, peer="q/1")
    for slow, order in ((4e6, [far, IDLE]), (3e6, [IDLE, far])):  # 0.128 s, 0.136 s
        rates = {"p/1": 1e8, "q/1": slow}
        busy = replace(COST, num_running=9, pull_bytes_per_s=rates)
        assert to_ask(busy, [far, IDLE], AUTO) == order
        assert to_ask(busy, [far, IDLE], DisaggregationConfig(mode="always")) == [far, IDLE]


def test_what_a_candidate_has_is_not_computed_again() -> None:
    has_all, has_less = (Candidate("p/1", 0, 0.001, num) for num in (1000, 880))
    here = replace(COST, num_tokens=1000)  # of which 900 were matched here
    assert not prefills_locally(here, [has_all], AUTO)
    assert prefills_locally(replace(here, num_uncached_tokens=10), [has_less], AUTO)
    known = replace(here, num_uncached_tokens=50)  # it had computed what is known here
    assert prefills_locally(known, [has_less], AUTO) == prefills_locally(known, [IDLE], AUTO)


def test_the_rate_of_a_link_is_of_its_last_pulls_by_their_bytes() -> None:
    link = Link("p/1", ScriptedSource(), 7.0)
    assert link.bytes_per_s_at(100.0) == 7.0
    for _ in range(9):
        link.rate.landed(1, 0.1, 100.0)
    link.rate.landed(1_000_000, 0.1, 100.0)
    assert link.bytes_per_s_at(100.0) == pytest.approx(1e6, rel=1e-3)
    for at in (101.0, 102.0, 109.0):
        link.rate.landed(1_000, 1.0, at)
    assert 1_000 < link.bytes_per_s_at(109.0) < 200_000
    assert link.bytes_per_s_at(109.0 + FORGET_S) == 7.0
