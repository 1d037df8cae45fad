"""PrefillPeers: the prefill workers that a decode worker knows, and the links to pull over.

Each peer is dialled before a request needs it, by all ranks (`ranked.py`): the transport connects,
probes and warms up, and the link's rate is measured. A peer with another model, KV layout or
transport is never used, and a warning is logged. A lost peer that is still a member is dialled
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from worker.api import Candidate, Member, PeerId, PullPath
from worker.cache.layout import Identity
from worker.errors import Incompatible, TransferError
from worker.transfer.base import Pull
from worker.transfer.layout import Pages
from worker.transfer.sources import NUM_READS, SINK, LocalRank, fastest_pull_s

log = logging.getLogger("kvlane.peers")

RETRY_S = 2.0
# `measured` repeats page 0 in one pull until either is reached, then pulls a short range alone.
MEASURED_BYTES, MAX_MEASURED_RUNS = 64 << 20, 512


class PageSource(Protocol):
    """Where pages are pulled from, whatever ranks and bytes that means."""

    def pull(self, pairs: Pages, groups: range) -> Pull:
        """Begin to pull layer groups of pages: (local page, remote page), each local page once."""
        ...

    def close(self) -> None:
        """Let go of the peer, as Peer.close; a second call does nothing."""
        ...


@dataclass(slots=True, frozen=True)
class Link:
    """A way to pull from a prefill worker; also the event by which it is delivered."""

    peer: PeerId
    source: PageSource
    # Rate of the whole model's KV, from reads of a single page while dialling.
    bytes_per_s: float

    def pull(self, pairs: Pages, groups: range) -> Pull:
        """See PageSource.pull."""
        return self.source.pull(pairs, groups)

    def close(self) -> None:
        """See PageSource.close."""
        self.source.close()


@dataclass(slots=True, frozen=True)
class DialFailed:
    """Event: the peer cannot be pulled from."""

    peer: PeerId
    error: TransferError


@dataclass(slots=True)
class _Known:
    """One prefill member."""

    member: Member
    link: Link | None = None
    answers: bool = False  # it has answered a ping since our last connect
    dialling: bool = False
    retry_at: float | None = 0.0  # None: never again


class PrefillPeers:
    """The live prefill workers.

    Other threads may only read num_connected and call `measured`.

    Args:
        rank: of the leader, for `measured`.
        identity: ours.
        dial: begins to dial, from all ranks; leads to a call of `dialled` or `failed`.
        connect, disconnect: of the wire.
    """

    def __init__(
        self,
        rank: LocalRank,
        identity: Identity,
        dial: Callable[[Member], None],
        connect: Callable[[PeerId, str], None],
        disconnect: Callable[[PeerId], None],
    ) -> None:
        self._rank = rank
        self._identity = identity
        self._dial = dial
        self._connect = connect
        self._disconnect = disconnect
        self._listed: dict[PeerId, Member] = {}  # by the control plane
        self._known: dict[PeerId, _Known] = {}
        self._closing: list[Link] = []  # links of lost peers that may still have pulls running

    @property
    def num_connected(self) -> int:
        """Peers that can be pulled from."""
        return sum(self.link(peer) is not None for peer in list(self._known))

    def link(self, peer: PeerId) -> Link | None:
        """Return the link to `peer`, if it has been dialled and answers."""
        known = self._known.get(peer)
        return known.link if known is not None and known.answers else None

    def eligible(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Keep those of `candidates` that can be pulled from."""
        return [each for each in candidates if self.link(each.peer) is not None]

    def update(self, members: Sequence[Member]) -> list[PeerId]:
        """Store the control plane's list; returns the known peers that are not on it."""
        self._listed = {each.peer: each for each in members if each.role == "prefill"}
        for peer, member in self._listed.items():
            self._known.setdefault(peer, _Known(member))
        return [peer for peer in self._known if peer not in self._listed]

    def lose(self, peer: PeerId) -> None:
        """Forget a peer that died or vanished; its link is closed once no pull uses it.

        It is dialled again after RETRY_S while the control plane lists it.
        """
        known = self._known.pop(peer, None)
        if known is None:
            return
        self._disconnect(peer)
        if known.link is not None:
            self._closing.append(known.link)
        if peer in self._listed:
            self._known[peer] = _Known(self._listed[peer], retry_at=time.monotonic() + RETRY_S)

    def heard(self, peer: PeerId) -> None:
        """Note that `peer` has answered a ping."""
        known = self._known.get(peer)
        if known is not None:
            known.answers = True

    @property
    def num_known(self) -> int:
        """Prefill workers that live, and links that are still to be closed."""
        return len(self._known) + len(self._closing)

    def tend(self, now: float, in_use: Callable[[Link], bool]) -> None:
        """Dial the peers that are due; close links of lost peers once no pull uses them.

        Called every turn.
        """
        for link in [each for each in self._closing if not in_use(each)]:
            self._closing.remove(link)
            link.close()
        for peer, known in self._known.items():
            due = known.retry_at is not None and now >= known.retry_at
            if known.link is None and not known.dialling and due:
                known.dialling = True
                self._connect(peer, known.member.address)
                try:
                    self._check(known.member)
                except Incompatible as error:
                    self.failed(DialFailed(peer, error))
                else:
                    self._dial(known.member)

    def dialled(self, link: Link) -> None:
        """Keep a link that has been made."""
        known = self._known.get(link.peer)
        if known is None or known.link is not None:
            link.close()  # the peer died meanwhile, or was lost and dialled again
            return
        known.link, known.dialling = link, False
        log.debug("can pull from %s, %.3g GB/s", link.peer, link.bytes_per_s / 1e9)

    def failed(self, event: DialFailed) -> None:
        """Plan to dial the peer again, unless that can never work."""
        known = self._known.get(event.peer)
        log.warning("cannot pull from %s: %s", event.peer, event.error)
        if known is not None:
            known.dialling = False
            never = isinstance(event.error, Incompatible)
            known.retry_at = None if never else time.monotonic() + RETRY_S

    def measured(self) -> list[PullPath]:
        """Measure the way from each listed prefill worker, one after another; for any thread.

        It pulls the leader's heads only, over connections opened for this. What is pulled lands in
        page 0. Takes up to a few seconds for a peer that does not answer.
        """
        return [self._measured(member) for member in list(self._listed.values())]

    def close(self) -> None:
        """Close all links."""
        self._listed = {}
        for peer in list(self._known):
            self.lose(peer)
        for link in self._closing:
            link.close()

    def _measured(self, member: Member) -> PullPath:
        transport = self._rank.transport
        label = f"{transport.name}/{transport.kind}"
        try:
            self._check(member)
            sources = self._rank.connect(member)
            try:
                runs = list(chain(*sources.runs(SINK)))
                num_bytes, num_runs = sum(run.num_bytes for run in runs), len(runs)
                times = min(-(-MEASURED_BYTES // num_bytes), -(-MAX_MEASURED_RUNS // num_runs))
                took_s = fastest_pull_s(sources, SINK * times, NUM_READS)
                small_s = sources.small_pull_s()
            finally:
                sources.close()
        except (TransferError, OSError) as error:
            return PullPath(member.peer, label, error=str(error))
        num_bytes, num_runs = times * num_bytes, times * num_runs
        return PullPath(member.peer, label, num_bytes / took_s, num_bytes, num_runs, small_s)

    def _check(self, member: Member) -> None:
        """Raise Incompatible unless `member` holds KV of our model; `connect` checks its ranks."""
        identity = Identity(member.model, member.digest, member.layout_hash)
        if identity.layout_hash != self._identity.layout_hash:
            raise Incompatible(self._identity.explain(identity))
