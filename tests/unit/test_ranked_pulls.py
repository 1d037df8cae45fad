"""The leader and the other ranks of a decode worker: one link, and pulls that land at all or none.

Real pools and transports; queues stand for the sockets between the ranks.
"""

import itertools
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.patience import HANG_S, until
from tests.support.pulls import FAILED, OK, RUNNING, WrappedPeer, WrappedPull
from tests.support.ranks import NUM_GROUPS, Ranks, content, memory, model_layout, share
from worker.api import Member
from worker.errors import Incompatible, Unreachable
from worker.transfer.base import Endpoint, Peer, Pull, PullState
from worker.transfer.inbound import YOUNG_S
from worker.transfer.ranked import (
    CancelPull,
    HangUp,
    LeaderPulls,
    OwnDialled,
    PullPages,
    RankAnswer,
    RankOrder,
    RankPulls,
)
from worker.transfer.shm import ShmTransport
from worker.transfer.sources import DialFailed, Link, LocalRank

OURS, THEIRS = 9, 12  # pages
PAIRS, GROUPS = [(2, 3), (3, 4), (7, 1)], range(NUM_GROUPS)


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

    def connect(self, endpoint: Endpoint, timeout_s: float) -> "GatedPeer":
        assert self.may_dial.wait(HANG_S)
        if self.dial_error is not None:
            raise self.dial_error
        return GatedPeer(self, self.transport.connect(endpoint, timeout_s))


class GatedPeer(WrappedPeer):
    def __init__(self, gate: Gate, peer: Peer) -> None:
        super().__init__(peer, lambda pull: GatedPull(gate, pull))
        self._gate, self._open = gate, True
        gate.num_open += 1

    def close(self) -> None:
        self._gate.num_open -= self._open
        self._open = False
        super().close()


class GatedPull(WrappedPull):
    """A pull behind a gate. It writes just before it ends, even if it has been cancelled."""

    def __init__(self, gate: Gate, pull: Pull) -> None:
        super().__init__(pull)
        self._gate, self._why = gate, ""

    def poll(self) -> PullState:
        if self.error is not None:
            return FAILED
        if self._gate.holds or self.inner.poll() is RUNNING:
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
        self.events = deque[tuple[RankPulls, OwnDialled]]()  # of the other ranks
        self.others = [self._other(rank) for rank in range(1, local_tp)]

    def _local(self, rank: int) -> LocalRank:
        return self.own.behind(self.gates[rank], rank)

    def _other(self, rank: int) -> RankPulls:
        pulls = RankPulls(
            self._local(rank), self._answer, lambda event: self.events.append((pulls, event))
        )
        return pulls

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
        while self.events:
            pulls, event = self.events.popleft()
            pulls.on(event)
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

    def until(self, happened: Callable[[], bool]) -> None:
        until(happened, act=lambda: (self.turn(), time.sleep(1e-4)))

    def link(self) -> Link:
        num_links = len(self.links)
        self.leader.dial(self.prefill.member)
        self.until(lambda: len(self.links) > num_links)
        return self.links[-1]

    def held(self, *ranks: int) -> tuple[Link, Pull]:
        """A new link, and a pull that does not end at these ranks."""
        link = self.link()
        for rank in ranks:
            self.gates[rank].holds = True
        return link, link.source.pull(PAIRS, GROUPS)

    def runs_on(self, pull: Pull) -> None:
        for _ in range(20):
            self.turn()
            assert pull.poll() is RUNNING
            assert pull.error is None

    def ended(self, pull: Pull) -> PullState:
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
        return not any(gate.num_open for gate in self.gates) and all(x.idle for x in self.others)

    def close(self) -> None:
        for link in self.links:
            link.source.close()
        self.until(lambda: self.idle)
        assert self.leader.idle
        self.prefill.close()
        self.own.close()


Make = Callable[..., Team]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes teams; at the end of a test that passed nothing is left of them."""
    teams: list[Team] = []
    num_failed = request.session.testsfailed

    def made(remote_tp: int = 2, local_tp: int = 4, num_kv_heads: int = 4) -> Team:
        teams.append(Team(remote_tp, local_tp, num_kv_heads))
        return teams[-1]

    yield made
    if request.session.testsfailed == num_failed:
        for team in teams:
            team.close()


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize(("remote_tp", "local_tp"), list(itertools.product([1, 2, 4], [2, 4])))
def test_a_pull_lands_at_all_ranks(remote_tp, local_tp, num_kv_heads, make: Make) -> None:
    team = make(remote_tp, local_tp, num_kv_heads)
    link = team.link()
    assert link.peer == team.prefill.member.peer
    assert link.bytes_per_s > 0
    num_bytes = 0
    for groups in (range(1, 3), range(3, NUM_GROUPS), range(1)):
        assert not team.landed(PAIRS)
        pull = link.source.pull(PAIRS, groups)
        assert team.ended(pull) is OK
        assert pull.error is None
        num_bytes += pull.num_bytes
    assert team.landed(PAIRS)
    assert num_bytes == len(PAIRS) * sum(pool.layout.page_bytes for pool in team.own.pools)


def test_there_is_no_link_before_the_last_rank_has_dialled(make: Make) -> None:
    for last in range(4):
        team = make()
        team.gates[last].may_dial.clear()
        team.leader.dial(team.prefill.member)
        others = [team.gates[rank] for rank in range(4) if rank != last]
        team.until(lambda others=others: all(gate.num_open for gate in others))
        for _ in range(20):
            team.turn()
        assert not team.links
        team.gates[last].may_dial.set()
        team.until(lambda team=team: bool(team.links))


@pytest.mark.parametrize("slowest", range(3))
def test_a_link_is_as_fast_as_its_slowest_rank(slowest, monkeypatch, make: Make) -> None:
    def dial(self: LocalRank, member: Member, answer: Callable[[Link], None]) -> None:
        rate = 2.0 if self.rank == slowest else 8.0
        answer(Link(member.peer, self.connect(member), rate))

    monkeypatch.setattr(LocalRank, "dial", dial)
    team = make(1, 4)
    assert team.link().bytes_per_s == 2.0


@pytest.mark.parametrize("broken", range(4))
@pytest.mark.parametrize("late", range(4))
def test_a_pull_that_fails_at_a_rank_runs_until_all_have_ended(broken, late, make: Make) -> None:
    """Until then a rank that is late may write into its pages: they must not be given away."""
    team = make()
    link, pull = team.held(*range(4))  # so that the cancellation finds all of them running
    team.turn()
    assert pull.poll() is RUNNING
    team.gates[broken].breaks, team.gates[broken].holds = "the card is gone", False
    team.runs_on(pull)
    assert [gate.num_cancelled for gate in team.gates] == [rank != broken for rank in range(4)]
    for rank, gate in enumerate(team.gates):
        gate.holds = rank == late != broken
    if late != broken:
        team.runs_on(pull)
    team.gates[late].holds = False
    assert team.ended(pull) is FAILED
    assert pull.error == f"rank {broken}: " * (broken > 0) + "the card is gone"
    assert sum(isinstance(order, CancelPull) for order in team.orders) == 1
    team.gates[broken].breaks = ""
    again = link.source.pull(PAIRS, GROUPS)
    assert team.ended(again) is OK
    assert team.landed(PAIRS)


@pytest.mark.parametrize("late", range(3))
def test_a_cancelled_pull_ends_with_its_last_part(late: int, make: Make) -> None:
    team = make()
    _, pull = team.held(late)
    team.turn()
    if late == 0:  # on a busy machine a pull takes several turns
        team.until(lambda: all(each.poll_after_s(0.0) == math.inf for each in team.others))
    assert pull.poll() is RUNNING
    for _ in range(3):
        pull.cancel()
    team.runs_on(pull)
    team.gates[late].holds = False
    assert team.ended(pull) is FAILED
    assert pull.error == "cancelled"
    assert sum(isinstance(order, CancelPull) for order in team.orders) == 1


def test_cancelling_a_pull_that_is_over_does_nothing(make: Make) -> None:
    team = make(1, 2)
    pull = team.link().source.pull(PAIRS, GROUPS)
    assert team.ended(pull) is OK
    pull.cancel()
    assert (pull.poll(), pull.error) == (OK, None)
    assert not any(isinstance(order, CancelPull) for order in team.orders)


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("kind", [Incompatible, Unreachable])
def test_a_rank_that_cannot_dial_ends_the_dialling_of_all(broken, kind, make: Make) -> None:
    """Once, with the error's kind, which says whether to dial again; nothing stays open."""
    team = make()
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
    assert team.ended(team.link().source.pull(PAIRS, GROUPS)) is OK


def test_a_peer_whose_ranks_cannot_share_the_heads_is_incompatible_at_all(make: Make) -> None:
    team = make(4, 2)
    three = msgspec.structs.replace(
        team.prefill.member, endpoints=team.prefill.member.endpoints[:3]
    )
    team.leader.dial(three)
    team.until(lambda: bool(team.failures))
    assert isinstance(team.failures[0].error, Incompatible)
    team.until(lambda: team.idle)
    assert len(team.failures) == 1


@pytest.mark.parametrize("late", range(4))
def test_hanging_up_cancels_pulls_and_closes_when_they_are_over(late: int, make: Make) -> None:
    """Meanwhile the same peer may be dialled again, and pulled from."""
    team = make()
    gate = team.gates[late]
    first, pull = team.held(late)
    team.turn()
    num_open = [each.num_open for each in team.gates]
    first.source.close()
    first.source.close()
    team.runs_on(pull)
    wanted = [num_open[rank] * (rank == late) for rank in range(4)]
    assert [each.num_open for each in team.gates] == wanted
    gate.holds = False
    second = team.link()
    gate.holds = True
    other = second.source.pull([(5, 6)], GROUPS)
    team.turn()
    gate.holds = False
    assert team.ended(pull) is FAILED
    assert team.ended(other) is OK
    assert [each.num_open for each in team.gates] == num_open
    assert sum(isinstance(order, HangUp) for order in team.orders) == 1
    with pytest.raises(AssertionError, match="closed link"):
        first.source.pull(PAIRS, GROUPS)


def test_how_long_a_rank_may_sleep(make: Make) -> None:
    team = make(1, 2)
    rank, gate = team.others[0], team.gates[1]
    now = time.monotonic()
    assert rank.poll_after_s(now) == math.inf
    gate.may_dial.clear()
    team.leader.dial(team.prefill.member)
    team.turn()
    assert rank.poll_after_s(now) == math.inf, "the end of dialling is an event"
    gate.may_dial.set()
    team.until(lambda: bool(team.links))
    assert rank.poll_after_s(now) == math.inf
    gate.holds = True
    pull = team.links[0].source.pull(PAIRS, GROUPS)
    team.turn()
    assert rank.poll_after_s(now) == 0
    assert YOUNG_S / 8 < rank.poll_after_s(now + 60) < 1
    gate.holds = False
    assert team.ended(pull) is OK


def test_many_pulls_in_any_order_of_turns(make: Make) -> None:
    """Ranks are late, break and are cancelled at random: OK is everywhere, and so is an end."""
    team = make()
    link, rng = team.link(), random.Random(3)
    running: dict[int, tuple[Pull, int]] = {}  # by the number of its page
    given_away: set[int] = set()  # pages that hold zeros since the pull into them was over
    num_ok = num_failed = 0
    for _ in range(1500):
        match rng.randrange(8):
            case 0 | 1 if free := sorted(set(range(1, OURS)) - set(running)):
                page = rng.choice(free)
                remote = rng.randrange(1, THEIRS)
                running[page] = link.source.pull([(page, remote)], GROUPS), remote
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
