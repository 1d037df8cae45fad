"""Pulls of all ranks of a decode worker, led by rank 0: the messages, and the leader's side.

    leader -> ranks    DialPeer, PullPages, CancelPull, HangUp
    rank -> leader     PeerDialled, PeerNotDialled, PullEnded

Every rank pulls its own heads (`sources.py`; the side of the other ranks is in `rank.py`). The
leader alone talks to prefill workers, and holds the one lease. A link is there when all ranks have
dialled, and a pull is OK when it is OK at all of them: only then may a request be planned that
reads its pages. A pull that has failed at one rank is cancelled at the others, and counts as
running until all have told its end, because until then it may write to our pages.

Links and pulls have numbers. A peer's name would not do: while the pulls of a lost peer end, it may
be dialled again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from worker.api import Member, Message, PeerId
from worker.errors import Incompatible, TransferError, Unreachable
from worker.transfer.base import Pull, PullState
from worker.transfer.layout import Pages
from worker.transfer.peers import DialFailed, Link
from worker.transfer.sources import LocalRank, Sources


class DialPeer(Message, frozen=True):
    """Connect to the ranks of `member` that hold your heads; answer if you could, or why not."""

    link: int
    member: Member


class PullPages(Message, frozen=True):
    """Begin to pull over a link that has been dialled; answer with PullEnded."""

    pull: int
    link: int
    pairs: tuple[tuple[int, int], ...]  # (local page, remote page)
    first_group: int
    num_groups: int
    # Begin once this many of your steps have ended. The leader had settled as many when it chose
    # the local pages; later steps do not use them.
    after_steps: int = 0


class CancelPull(Message, frozen=True):
    """End a pull soon, if it still runs; its PullEnded comes as ever."""

    pull: int


class HangUp(Message, frozen=True):
    """Close a link, or give up dialling; pulls over it are cancelled and end first."""

    link: int


class PeerDialled(Message, frozen=True):
    """A rank can pull over the link."""

    rank: int
    link: int
    page_s: float  # in which its share of a page arrives


class PeerNotDialled(Message, frozen=True):
    """A rank cannot pull over the link; `code` is the error's."""

    rank: int
    link: int
    code: str
    text: str


class PullEnded(Message, frozen=True):
    """A rank's part of a pull is over: not one byte of it is written any more."""

    rank: int
    pull: int
    num_bytes: int
    error: str = ""  # "": all bytes are there


RankOrder = DialPeer | PullPages | CancelPull | HangUp
RankAnswer = PeerDialled | PeerNotDialled | PullEnded


@dataclass(slots=True, frozen=True)
class OwnDialled:
    """Event: how the leader's own dialling has ended."""

    link: int
    result: Sources | TransferError
    page_s: float


@dataclass(slots=True)
class _Dial:
    """A link in the making."""

    peer: PeerId
    waiting: set[int]  # ranks that have not answered
    own: Sources | None = None
    page_s: float = 0.0  # of the slowest rank so far


class LeaderPulls:
    """All that the ranks of this worker dial and pull, seen from rank 0. Belongs to its loop.

    Args:
        own: the leader's rank; also says how many there are.
        tell: sends a message to all other ranks, in order; called by the loop.
        post: hands the loop an event. OwnDialled is for `on`; Link and DialFailed are what `dial`
            has led to.
        num_settled: how many steps the leader has settled.
    """

    def __init__(
        self,
        own: LocalRank,
        tell: Callable[[RankOrder], None],
        post: Callable[[OwnDialled | Link | DialFailed], None],
        num_settled: Callable[[], int] = lambda: 0,
    ) -> None:
        self._own = own
        self._num_settled = num_settled
        self._tell = tell
        self._post = post
        self._numbers = itertools.count(1)  # of links and of pulls
        self._dials: dict[int, _Dial] = {}
        self._pulls: dict[int, RankedPull] = {}

    def dial(self, member: Member) -> None:
        """Have all ranks dial `member`; posts a Link once they have, or a DialFailed."""
        link = next(self._numbers)
        self._dials[link] = _Dial(member.peer, set(range(self._own.tp_size)))
        self._tell(DialPeer(link, member))
        self._own.dial(member, lambda result, page_s: self._post(OwnDialled(link, result, page_s)))

    def on(self, event: OwnDialled | RankAnswer) -> None:
        """Take an answer of a rank, or the leader's own."""
        match event:
            case OwnDialled(link, Sources() as sources, page_s):
                if (dial := self._dials.get(link)) is None:
                    sources.close()  # another rank has failed meanwhile
                    return
                dial.own = sources
                self._dialled(0, link, page_s)
            case OwnDialled(link, TransferError() as error):
                self._not_dialled(link, error)
            case PeerDialled(rank, link, page_s):
                self._dialled(rank, link, page_s)
            case PeerNotDialled():
                kind = Incompatible if event.code == Incompatible.code else Unreachable
                self._not_dialled(event.link, kind(f"rank {event.rank}: {event.text}"))
            case PullEnded():
                if self._pulls[event.pull].ended(event):
                    del self._pulls[event.pull]

    def pull(self, link: int, own: Sources, pairs: Pages, groups: range) -> Pull:
        """Begin to pull at all ranks; see PageSource.pull."""
        if self._own.tp_size == 1:
            return own.pull(pairs, groups)
        number = next(self._numbers)
        order = PullPages(
            number, link, tuple(pairs), groups.start, len(groups), self._num_settled()
        )
        self._tell(order)
        others = set(range(1, self._own.tp_size))
        pull = RankedPull(own.pull(pairs, groups), others, lambda: self._tell(CancelPull(number)))
        self._pulls[number] = pull
        return pull

    def hang_up(self, link: int, own: Sources) -> None:
        """Close a link at all ranks. Blocks, as `Peer.close` does, only for the leader's part."""
        self._tell(HangUp(link))
        own.close()

    def _dialled(self, rank: int, link: int, page_s: float) -> None:
        dial = self._dials.get(link)
        if dial is None:
            return
        dial.waiting.discard(rank)
        dial.page_s = max(dial.page_s, page_s)
        if not dial.waiting:
            assert dial.own is not None
            del self._dials[link]
            # The ranks pull side by side: a page is here when the slowest has its share.
            rate = self._own.model.page_bytes / dial.page_s
            self._post(Link(dial.peer, RankedSource(self, link, dial.own), rate))

    def _not_dialled(self, link: int, error: TransferError) -> None:
        dial = self._dials.pop(link, None)
        if dial is None:
            return
        self._tell(HangUp(link))
        if dial.own is not None:
            dial.own.close()
        self._post(DialFailed(dial.peer, error))


class RankedSource:
    """A prefill worker, as all ranks pull from it."""

    def __init__(self, leader: LeaderPulls, link: int, own: Sources) -> None:
        self._leader, self._link, self._own = leader, link, own
        self._closed = False

    def pull(self, pairs: Pages, groups: range) -> Pull:
        """See PageSource.pull."""
        assert not self._closed, "pull over a closed link"
        return self._leader.pull(self._link, self._own, pairs, groups)

    def close(self) -> None:
        """See PageSource.close."""
        if not self._closed:
            self._closed = True
            self._leader.hang_up(self._link, self._own)


class RankedPull:
    """One pull at all ranks (see Pull); `num_bytes` grows as they tell what they have pulled."""

    def __init__(self, own: Pull, others: set[int], cancel_others: Callable[[], None]) -> None:
        self.num_bytes = own.num_bytes
        self.error: str | None = None
        self._own = own
        self._own_runs = True
        self._others = others  # ranks whose part runs
        self._cancel_others = cancel_others
        self._why = ""  # the first failure; poll says FAILED once no part runs

    def poll(self) -> PullState:
        """Poll the leader's own part; those of others end by their messages."""
        if self._own_runs and (state := self._own.poll()) is not PullState.RUNNING:
            self._own_runs = False
            if state is PullState.FAILED:
                self._fail(self._own.error or "pull failed")
        if self._own_runs or self._others:
            return PullState.RUNNING
        self.error = self._why or None
        return PullState.FAILED if self._why else PullState.OK

    def cancel(self) -> None:
        """See Pull.cancel."""
        if self._own_runs or self._others:
            self._fail("cancelled")

    def ended(self, event: PullEnded) -> bool:
        """Record that a rank's part is over; returns whether all but the leader's are."""
        self._others.remove(event.rank)
        self.num_bytes += event.num_bytes
        if event.error:
            self._fail(f"rank {event.rank}: {event.error}")
        return not self._others

    def _fail(self, why: str) -> None:
        """It will fail, once no part runs any more."""
        if self._why:
            return
        self._why = why
        if self._own_runs:
            self._own.cancel()
        if self._others:
            self._cancel_others()
