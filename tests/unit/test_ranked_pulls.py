"""The leader and the other ranks of a decode worker: one link, and pulls that land at all or none.

Real pools and transports; queues stand for the sockets between the ranks.
"""

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.patience import HANG_S, until
from tests.support.pulls import FAILED, OK, RUNNING, WrappedPeer, WrappedPull
from tests.support.ranks import NUM_GROUPS, Ranks, content, memory, model_layout, share
from worker.errors import Incompatible, Unreachable
from worker.transfer.base import Endpoint, Peer, Pull, PullState
from worker.transfer.ranked import (
    LeaderPulls,
    OwnDialled,
    PullPages,
    RankAnswer,
    RankOrder,
    RankPulls,
)
from worker.transfer.shm import ShmTransport
from worker.transfer.sources import DialFailed, Link

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

    def connect(self, endpoint: Endpoint, timeout_s: float) -> "GatedPeer":
        assert self.may_dial.wait(HANG_S)
        if self.dial_error is not None and self.num_open:  # one rank of the peer is reached
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
        self._why = "cancelled"


class Team:
    """The ranks of a decode worker, linked to a prefill worker."""

    def __init__(self, remote_tp: int, local_tp: int) -> None:
        layout = model_layout(4)
        self.theirs = content(layout, THEIRS, 1)
        self.prefill = Ranks(layout, remote_tp, self.theirs, "prefill-0")
        self.own = Ranks(layout, local_tp, content(layout, OURS, 2))
        self.gates = [Gate(transport) for transport in self.own.transports]
        self.orders: list[RankOrder] = []  # all that the leader has told
        self.inboxes = [deque[bytes]() for _ in self.gates]
        self.answers = deque[bytes]()
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links: list[Link] = []
        self.failures: list[DialFailed] = []
        self.leader = LeaderPulls(self.own.behind(self.gates[0]), self._tell, self.posted.put)
        self.events = deque[tuple[RankPulls, OwnDialled]]()  # of the other ranks
        self.others = [self._other(rank) for rank in range(1, local_tp)]

    def _other(self, rank: int) -> RankPulls:
        pulls = RankPulls(
            self.own.behind(self.gates[rank], rank),
            self._answer,
            lambda event: self.events.append((pulls, event)),
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

    def ended(self, pull: Pull) -> PullState:
        self.until(lambda: pull.poll() is not RUNNING)
        return pull.poll()

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


@pytest.fixture(params=[(2, 4), (4, 2)], ids=str)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Nothing is left of it at the end."""
    made = Team(*request.param)
    yield made
    made.close()


@pytest.mark.parametrize("broken", range(2))
@pytest.mark.parametrize("kind", [Incompatible, Unreachable])
@pytest.mark.parametrize("team", [(4, 2)], ids=str, indirect=True)
def test_a_rank_that_cannot_dial_ends_the_dialling_of_all(broken, kind, team: Team) -> None:
    """Once, with the error's kind, which says whether to dial again; nothing stays open."""
    team.gates[broken].dial_error = kind("no way")
    late = team.gates[1 - broken]  # of another rank: it dials when the link has failed already
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


def test_many_pulls_in_any_order_of_turns(team: Team) -> None:
    """Ranks are late, break and are cancelled at random: OK is everywhere, and so is an end."""
    link, rng, size = team.link(), random.Random(3), team.own.tp_size
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
                team.turn(rng.sample(range(1, size), rng.randrange(size)))
        for page, (pull, remote) in list(running.items()):
            if (state := pull.poll()) is RUNNING:
                continue
            del running[page]
            num_ok, num_failed = num_ok + (state is OK), num_failed + (state is FAILED)
            assert (pull.error is None) == (state is OK)
            for rank, pool in enumerate(team.own.pools):
                for held, new in zip(memory(pool), share(team.theirs, size, rank), strict=True):
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
