"""What the router believes of members' load between two Pongs."""

import pytest

from router.dispatch.members import Members
from router.observe.board import Change
from worker.api import Member, Role, WorkerStats

DECODE = Member("d", "decode", "1", "tcp://x:1")
PREFILL = Member("p", "prefill", "1", "tcp://x:2")
ROUTER = Member("r", "router", "1", "http://x:3")
FREE = WorkerStats(max_num_reqs=2, num_free_pages=5)


@pytest.fixture
def members() -> Members:
    found = Members()
    assert found.update([DECODE, PREFILL, ROUTER]) == ([DECODE, PREFILL], [])
    return found


def test_successor_of_the_same_name_is_another_member(members: Members) -> None:
    again, gone = Member("d", "decode", "2", "tcp://x:4"), members.get("d/1")
    assert members.update([again, PREFILL]) == ([again], [gone])
    assert members.get("d/1") is None


def test_who_drains_is_known_to_even_after_its_link_broke(members: Members) -> None:
    members.pong("d/1", WorkerStats(max_num_reqs=2, draining=True))
    members.lost("d/1")
    _, (gone, _) = members.update([])
    assert gone.stats == WorkerStats(draining=True)


def test_member_counts_from_its_first_pong_until_it_is_lost(members: Members) -> None:
    assert not members.live("decode")
    members.pong("d/1", None)
    assert [known.peer for known in members.open_decode(0.0)] == ["d/1"]
    members.lost("d/1")
    assert not members.open_decode(0.0)
    members.pong("unknown/1", FREE)
    assert members.get("unknown/1") is None
    assert not members.open_decode(0.0)


def change(name: str, role: Role, incarnation: str, state: str = "lost") -> Change:
    return Change(name, role, incarnation, state, "", 1.0)


def test_a_worker_dies_once_and_only_while_this_router_is_there(members: Members) -> None:
    before = change("d", "decode", "0"), change("r", "router", "1", "ready")
    assert members.note_changes(()) == []
    assert members.note_changes(before) == []
    died = change("d", "decode", "1")
    assert members.note_changes((*before, died)) == [died]
    again = change("d", "decode", "2", "ready"), change("d", "decode", "2")
    others = change("r2", "router", "1"), change("p", "prefill", "1", "drained")
    assert members.note_changes((*before[1:], died, *again, *others)) == [again[1]]
    assert members.note_changes((died, *again, *others)) == []


def test_own_requests_are_counted_on_top_of_what_a_pong_said(members: Members) -> None:
    members.pong("d/1", WorkerStats(num_running=3, max_num_reqs=8))
    members.sent("d/1", "p/1", 30, 0.0)
    known, prefill = members.get("d/1"), members.get("p/1")
    assert known is not None
    assert prefill is not None
    assert (known.num_requests, prefill.num_queued_tokens) == (4, 30)
    members.pong("d/1", WorkerStats(num_running=4, max_num_reqs=8))
    members.pong("p/1", WorkerStats(num_queued_tokens=10))
    assert (known.num_requests, prefill.num_queued_tokens) == (4, 10)
    members.left("d/1", allows_one=True)
    assert known.num_requests == 3


def test_a_prompt_waits_nowhere_once_it_is_computed(members: Members) -> None:
    members.pong("p/1", WorkerStats(num_queued_tokens=10))
    first, other = (members.sent("d/1", "p/1", num, 0.0) for num in (30, 5))
    prefill = members.get("p/1")
    assert first is not None
    assert other is not None
    assert prefill is not None
    first.computed()
    assert prefill.num_queued_tokens == 15
    members.pong("p/1", WorkerStats(num_queued_tokens=3))  # which speaks of the other one, too
    other.computed()
    assert prefill.num_queued_tokens == 3


def test_worker_that_refused_is_left_alone_until_it_shows_room(members: Members) -> None:
    members.pong("d/1", FREE)
    members.refused("d/1", until=10.0)
    assert not members.open_decode(9.0)
    assert members.open_decode(10.0)
    members.pong("d/1", WorkerStats(num_running=1, max_num_reqs=2, num_free_pages=5))
    assert members.open_decode(9.0)
    members.sent("d/1", None, 1, 9.0)
    assert not members.open_decode(9.0)
    members.left("d/1", allows_one=True)
    assert members.open_decode(9.0)
