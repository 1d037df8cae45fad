"""What a member gone bad leaves of a worker, whose rows, requests and pages are all asked for."""

import random

import pytest

from tests.support.books import check_book
from worker.api import Member, Sampling
from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.plan import Drawn
from worker.schedule.decode import DecodeScheduler
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import Req
from worker.schedule.shares import PARTS, Shares

NAMES = ("a", "b", "c")


def shares_of(num: int) -> Shares:
    made = Shares("router")
    made.update([Member(name, "router", "1", "") for name in NAMES])
    asking = [Member(name, "router", "1", "") for name in NAMES[:num]]
    made.update([Member("p", "prefill", "1", ""), *asking])
    return made


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("total", [3, 100, 320])
def test_each_member_has_its_share_whatever_others_take(num: int, total: int) -> None:
    rng, shares = random.Random(total), shares_of(num)
    peers = sorted(shares.members)
    own = total // (PARTS * num)
    for _ in range(50):
        taken = dict.fromkeys(peers, 0)

        def asks(peer: str, taken: dict[str, int] = taken) -> bool:
            allowed = shares.allow(peer, total, total - sum(taken.values()) - 1, taken.items())
            taken[peer] += allowed
            return allowed

        bad, *others = rng.sample(peers, num)
        for _ in range(rng.randrange(2 * total)):
            asks(rng.choice(peers))
        for peer in others:
            taken[peer] = rng.randrange(taken[peer] + 1)  # some end
        while asks(bad):
            pass
        assert sum(taken.values()) <= total
        for peer in rng.sample(others, num - 1):
            assert all(asks(peer) for _ in range(own - taken[peer]))
    taken = dict.fromkeys(peers, 0)
    while asks(peers[0], taken):
        pass
    assert taken[peers[0]] == total - own * (num - 1), "alone it has all but the others' shares"


def test_a_row_is_left_for_who_has_fewer() -> None:
    book, rows = PageBook(4096, 4), 16
    config = EngineConfig(max_num_reqs=rows, penalty_rows=1, max_prefill_tokens=64)
    scheduler = DecodeScheduler(DecodeQueues(book, config), frozenset())
    scheduler.queues.shares.members = shares_of(2).members
    for i in range(2 * rows):
        peer = "b/1" if i == 2 * rows - 1 else "a/1"
        sampling = Sampling(max_tokens=9, ignore_eos=True)
        req = Req(f"r{i}", 1, peer, [i, i + 1], 2, sampling, 0.0)
        assert scheduler.queues.admit(req)
        scheduler.queues.make_ready(req) if i % 2 else scheduler.queues.prefill_locally(req)
    for _ in range(3):
        assert scheduler.plan() is not None
    held = [
        req.router
        for req in (*scheduler.queues.running.values(), *scheduler.queues.local)
        if req.row
    ]
    assert sorted(held) == ["a/1"] * (rows - 1) + ["b/1"]


def test_pages_that_rows_have_grown_into_are_given_back_for_who_has_fewer() -> None:
    """The youngest of the other's requests is preempted, and comes back only when it is fair."""
    book = PageBook(65, 2)
    config = EngineConfig(max_num_reqs=8, penalty_rows=1, max_prefill_tokens=64, growth_tokens=1)
    scheduler = DecodeScheduler(DecodeQueues(book, config), frozenset())
    scheduler.queues.shares.members = shares_of(2).members
    sampling = Sampling(max_tokens=60, ignore_eos=True)

    def req_of(name: str, peer: str) -> Req:
        return Req(name, 1, peer, [ord(name), 1], 2, sampling, 0.0)

    reqs = [req_of(name, "a/1") for name in "rstu"]
    for req in reqs:
        assert scheduler.queues.admit(req)
        scheduler.queues.make_ready(req)
    while book.num_available > 1:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.settle(plan.step, [Drawn((7,), finished=False)] * len(plan.decode))
    theirs, others = req_of("v", "b/1"), req_of("w", "a/1")
    assert not scheduler.queues.admit(theirs)
    assert [each.req_id for each in scheduler.queues.preempted] == ["u"]
    assert not scheduler.queues.admit(others)
    assert scheduler.queues.admit(theirs)
    assert not scheduler.queues.admit(reqs[-1]), "it would leave less than their share"
    scheduler.queues.finish(reqs[0])
    assert scheduler.queues.admit(reqs[-1])
    check_book(book, [each.hold for each in (*reqs[1:], theirs) if each.hold is not None])
