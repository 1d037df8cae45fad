"""Pulls of all ranks of a decode worker, led by rank 0. Workers of one rank do without.

    leader -> ranks    DialPeer, PullPages, CancelPull, HangUp
    rank -> leader     PeerDialled, PullEnded

Every rank, the leader's own among them, pulls its own heads. The leader alone talks to prefill
workers, and holds the one lease. A link is there when all ranks have dialled. A pull is OK when it
is OK at all ranks: only then may a step read its pages. A pull that has failed at one rank is
cancelled at all, and runs until all have reported its end: until then a rank may write to pages.

Links and pulls have numbers: while the pulls of a lost peer end, it may be dialled again.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from worker.api import Error, Member, Message
from worker.errors import Incompatible, Unreachable
from worker.transfer.base import Pull, PullState
from worker.transfer.inbound import poll_after_s
from worker.transfer.layout import Pages
from worker.transfer.sources import DialFailed, Link, LocalRank, PageSource, PartedPull

log = logging.getLogger("kvlane.rank")


class DialPeer(Message, frozen=True):
    """Connect to the ranks of `member` that hold your heads; answer with PeerDialled."""

    link: int
    member: Member


class PullPages(Message, frozen=True):
    """Begin to pull over a link that has been dialled; answer with PullEnded."""

    pull: int
    link: int
    pairs: tuple[tuple[int, int], ...]  # (local page, remote page)
    first_group: int
    num_groups: int
    # rank.py holds this until so many steps have ended. The leader had settled as many when it
    # chose the local pages; later steps do not use them.
    after_steps: int = 0
    states: tuple[tuple[int, int], ...] = ()  # slots, as `pairs`


class CancelPull(Message, frozen=True):
    """End a pull soon, if it still runs; its PullEnded comes as ever."""

    pull: int


class HangUp(Message, frozen=True):
    """Close a link, or give up dialling; pulls over it are cancelled and end first."""

    link: int


class PeerDialled(Message, frozen=True):
    """A rank can pull over the link, or cannot."""

    rank: int
    link: int
    bytes_per_s: float = 0.0  # of the whole model's KV, if every rank were as fast
    error: Error | None = None


class PullEnded(Message, frozen=True):
    """A rank's part of a pull is over: not one byte of it is written any more."""

    rank: int
    pull: int
    num_bytes: int
    error: str = ""  # "": all bytes are there


RankOrder = DialPeer | PullPages | CancelPull | HangUp
RankAnswer = PeerDialled | PullEnded


class OwnDialled(NamedTuple):
    """Event: how this rank's own dialling has ended."""

    link: int
    result: Link | DialFailed


class _RunningPull(NamedTuple):
    pull: Pull
    link: int
    began_at: float


class RankPulls:
    """One rank's links and pulls, by the leader's orders. Belongs to the rank's loop.

    tell: sends an answer to the leader. post: hands the loop an event for `on`, from any thread.
    """

    def __init__(
        self, own: LocalRank, tell: Callable[[RankAnswer], None], post: Callable[[OwnDialled], None]
    ) -> None:
        self._own = own
        self._tell = tell
        self._post = post
        self._links: dict[int, PageSource | None] = {}  # by number; None: it is being dialled
        self._pulls: dict[int, _RunningPull] = {}  # by number
        self._leaving: set[int] = set()  # links to close once no pull uses them

    @property
    def idle(self) -> bool:
        """Whether no link is open or in the making, and no pull runs."""
        return not (self._links or self._pulls)

    def poll_after_s(self, now: float) -> float:
        """Say how long the loop may sleep before it has to call `poll`; inf: no pull runs."""
        return poll_after_s([running.began_at for running in self._pulls.values()], now)

    def on(self, order: RankOrder | OwnDialled) -> None:
        """Do an order of the leader's, or take the end of a dialling."""
        match order:
            case DialPeer(link, member):
                self._links[link] = None
                self._own.dial(member, lambda result: self._post(OwnDialled(link, result)))
            case OwnDialled(link, result):
                self._dialled(link, result)
            case PullPages(number, link, pairs, first_group, num_groups, _, states):
                source = self._links[link]
                assert source is not None
                pull = source.pull(pairs, range(first_group, first_group + num_groups), states)
                self._pulls[number] = _RunningPull(pull, link, time.monotonic())
            case CancelPull(number):
                if (running := self._pulls.get(number)) is not None:
                    running.pull.cancel()
            case HangUp(link):
                self._leaving.add(link)
                for running in self._pulls.values():
                    if running.link == link:
                        running.pull.cancel()
                self._close_unused()

    def poll(self) -> None:
        for number in list(self._pulls):
            self.poll_pull(number)

    def poll_pull(self, number: int) -> None:
        """Move a pull on if it runs, and report its end."""
        if (running := self._pulls.get(number)) is None:
            return
        pull = running.pull
        state = pull.poll()
        if state is not PullState.RUNNING:
            del self._pulls[number]
            error = (pull.error or "pull failed") if state is PullState.FAILED else ""
            self._tell(PullEnded(self._own.rank, number, pull.num_bytes, error))
            self._close_unused()

    def close(self) -> None:
        """Close all links; blocks until pulls are over, and reports nothing."""
        for source in self._links.values():
            if source is not None:
                source.close()
        self._links.clear()
        self._pulls.clear()
        self._own.end()

    def _dialled(self, link: int, result: Link | DialFailed) -> None:
        wanted = link in self._links  # the leader has not hung up meanwhile
        match result:
            case Link() if wanted:
                self._links[link] = result.source
                self._tell(PeerDialled(self._own.rank, link, result.bytes_per_s))
            case Link():
                result.source.close()
            case DialFailed(_, error) if wanted:
                log.debug("link %d: %s", link, error)
                del self._links[link]
                why = Error(error.code, str(error))
                self._tell(PeerDialled(self._own.rank, link, error=why))

    def transport(self, link: int) -> str:
        """Name and kind of the transport of an open link; "" if it is not open."""
        source = self._links.get(link)
        return source.transport if source is not None else ""

    def _close_unused(self) -> None:
        for link in self._leaving - {running.link for running in self._pulls.values()}:
            self._leaving.discard(link)
            if (source := self._links.pop(link, None)) is not None:
                source.close()


@dataclass(slots=True)
class _Dial:
    member: Member
    waiting: set[int]  # ranks that have not answered
    bytes_per_s: float = math.inf  # of the slowest rank so far: a page needs all of its shares


class LeaderPulls:
    """Links and pulls of all ranks of this worker, ordered by rank 0. Belongs to its loop.

    own: the leader's rank. tell: sends an order to all other ranks, in order. post: hands the loop
    an event: OwnDialled for `on`, the others as `dial` ends. num_settled: steps of the leader.
    """

    def __init__(
        self,
        own: LocalRank,
        tell: Callable[[RankOrder], None],
        post: Callable[[OwnDialled | Link | DialFailed], None],
        num_settled: Callable[[], int] = lambda: 0,
    ) -> None:
        self._rank = RankPulls(own, self.on, post)
        self._ranks = range(own.tp_size)
        self._tell = tell
        self._post = post
        self._num_settled = num_settled
        self._numbers = itertools.count(1)  # of links and of pulls
        self._dials: dict[int, _Dial] = {}
        self._pulls: dict[int, _RankedPull] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is dialled or pulled, and the leader's own rank has no link open."""
        return not (self._dials or self._pulls) and self._rank.idle

    def dial(self, member: Member) -> None:
        """Have all ranks dial `member`; posts a Link once they have, or a DialFailed."""
        number = next(self._numbers)
        self._dials[number] = _Dial(member, set(self._ranks))
        self.order(DialPeer(number, member))

    def on(self, event: OwnDialled | RankAnswer) -> None:
        """Take an answer of a rank."""
        match event:
            case OwnDialled():
                self._rank.on(event)
            case PeerDialled(rank, link, bytes_per_s, error):
                if (dial := self._dials.get(link)) is None:
                    return  # another rank has failed meanwhile
                dial.waiting.discard(rank)
                dial.bytes_per_s = min(dial.bytes_per_s, bytes_per_s)
                if error is None and dial.waiting:
                    return
                del self._dials[link]
                if error is None:
                    source = _RankedSource(self, link, self._rank.transport(link))
                    self._post(Link(dial.member.peer, source, dial.bytes_per_s))
                else:
                    self.order(HangUp(link))
                    kind = Incompatible if error.code == Incompatible.code else Unreachable
                    self._post(DialFailed(dial.member.peer, kind(_at(rank, error.message))))
            case PullEnded(_, number):
                if self._pulls[number].ended(event):
                    del self._pulls[number]

    def pull(self, link: int, pairs: Pages, groups: range, states: Pages = ()) -> Pull:
        number = next(self._numbers)
        poll_own = partial(self._rank.poll_pull, number)
        cancel = partial(self.order, CancelPull(number))
        self._pulls[number] = pull = _RankedPull(set(self._ranks), poll_own, cancel)
        settled = self._num_settled()
        which = tuple(pairs), groups.start, len(groups), settled, tuple(states)
        self.order(PullPages(number, link, *which))
        return pull

    def order(self, order: RankOrder) -> None:
        """Have all ranks do something."""
        self._tell(order)
        self._rank.on(order)


class _RankedSource(PageSource):
    def __init__(self, leader: LeaderPulls, link: int, transport: str) -> None:
        self._leader, self._link, self.transport = leader, link, transport
        self._closed = False

    def pull(self, pairs: Pages, groups: range, states: Pages = ()) -> Pull:
        assert not self._closed, "pull over a closed link"
        return self._leader.pull(self._link, pairs, groups, states)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._leader.order(HangUp(self._link))


class _RankedPull(PartedPull[set[int]]):
    """One pull at all ranks, which ends by their reports; `num_bytes` grows as they come."""

    def __init__(
        self, ranks: set[int], poll_own: Callable[[], None], cancel: Callable[[], None]
    ) -> None:
        super().__init__(ranks, 0, cancel)
        self._poll_own = poll_own

    def poll(self) -> PullState:
        self._poll_own()
        return self._state()

    def ended(self, event: PullEnded) -> bool:
        """Record that a rank's part is over; returns whether all are."""
        self._running.remove(event.rank)
        self.num_bytes += event.num_bytes
        if event.error:
            self._fail(_at(event.rank, event.error))
        return not self._running


def _at(rank: int, text: str) -> str:
    return f"rank {rank}: {text}" if rank else text
