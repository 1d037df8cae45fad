"""The leader and the other ranks of a decode worker: one link, and pulls that land at all or none.

Real pools and transports; queues stand for the sockets between the ranks.
"""

from __future__ import annotations

import itertools
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tests.support.patience import HANG_S
from tests.support.ranks import NUM_GROUPS, Ranks, content, memory, model_layout, share
from worker.api import Member
from worker.errors import Incompatible, Unreachable
from worker.transfer.base import Endpoint, Peer, Pull, PullState, Run
from worker.transfer.inbound import YOUNG_S
from worker.transfer.peers import DialFailed, Link
from worker.transfer.rank import DIAL_POLL_S, RankPulls
from worker.transfer.ranked import (
    CancelPull,
    DialPeer,
    HangUp,
    LeaderPulls,
    OwnDialled,
    PullPages,
    RankAnswer,
    RankOrder,
)
from worker.transfer.shm import ShmTransport
from worker.transfer.sources import LocalRank

OURS, THEIRS = 9, 12  # pages
PAIRS, GROUPS = [(2, 3), (3, 4), (7, 1)], range(NUM_GROUPS)
OK, FAILED, RUNNING = PullState.OK, PullState.FAILED, PullState.RUNNING


class Gate:
    """One rank's transport: dialling waits or fails, pulls stand still or break, as tests say."""

    def __init__(self, transport: ShmTransport) -> None:
        self.transport = transport
        self.may_dial = threading.Event()
        self.may_dial.set()
        self.dial_error: Exception | None = None
        self.holds = False  # no pull ends, a cancelled one neither
        self.breaks = ""  # pulls fail, and why
        self.num_open = 0
        self.num_cancelled = 0

    def connect(self, endpoint: Endpoint, timeout_s: float) -> GatedPeer:
        assert self.may_dial.wait(HANG_S)
        if self.dial_error is not None:
            raise self.dial_error
        return GatedPeer(self, self.transport.connect(endpoint, timeout_s))


class GatedPeer:
    """A peer behind a gate."""

    def __init__(self, gate: Gate, peer: Peer) -> None:
        self._gate, self._peer = gate, peer
        self._open = True
        gate.num_open += 1

    def pull(self, runs: Sequence[Run]) -> GatedPull:
        assert self._open
        return GatedPull(self._gate, self._peer.pull(runs))

    def close(self) -> None:
        self._gate.num_open -= self._open
        self._open = False
        self._peer.close()


class GatedPull:
    """A pull behind a gate. It writes just before it ends, even if it has been cancelled."""

    def __init__(self, gate: Gate, pull: Pull) -> None:
        self.num_bytes = pull.num_bytes
        self.error: str | None = None
        self._gate, self._pull = gate, pull
        self._why = ""

    def poll(self) -> PullState:
        if self.error is not None:
            return FAILED
        if self._gate.holds or self._pull.poll() is RUNNING:
            return RUNNING
        self.error = self._why or self._gate.breaks or None
        return OK if self.error is None else FAILED

    def cancel(self) -> None:
        self._gate.num_cancelled += not self._why
        self._why = "cancelled"


class Team:
    """The ranks of a decode worker, linked to a prefill worker."""

    def __init__(self, remote_tp: int, local_tp: int, num_kv_heads: int = 4) -> None:
        layout = model_layout(num_kv_heads)
        self.theirs, self.before = content(layout, THEIRS, 1), content(layout, OURS, 2)
        self.prefill = Ranks(layout, remote_tp, self.theirs, "prefill-0")
        self.own = Ranks(layout, local_tp, self.before)
        self.gates = [Gate(transport) for transport in self.own.transports]
        self.orders: list[RankOrder] = []  # all that the leader has told
        self.inboxes = [deque[bytes]() for _ in self.gates]
        self.answers = deque[bytes]()
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links: list[Link] = []
        self.failures: list[DialFailed] = []
        self.leader = LeaderPulls(self._local(0), self._tell, self.posted.put)
        self.others = [RankPulls(self._local(rank), self._answer) for rank in range(1, local_tp)]

    def _local(self, rank: int) -> LocalRank:
        transport = cast("Any", self.gates[rank])
        return LocalRank(transport, self.own.layout, OURS, 1.0, self.own.tp_size, rank)

    def _tell(self, order: RankOrder) -> None:
        self.orders.append(order)
        for inbox in self.inboxes[1:]:
            inbox.append(msgspec.msgpack.encode(order))

    def _answer(self, answer: RankAnswer) -> None:
        self.answers.append(msgspec.msgpack.encode(answer))

    def turn(self, ranks: Iterable[int] | None = None) -> None:
        """One turn of the loops of some ranks, and then of the leader's."""
        for rank in range(1, self.own.tp_size) if ranks is None else ranks:
            pulls, inbox = self.others[rank - 1], self.inboxes[rank]
            while inbox:
                pulls.on(msgspec.msgpack.decode(inbox.popleft(), type=RankOrder))
            pulls.poll()
        while self.answers:
            self.leader.on(msgspec.msgpack.decode(self.answers.popleft(), type=RankAnswer))
        while not self.posted.empty():
            match self.posted.get():
                case OwnDialled() as event:
                    self.leader.on(event)
                case Link() as link:
                    self.links.append(link)
                case DialFailed() as failed:
                    self.failures.append(failed)

    def until(self, happened: Callable[[], bool], ranks: Iterable[int] | None = None) -> None:
        """Turns until something has happened."""
        limit = time.monotonic() + HANG_S
        while not happened():
            assert time.monotonic() < limit, "hangs"
            self.turn(ranks)
            time.sleep(1e-4)

    def link(self) -> Link:
        """A new link."""
        num_links = len(self.links)
        self.leader.dial(self.prefill.member)
        self.until(lambda: len(self.links) > num_links)
        return self.links[-1]

    def ended(self, pull: Pull) -> PullState:
        """Turns until a pull is over."""
        self.until(lambda: pull.poll() is not RUNNING)
        return pull.poll()

    def landed(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether the pages have come at all ranks, and no other page has changed but page 0."""
        here, there = (list(pages) for pages in zip(*pairs, strict=True))
        for rank, pool in enumerate(self.own.pools):
            parts = (share(each, self.own.tp_size, rank) for each in (self.before, self.theirs))
            for held, right, new in zip(memory(pool), *parts, strict=True):
                right[:, here] = new[:, there]
                if not np.array_equal(held[:, 1:], right[:, 1:]):
                    return False
        return True

    @property
    def idle(self) -> bool:
        """Nothing is open or under way at any rank."""
        return not any(gate.num_open for gate in self.gates) and not any(
            each.num_links or each.num_pulls for each in self.others
        )

    def close(self) -> None:
        """At the end nothing may be left."""
        for link in self.links:
            link.close()
        self.until(lambda: self.idle)
        assert not self.leader._pulls
        assert not self.leader._dials
        self.prefill.close()
        self.own.close()


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize(("remote_tp", "local_tp"), list(itertools.product([1, 2, 4], repeat=2)))
def test_a_pull_lands_at_all_ranks(remote_tp: int, local_tp: int, num_kv_heads: int) -> None:
    team = Team(remote_tp, local_tp, num_kv_heads)
    link = team.link()
    assert link.peer == team.prefill.member.peer
    assert link.bytes_per_s > 0
    num_bytes = 0
    for groups in (range(1, 3), range(3, NUM_GROUPS), range(1)):
        assert not team.landed(PAIRS)
        pull = link.pull(PAIRS, groups)
        assert team.ended(pull) is OK
        assert pull.error is None
        num_bytes += pull.num_bytes
    assert team.landed(PAIRS)
    assert num_bytes == len(PAIRS) * sum(pool.layout.page_bytes for pool in team.own.pools)
    team.close()


def test_there_is_no_link_before_the_last_rank_has_dialled() -> None:
    for last in range(4):
        team = Team(2, 4)
        team.gates[last].may_dial.clear()
        team.leader.dial(team.prefill.member)
        others = [team.gates[rank] for rank in range(4) if rank != last]
        team.until(lambda others=others: all(gate.num_open for gate in others))
        for _ in range(20):
            team.turn()
        assert not team.links
        team.gates[last].may_dial.set()
        team.until(lambda team=team: bool(team.links))
        team.close()


@pytest.mark.parametrize("slowest", range(3))
def test_a_link_is_as_fast_as_its_slowest_rank(
    slowest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dial(self: LocalRank, member: Member, answer: Callable[[object, float], None]) -> None:
        answer(self.connect(member), 0.5 if self.rank == slowest else 0.125)

    monkeypatch.setattr(LocalRank, "dial", dial)
    team = Team(1, 4)
    assert team.link().bytes_per_s == 2 * team.own.layout.page_bytes
    team.close()


@pytest.mark.parametrize("late", range(4))
def test_a_pull_is_ok_when_it_is_at_all_ranks(late: int) -> None:
    team = Team(2, 4)
    link = team.link()
    team.gates[late].holds = True
    pull = link.pull(PAIRS, GROUPS)
    for _ in range(20):
        team.turn()
        assert pull.poll() is RUNNING
    assert sum(each.num_pulls for each in team.others) == (late > 0)
    team.gates[late].holds = False
    assert team.ended(pull) is OK
    assert team.landed(PAIRS)
    team.close()


def test_a_pull_waits_for_ranks_that_do_not_turn() -> None:
    team = Team(2, 4)
    pull = team.link().pull(PAIRS, GROUPS)
    for ranks in ((), (1,), (1, 3)):
        for _ in range(20):
            team.turn(ranks)
            assert pull.poll() is RUNNING
    assert team.ended(pull) is OK
    team.close()


@pytest.mark.parametrize("broken", range(4))
@pytest.mark.parametrize("late", range(4))
def test_a_pull_that_fails_at_a_rank_runs_until_all_have_ended(broken: int, late: int) -> None:
    """Until then a rank that is late may write into its pages: they must not be given away."""
    team = Team(2, 4)
    link = team.link()
    for gate in team.gates:
        gate.holds = True  # so that the cancellation finds all of them running
    pull = link.pull(PAIRS, GROUPS)
    team.turn()
    assert pull.poll() is RUNNING
    team.gates[broken].breaks, team.gates[broken].holds = "the card is gone", False
    for _ in range(20):
        team.turn()
        assert pull.poll() is RUNNING
        assert pull.error is None
    assert [gate.num_cancelled for gate in team.gates] == [rank != broken for rank in range(4)]
    for rank, gate in enumerate(team.gates):
        gate.holds = rank == late != broken
    if late != broken:
        for _ in range(20):
            team.turn()
            assert pull.poll() is RUNNING
    team.gates[late].holds = False
    assert team.ended(pull) is FAILED
    assert pull.error == f"rank {broken}: " * (broken > 0) + "the card is gone"
    assert sum(isinstance(order, CancelPull) for order in team.orders) == 1
    team.gates[broken].breaks = ""
    again = link.pull(PAIRS, GROUPS)
    assert team.ended(again) is OK
    assert team.landed(PAIRS)
    team.close()


@pytest.mark.parametrize("late", range(3))
def test_a_cancelled_pull_ends_with_its_last_part(late: int) -> None:
    team = Team(2, 4)
    link = team.link()
    team.gates[late].holds = True
    pull = link.pull(PAIRS, GROUPS)
    team.turn()
    if late == 0:  # on a busy machine a pull takes several turns
        team.until(lambda: not any(each.num_pulls for each in team.others))
    assert pull.poll() is RUNNING
    for _ in range(3):
        pull.cancel()
    for _ in range(20):
        team.turn()
        assert pull.poll() is RUNNING
    team.gates[late].holds = False
    assert team.ended(pull) is FAILED
    assert pull.error == "cancelled"
    num_told = sum(isinstance(order, CancelPull) for order in team.orders)
    assert num_told == (late > 0), "to those whose parts ran, once"
    team.close()


def test_cancelling_a_pull_that_is_over_does_nothing() -> None:
    team = Team(1, 2)
    pull = team.link().pull(PAIRS, GROUPS)
    assert team.ended(pull) is OK
    pull.cancel()
    assert (pull.poll(), pull.error) == (OK, None)
    assert not any(isinstance(order, CancelPull) for order in team.orders)
    team.close()


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("kind", [Incompatible, Unreachable])
def test_a_rank_that_cannot_dial_ends_the_dialling_of_all(
    broken: int, kind: type[Incompatible | Unreachable]
) -> None:
    """Once, with the error's kind, which says whether to dial again; nothing stays open."""
    team = Team(2, 4)
    team.gates[broken].dial_error = kind("no way")
    late = team.gates[3 - broken]  # of another rank: it dials when the link has failed already
    late.may_dial.clear()
    team.leader.dial(team.prefill.member)
    team.until(lambda: bool(team.failures))
    late.may_dial.set()
    team.until(
        lambda: team.idle and not any(t.name.startswith("dial") for t in threading.enumerate())
    )
    for _ in range(3):
        team.turn()
    (failed,) = team.failures
    assert not team.links
    assert type(failed.error) is kind
    assert failed.peer == team.prefill.member.peer
    assert str(failed.error) == f"rank {broken}: " * (broken > 0) + "no way"
    team.gates[broken].dial_error = None
    assert team.ended(team.link().pull(PAIRS, GROUPS)) is OK
    team.close()


def test_a_peer_whose_ranks_cannot_share_the_heads_is_incompatible_at_all() -> None:
    team = Team(4, 2)
    three = msgspec.structs.replace(
        team.prefill.member, endpoints=team.prefill.member.endpoints[:3]
    )
    team.leader.dial(three)
    team.until(lambda: bool(team.failures))
    assert isinstance(team.failures[0].error, Incompatible)
    team.until(lambda: team.idle)
    assert len(team.failures) == 1
    team.close()


@pytest.mark.parametrize("late", range(1, 4))
def test_hanging_up_cancels_pulls_and_closes_when_they_are_over(late: int) -> None:
    """Meanwhile the same peer may be dialled again, and pulled from."""
    team = Team(2, 4)
    first = team.link()
    gate = team.gates[late]
    gate.holds = True
    pull = first.pull(PAIRS, GROUPS)
    team.turn()
    num_open = [each.num_open for each in team.gates]
    first.close()
    first.close()
    for _ in range(20):
        team.turn()
        assert pull.poll() is RUNNING
    wanted = [num_open[rank] * (rank == late) for rank in range(4)]
    assert [each.num_open for each in team.gates] == wanted
    gate.holds = False
    second = team.link()
    gate.holds = True
    other = second.pull([(5, 6)], GROUPS)
    team.turn()
    gate.holds = False
    assert team.ended(pull) is FAILED
    assert team.ended(other) is OK
    assert [each.num_open for each in team.gates] == num_open
    assert sum(isinstance(order, HangUp) for order in team.orders) == 1
    with pytest.raises(AssertionError, match="closed link"):
        first.pull(PAIRS, GROUPS)
    team.close()


def test_how_long_a_rank_may_sleep() -> None:
    team = Team(1, 2)
    rank, gate = team.others[0], team.gates[1]
    now = time.monotonic()
    assert rank.poll_after_s(now) == math.inf
    gate.may_dial.clear()
    team.leader.dial(team.prefill.member)
    team.turn()
    assert rank.poll_after_s(now) == DIAL_POLL_S
    gate.may_dial.set()
    team.until(lambda: bool(team.links))
    assert rank.poll_after_s(now) == math.inf
    gate.holds = True
    pull = team.links[0].pull(PAIRS, GROUPS)
    team.turn()
    assert rank.poll_after_s(now) == 0
    assert YOUNG_S / 8 < rank.poll_after_s(now + 60) < 1
    gate.holds = False
    assert team.ended(pull) is OK
    team.close()


def test_one_rank_tells_nobody_of_its_pulls() -> None:
    team = Team(4, 1)
    assert team.ended(team.link().pull(PAIRS, GROUPS)) is OK
    assert team.landed(PAIRS)
    assert all(isinstance(order, DialPeer) for order in team.orders)
    team.close()


def test_many_pulls_in_any_order_of_turns() -> None:
    """Ranks are late, break and are cancelled at random: OK is everywhere, and so is an end."""
    team = Team(2, 4)
    link, rng = team.link(), random.Random(3)
    running: dict[int, tuple[Pull, int]] = {}  # by the number of its page
    given_away: set[int] = set()  # pages that hold zeros since the pull into them was over
    num_ok = num_failed = 0
    for _ in range(1500):
        match rng.randrange(8):
            case 0 | 1 if free := sorted(set(range(1, OURS)) - set(running)):
                page = rng.choice(free)
                remote = rng.randrange(1, THEIRS)
                running[page] = link.pull([(page, remote)], GROUPS), remote
            case 2 if running:
                running[rng.choice(sorted(running))][0].cancel()
            case 3:
                gate = rng.choice(team.gates)
                gate.holds = rng.random() < 0.5
            case 4:
                gate = rng.choice(team.gates)
                gate.breaks = "broken" * (rng.random() < 0.2)
            case _:
                team.turn(rng.sample(range(1, 4), rng.randrange(4)))
        for page, (pull, remote) in list(running.items()):
            if (state := pull.poll()) is RUNNING:
                continue
            del running[page]
            num_ok, num_failed = num_ok + (state is OK), num_failed + (state is FAILED)
            assert (pull.error is None) == (state is OK)
            for rank, pool in enumerate(team.own.pools):
                for held, new in zip(memory(pool), share(team.theirs, 4, rank), strict=True):
                    if state is OK:
                        assert np.array_equal(held[:, page], new[:, remote])
                    held[:, page] = 0
            given_away.add(page)
        for pool in team.own.pools:
            for held in memory(pool):
                assert not held[:, sorted(given_away - set(running))].any(), "written too late"
    assert min(num_ok, num_failed) > 20
    for gate in team.gates:
        gate.holds, gate.breaks = False, ""
    team.until(lambda: all(pull.poll() is not RUNNING for pull, _ in running.values()))
    asked = [order.pull for order in team.orders if isinstance(order, PullPages)]
    assert len(asked) == len(set(asked)) == num_ok + num_failed + len(running)
    team.close()
