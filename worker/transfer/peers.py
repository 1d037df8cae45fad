"""The prefill workers that a decode worker knows, and the links to pull over.

A peer is dialled before a request needs it: the transport connects, probes and warms up, and the
link's rate is measured. A peer with another model, KV layout or transport is never used, and a
warning is logged. A lost peer that is still a member is dialled again.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.api import Candidate, Member, PeerId
from worker.errors import Incompatible
from worker.observe.paths import PullPath
from worker.transfer.sources import DialFailed, Link, LocalRank

log = logging.getLogger("kvlane.peers")

RETRY_S = 2.0


@dataclass(slots=True)
class _Known:
    member: Member
    link: Link | None = None
    answers: bool = False  # it has answered a ping since our last connect
    dial_at: float | None = 0.0  # None: it is being dialled, has a link, or is never dialled again


class PrefillPeers:
    """The live prefill workers. Other threads may only read num_connected and call `measured`.

    rank: the leader's, for `measured`. dial: has all ranks dial, which leads to an event for
    `dialled` or `failed`. connect, disconnect: the wire's.
    """

    def __init__(
        self,
        rank: LocalRank,
        dial: Callable[[Member], None],
        connect: Callable[[PeerId, str, str], None],
        disconnect: Callable[[PeerId], None],
    ) -> None:
        self._rank = rank
        self._dial = dial
        self._connect = connect
        self._disconnect = disconnect
        self._listed: dict[PeerId, Member] = {}  # by the control plane
        self.known: dict[PeerId, _Known] = {}
        self.closing: list[Link] = []  # links of lost peers that may still have pulls running

    @property
    def num_connected(self) -> int:
        """Peers that can be pulled from."""
        return sum(self.link(peer) is not None for peer in list(self.known))

    def link(self, peer: PeerId) -> Link | None:
        """Return the link to `peer`, if it has been dialled and answers."""
        known = self.known.get(peer)
        return known.link if known is not None and known.answers else None

    def bytes_per_s(self, peer: PeerId, now: float) -> float:
        """Of KV from `peer`, lately; 0: it cannot be pulled from."""
        link = self.link(peer)
        return 0.0 if link is None else link.bytes_per_s_at(now)

    def eligible(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Keep those of `candidates` that can be pulled from."""
        return [candidate for candidate in candidates if self.link(candidate.peer) is not None]

    def update(self, members: Sequence[Member]) -> list[PeerId]:
        """Store the control plane's list; returns the known peers that are not on it."""
        self._listed = {member.peer: member for member in members if member.role == "prefill"}
        for peer, member in self._listed.items():
            self.known.setdefault(peer, _Known(member))
        return [peer for peer in self.known if peer not in self._listed]

    def lose(self, peer: PeerId) -> None:
        """Forget a peer that died or vanished; while it is listed, dial it again after RETRY_S."""
        if (known := self.known.pop(peer, None)) is None:
            return
        self._disconnect(peer)
        if known.link is not None:
            self.closing.append(known.link)
        if peer in self._listed:
            self.known[peer] = _Known(self._listed[peer], dial_at=time.monotonic() + RETRY_S)

    def heard(self, peer: PeerId) -> None:
        """Note that `peer` has answered a ping."""
        if (known := self.known.get(peer)) is not None:
            known.answers = True

    def tend(self, now: float, in_use: Callable[[Link], bool]) -> None:
        """Dial the peers that are due; close links of lost peers once no pull uses them."""
        for link in [link for link in self.closing if not in_use(link)]:
            self.closing.remove(link)
            link.source.close()
        for peer, known in self.known.items():
            if known.dial_at is not None and now >= known.dial_at:
                known.dial_at = None
                self._connect(peer, known.member.address, known.member.wire_key)
                self._dial(known.member)

    def dialled(self, link: Link) -> None:
        """Keep a link that has been made."""
        known = self.known.get(link.peer)
        if known is None or known.link is not None:
            link.source.close()  # the peer died meanwhile, or was lost and dialled again
            return
        known.link, known.dial_at = link, None
        log.debug("can pull from %s, %.3g GB/s", link.peer, link.bytes_per_s / 1e9)

    def failed(self, event: DialFailed) -> None:
        """Plan to dial the peer again, unless that can never work."""
        known = self.known.get(event.peer)
        log.warning("cannot pull from %s: %s", event.peer, event.error)
        if known is not None and known.link is None:
            never = isinstance(event.error, Incompatible)
            known.dial_at = None if never else time.monotonic() + RETRY_S

    def measured(self) -> list[PullPath]:
        """Measure the paths from the listed prefill workers, one after another; for any thread.

        It pulls the leader's heads into page 0, over connections of its own; seconds at worst.
        """
        return [self._rank.measure(member) for member in list(self._listed.values())]

    def close(self) -> None:
        """For the thread that closes the loop, once that has ended."""
        self._listed = {}
        for peer in list(self.known):
            self.lose(peer)
        for link in self.closing:
            link.source.close()
        self._rank.end()
