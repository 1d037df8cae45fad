"""Prefill workers as a decode worker knows them: which are there, and from which it can pull.

Connecting (probe and warm-up of the transport, and a measurement of the link) runs in a thread of
its own for each peer, long before a request needs the peer. A peer with another KV layout or
transport is never eligible, which shows here and in the log, not as a failed request. A peer that
was lost but is still a member is dialled again, and eligible as soon as it has answered a ping.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from worker.api import Candidate, Member, PeerId
from worker.cache.layout import KVLayout
from worker.errors import Incompatible, TransferError, Unreachable
from worker.transfer.base import Endpoint, KVTransport, Peer, PullState, Run
from worker.transfer.layout import PoolPages, num_pool_pages, plan_runs

log = logging.getLogger("kvlane.peers")

RETRY_S = 2.0
NUM_READS = 3  # to measure a link; the fastest counts
SPIN_S = 1e-3  # how long a read is watched without a pause
_decode_endpoint = msgspec.msgpack.Decoder(Endpoint).decode


@dataclass(slots=True, frozen=True)
class PeerConnected:
    """Event from a connecting thread: the transport reached the peer."""

    peer: PeerId
    link: Peer
    pool_pages: PoolPages
    bytes_per_s: float  # of the link, when nothing else is pulled


@dataclass(slots=True, frozen=True)
class PeerFailed:
    """Event from a connecting thread: it did not."""

    peer: PeerId
    error: TransferError


@dataclass(slots=True)
class _Known:
    """One prefill member."""

    member: Member
    link: Peer | None = None  # what pulls go over, once it was dialled
    pool_pages: PoolPages | None = None  # ours and the peer's, once it was dialled
    bytes_per_s: float = 0.0  # of the link, as measured when it was dialled
    answers: bool = False  # it has sent something since our last connect
    connecting: bool = False
    retry_at: float | None = 0.0  # None: never again


class PrefillPeers:
    """The live prefill workers. All methods but the threads it starts run in the engine loop."""

    def __init__(
        self,
        transport: KVTransport,
        layout: KVLayout,
        num_pool_pages: int,
        timeout_s: float,
        post: Callable[[object], None],
        connect: Callable[[PeerId, str], None],
        disconnect: Callable[[PeerId], None],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._num_pool_pages = num_pool_pages  # ours, the sink included
        self._timeout_s = timeout_s
        self._post = post
        self._connect = connect
        self._disconnect = disconnect
        self._listed: dict[PeerId, Member] = {}  # by the control plane
        self._known: dict[PeerId, _Known] = {}
        self._closing: list[Peer] = []  # links of lost peers that may still have pulls running

    @property
    def num_connected(self) -> int:
        """Peers that can be pulled from."""
        return sum(self.link(peer) is not None for peer in list(self._known))

    def link(self, peer: PeerId) -> Peer | None:
        """The transport's connection to `peer`, if it stands and the peer answers."""
        known = self._known.get(peer)
        return known.link if known is not None and known.answers else None

    def link_bytes_per_s(self, peer: PeerId) -> float:
        """What the link to `peer` was measured at; 0 = there is none."""
        known = self._known.get(peer)
        return known.bytes_per_s if known is not None else 0.0

    def pool_pages(self, peer: PeerId) -> PoolPages:
        """Of our pool and that of `peer`, to which there is a link."""
        found = self._known[peer].pool_pages
        assert found is not None
        return found

    def eligible(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of `candidates` that can be pulled from, order kept."""
        return [each for each in candidates if self.link(each.peer) is not None]

    def update(self, members: Sequence[Member]) -> list[PeerId]:
        """Take over the control plane's list; the peers that are gone by it."""
        self._listed = {each.peer: each for each in members if each.role == "prefill"}
        for peer, member in self._listed.items():
            self._known.setdefault(peer, _Known(member))
        return [peer for peer in self._known if peer not in self._listed]

    def lose(self, peer: PeerId) -> None:
        """A peer died or vanished; its link is closed once no pull uses it.

        Tried again after a while, for as long as the control plane lists it.
        """
        known = self._known.pop(peer, None)
        if known is None:
            return
        self._disconnect(peer)
        if known.link is not None:
            self._closing.append(known.link)
        if peer in self._listed:
            again_at = time.monotonic() + RETRY_S
            self._known[peer] = _Known(self._listed[peer], retry_at=again_at)

    def heard(self, peer: PeerId) -> None:
        """`peer` has answered a ping."""
        known = self._known.get(peer)
        if known is not None:
            known.answers = True

    def tend(self, now: float, in_use: Callable[[Peer], bool]) -> None:
        """Start connecting where it is due, close what is no longer used; called every turn."""
        for link in [each for each in self._closing if not in_use(each)]:
            self._closing.remove(link)
            link.close()
        for peer, known in self._known.items():
            due = known.retry_at is not None and now >= known.retry_at
            if known.link is None and not known.connecting and due:
                known.connecting = True
                self._connect(peer, known.member.address)
                threading.Thread(
                    target=self._dial, args=(peer, known.member), name=f"dial {peer}", daemon=True
                ).start()

    def connected(self, event: PeerConnected) -> None:
        """A dialling thread succeeded."""
        known = self._known.get(event.peer)
        if known is None or known.link is not None:
            event.link.close()  # it died meanwhile, or was lost and dialled again
            return
        known.link, known.connecting = event.link, False
        known.pool_pages, known.bytes_per_s = event.pool_pages, event.bytes_per_s
        log.info("can pull from %s, %.3g GB/s", event.peer, event.bytes_per_s / 1e9)

    def failed(self, event: PeerFailed) -> None:
        """A dialling thread failed; try again later unless it can never work."""
        known = self._known.get(event.peer)
        log.warning("cannot pull from %s: %s", event.peer, event.error)
        if known is not None:
            known.connecting = False
            never = isinstance(event.error, Incompatible)
            known.retry_at = None if never else time.monotonic() + RETRY_S

    def close(self) -> None:
        """Let go of all."""
        self._listed = {}
        for peer in list(self._known):
            self.lose(peer)
        for link in self._closing:
            link.close()

    def _dial(self, peer: PeerId, member: Member) -> None:
        try:
            if member.layout_hash != self._layout.hash:
                raise Incompatible(
                    f"its KV layout is {member.layout_hash}, ours {self._layout.hash}: "
                    "model, dtype, page_size, num_groups and kvlane's version must be the same"
                )
            endpoint = _decode_endpoint(member.endpoint)
            held = num_pool_pages(self._layout, endpoint)
            pool_pages = PoolPages(self._num_pool_pages, held)
            link = self._transport.connect(endpoint, self._timeout_s)
            sinks = [(0, 0)]  # page 0 of both sides
            rate = measured_rate(link, plan_runs(self._layout, sinks, pool_pages))
        except TransferError as error:
            self._post(PeerFailed(peer, error))
        except OSError as error:  # no descriptors or memory left: may pass
            self._post(PeerFailed(peer, Unreachable(f"cannot dial {peer}: {error}")))
        else:
            self._post(PeerConnected(peer, link, pool_pages, rate))


def measured_rate(link: Peer, runs: Sequence[Run]) -> float:
    """Bytes per second at which `runs` are read; closes the link if that fails.

    The caller sees to it that nobody uses what they read or write.

    Raises:
        Unreachable: it failed.
    """
    best = 0.0
    for _ in range(NUM_READS):
        began_at = time.perf_counter()
        pull = link.pull(runs)
        while (state := pull.poll()) is PullState.RUNNING:
            if time.perf_counter() - began_at > SPIN_S:
                time.sleep(SPIN_S)
        if state is PullState.FAILED:
            link.close()
            raise Unreachable(f"a first read of a page failed: {pull.error}")
        best = max(best, pull.num_bytes / (time.perf_counter() - began_at))
    return best
