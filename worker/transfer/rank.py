"""RankPulls: what a rank other than the leader dials and pulls, as the leader tells it.

The leader's side, and the messages, are in `ranked.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from worker.errors import TransferError
from worker.transfer.base import Pull, PullState
from worker.transfer.inbound import poll_after_s
from worker.transfer.ranked import (
    CancelPull,
    DialPeer,
    HangUp,
    PeerDialled,
    PeerNotDialled,
    PullEnded,
    PullPages,
    RankAnswer,
    RankOrder,
)
from worker.transfer.sources import LocalRank, Sources

log = logging.getLogger("kvlane.rank")

DIAL_POLL_S = 5e-3  # the loop looks so often whether a dialling thread is done


@dataclass(slots=True, frozen=True)
class _Running:
    """A pull under way."""

    pull: Pull
    link: int
    began_at: float


class RankPulls:
    """One rank's part of the pulls. Belongs to the rank's loop, which calls `on` and `poll`.

    Args:
        own: this rank.
        tell: sends a message to the leader; called by the loop.
    """

    def __init__(self, own: LocalRank, tell: Callable[[RankAnswer], None]) -> None:
        self._own = own
        self._tell = tell
        self._sources: dict[int, Sources] = {}  # by link
        self._dialling: set[int] = set()  # links that the leader still wants
        self._num_threads = 0  # that dial
        self._dialled: SimpleQueue[tuple[int, Sources | TransferError, float]] = SimpleQueue()
        self._pulls: dict[int, _Running] = {}  # by number
        self._leaving: set[int] = set()  # links to close once no pull uses them

    @property
    def num_links(self) -> int:
        """Links that are open or in the making; 0 when idle."""
        return len(self._sources) + self._num_threads

    @property
    def num_pulls(self) -> int:
        """Pulls that run."""
        return len(self._pulls)

    def poll_after_s(self, now: float) -> float:
        """Say how long the loop may sleep before it has to call `poll`; inf: nothing is under way.

        now: `time.monotonic()`.
        """
        pulls_s = poll_after_s([each.began_at for each in self._pulls.values()], now)
        return min(pulls_s, DIAL_POLL_S if self._num_threads else math.inf)

    def on(self, message: RankOrder) -> None:
        """Do what the leader tells."""
        match message:
            case DialPeer(link, member):
                self._dialling.add(link)
                self._num_threads += 1
                self._own.dial(
                    member, lambda result, page_s: self._dialled.put((link, result, page_s))
                )
            case PullPages():
                groups = range(message.first_group, message.first_group + message.num_groups)
                pull = self._sources[message.link].pull(message.pairs, groups)
                self._pulls[message.pull] = _Running(pull, message.link, time.monotonic())
            case CancelPull(number):
                if (running := self._pulls.get(number)) is not None:
                    running.pull.cancel()
            case HangUp(link):
                self._dialling.discard(link)
                self._leaving.add(link)
                for each in self._pulls.values():
                    if each.link == link:
                        each.pull.cancel()
        self._close_unused()

    def poll(self) -> None:
        """Move the pulls on, and tell the leader what has ended."""
        self._take_dialled()
        for number, each in list(self._pulls.items()):
            state = each.pull.poll()
            if state is PullState.RUNNING:
                continue
            del self._pulls[number]
            error = (each.pull.error or "pull failed") if state is PullState.FAILED else ""
            self._tell(PullEnded(self._own.rank, number, each.pull.num_bytes, error))
        self._close_unused()

    def close(self) -> None:
        """Close all links; blocks until their pulls are over, and tells nobody."""
        self._dialling.clear()
        for sources in self._sources.values():
            sources.close()
        self._sources.clear()
        self._pulls.clear()

    def _take_dialled(self) -> None:
        while True:
            try:
                link, result, page_s = self._dialled.get_nowait()
            except Empty:
                return
            self._num_threads -= 1
            wanted = link in self._dialling
            self._dialling.discard(link)
            if isinstance(result, TransferError):
                if wanted:
                    log.debug("link %d: %s", link, result)
                    self._tell(PeerNotDialled(self._own.rank, link, result.code, str(result)))
            elif wanted:
                self._sources[link] = result
                self._tell(PeerDialled(self._own.rank, link, page_s))
            else:
                result.close()

    def _close_unused(self) -> None:
        """Close the links that the leader has hung up and that no pull uses."""
        if self._leaving:
            used = {each.link for each in self._pulls.values()}
            for link in self._leaving - used:
                self._leaving.discard(link)
                if (sources := self._sources.pop(link, None)) is not None:
                    sources.close()
