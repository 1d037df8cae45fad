"""PrefillPeers: the prefill workers that a decode worker knows, and the links to pull over.

Each peer is dialled in a thread of its own, before a request needs it: the transport connects,
probes and warms up, and the link's rate is measured. A peer with another model, KV layout or
transport is never used, and a warning is logged. A lost peer that is still a member is dialled
again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from worker.api import Candidate, Member, PeerId, PullPath
from worker.cache.layout import Identity, KVLayout
from worker.errors import Incompatible, TransferError, Unreachable
from worker.transfer.base import Endpoint, KVTransport, Peer, PullState, Run
from worker.transfer.layout import PoolPages, num_pool_pages, plan_runs

log = logging.getLogger("kvlane.peers")

RETRY_S = 2.0
NUM_READS = 3  # to measure a link; the fastest counts
# What `measured` pulls: as many ranges as make the bytes, or the most, and one short range.
MEASURED_BYTES, MAX_MEASURED_RUNS = 64 << 20, 512
SMALL_BYTES, NUM_SMALL = 64, 20
SPIN_S = 1e-3  # a read is polled without sleeping for this long, then once in every such interval
SINK = [(0, 0)]  # page 0 of both sides: no KV, padded and inactive rows write there
_decode_endpoint = msgspec.msgpack.Decoder(Endpoint).decode


@dataclass(slots=True, frozen=True)
class Link:
    """A connection to a prefill worker; also the event by which a dialling thread delivers it."""

    peer: PeerId
    connection: Peer
    pool_pages: PoolPages  # ours and the peer's
    bytes_per_s: float  # measured before anything else was pulled over it


@dataclass(slots=True, frozen=True)
class DialFailed:
    """Event from a dialling thread: it could not connect to the peer."""

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

    Other threads may only read num_connected, call `measured`, and run `_dial`.
    """

    def __init__(
        self,
        transport: KVTransport,
        layout: KVLayout,
        identity: Identity,
        num_pool_pages: int,
        timeout_s: float,
        post: Callable[[object], None],
        connect: Callable[[PeerId, str], None],
        disconnect: Callable[[PeerId], None],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._identity = identity
        self._num_pool_pages = num_pool_pages  # ours, page 0 included
        self._timeout_s = timeout_s
        self._post = post
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

    def tend(self, now: float, in_use: Callable[[Link], bool]) -> None:
        """Dial the peers that are due; close links of lost peers once no pull uses them.

        Called every turn.
        """
        for link in [each for each in self._closing if not in_use(each)]:
            self._closing.remove(link)
            link.connection.close()
        for peer, known in self._known.items():
            due = known.retry_at is not None and now >= known.retry_at
            if known.link is None and not known.dialling and due:
                known.dialling = True
                self._connect(peer, known.member.address)
                threading.Thread(
                    target=self._dial, args=(peer, known.member), name=f"dial {peer}", daemon=True
                ).start()

    def dialled(self, link: Link) -> None:
        """Keep the link that a dialling thread has made."""
        known = self._known.get(link.peer)
        if known is None or known.link is not None:
            link.connection.close()  # the peer died meanwhile, or was lost and dialled again
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

        Over connections of their own, which are made and closed like those that requests use. What
        is pulled lands in page 0. Takes up to a few seconds for a peer that does not answer.
        """
        return [self._measured(member) for member in list(self._listed.values())]

    def close(self) -> None:
        """Close all links."""
        self._listed = {}
        for peer in list(self._known):
            self.lose(peer)
        for link in self._closing:
            link.connection.close()

    def _measured(self, member: Member) -> PullPath:
        label = f"{self._transport.name}/{self._transport.kind}"
        try:
            connection, pool_pages = self._connected(member)
            try:
                runs = plan_runs(self._layout, SINK, pool_pages)
                num_bytes = sum(run.num_bytes for run in runs)
                runs *= min(-(-MEASURED_BYTES // num_bytes), -(-MAX_MEASURED_RUNS // len(runs)))
                num_bytes = sum(run.num_bytes for run in runs)
                rate = num_bytes / fastest_pull_s(connection, runs, NUM_READS)
                small_s = fastest_pull_s(connection, [Run(0, 0, 0, SMALL_BYTES)], NUM_SMALL)
            finally:
                connection.close()
        except (TransferError, OSError) as error:
            return PullPath(member.peer, label, error=str(error))
        return PullPath(member.peer, label, rate, num_bytes, len(runs), small_s)

    def _dial(self, peer: PeerId, member: Member) -> None:
        try:
            connection, pool_pages = self._connected(member)
            rate = measured_rate(connection, plan_runs(self._layout, SINK, pool_pages))
        except TransferError as error:
            self._post(DialFailed(peer, error))
        except OSError as error:  # out of descriptors or memory: dial again later
            self._post(DialFailed(peer, Unreachable(f"cannot dial {peer}: {error}")))
        else:
            self._post(Link(peer, connection, pool_pages, rate))

    def _connected(self, member: Member) -> tuple[Peer, PoolPages]:
        """A new connection, and how many pages the two sides have.

        Raises:
            TransferError: it cannot be reached, or its model or KV layout is another.
            OSError: no descriptor or memory is left.
        """
        identity = Identity(member.model, member.digest, member.layout_hash)
        if identity.layout_hash != self._identity.layout_hash:
            raise Incompatible(self._identity.explain(identity))
        endpoint = _decode_endpoint(member.endpoints[0])
        pool_pages = PoolPages(self._num_pool_pages, num_pool_pages(self._layout, endpoint))
        return self._transport.connect(endpoint, self._timeout_s), pool_pages


def measured_rate(connection: Peer, runs: Sequence[Run]) -> float:
    """Measure the bytes per second of pulls of `runs`, the best of NUM_READS.

    Overwrites the local pages of `runs`, so they must hold no KV that is needed.

    Raises:
        Unreachable: a pull failed; the connection is closed.
    """
    return sum(run.num_bytes for run in runs) / fastest_pull_s(connection, runs, NUM_READS)


def fastest_pull_s(connection: Peer, runs: Sequence[Run], num_reads: int) -> float:
    """Measure the seconds of a pull of `runs`, the least of `num_reads`; as `measured_rate`."""
    best = float("inf")
    for _ in range(num_reads):
        began_at = time.perf_counter()
        pull = connection.pull(runs)
        while (state := pull.poll()) is PullState.RUNNING:
            if time.perf_counter() - began_at > SPIN_S:
                time.sleep(SPIN_S)
        if state is PullState.FAILED:
            connection.close()
            raise Unreachable(f"a first read of a page failed: {pull.error}")
        best = min(best, time.perf_counter() - began_at)
    return best
