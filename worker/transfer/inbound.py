"""Decode's side of the pull protocol: all its fetches. Prefill's side is in `outbound.py`."""

import math
from collections.abc import Sequence

from worker.api import (
    Candidate,
    FinishReason,
    KVReady,
    PeerId,
    PrefillRefused,
    Renew,
    RenewAck,
    Xfer,
)
from worker.errors import PeerLost, Revoked, TransferError
from worker.schedule.req import Req
from worker.transfer.fetch import Fetch, FetchContext
from worker.transfer.peers import PrefillPeers
from worker.transfer.sources import Link

# While pulls run, the loop sleeps for an eighth of the youngest pull's age, LONGEST_POLL_S at most,
# so that a pull of seconds does not occupy a core. Below YOUNG_S it does not sleep: even the
# shortest sleep that the OS grants takes as long as pulling 20 MB over NVLink.
YOUNG_S = 300e-6
LONGEST_POLL_S = 500e-6


class Inbound:
    """All fetches of one decode worker."""

    def __init__(self, incarnation: str, context: FetchContext, peers: PrefillPeers) -> None:
        self._incarnation = incarnation
        self.context = context
        self.peers = peers
        self.fetches: dict[str, Fetch] = {}  # by xfer_id: requests whose KV is on its way
        self._renew_at = 0.0
        # Unanswered Renews by (peer, seq): when sent, and for which transfers.
        self._renewals: dict[tuple[PeerId, int], tuple[float, tuple[Xfer, ...]]] = {}
        self._seq = 0
        self._num_started = 0

    @property
    def pulls_began_at(self) -> list[float]:
        """When the pulls that run began; read by other threads too."""
        fetches = list(self.fetches.values())
        return [began_at for fetch in fetches for began_at in fetch.pulls_began_at]

    def uses(self, link: Link) -> bool:
        """Whether a pull over `link` runs."""
        return any(fetch.uses(link) for fetch in self.fetches.values())

    def start(self, req: Req, candidates: Sequence[Candidate], now: float) -> bool:
        """Ask the first candidate that can be pulled from; False when there is none."""
        self._num_started += 1
        fetch = Fetch(self.context, req, candidates, self._num_started)
        if not self._begin(fetch, now):
            return False
        self.fetches[fetch.xfer_id] = fetch
        return True

    def cancel(self, req: Req, reason: FinishReason) -> None:
        """Cancel a request's fetch for the first reason given; `poll` returns it as any other."""
        for fetch in self.fetches.values():
            if fetch.req is req and fetch.ending is None:
                fetch.ending = reason
                fetch.drain()

    def on_ready(self, peer: PeerId, message: KVReady) -> Req | None:
        """Pass an announcement to its fetch; returns the request if that has got a token by it."""
        fetch = self._find(peer, message)
        if fetch is not None and not fetch.knows(message):
            self.context.refusals.unexpected(peer, message)
            return None  # the attempt goes on: whoever was asked says it again with a renewal
        if fetch is not None and not fetch.believes(message):
            self.context.refusals.unexpected(peer, message)
            fetch.fail(TransferError.code, "it has announced what cannot be")
            return None
        return fetch.req if fetch is not None and fetch.announced(message) else None

    def on_refused(self, peer: PeerId, message: PrefillRefused) -> None:
        """End the attempt: the next candidate is tried."""
        if (fetch := self._find(peer, message)) is not None:
            fetch.fail(message.error.code, message.error.message)

    def on_renew_ack(self, peer: PeerId, message: RenewAck) -> None:
        """Extend the leases that the peer still holds, and fail the attempts that it dropped."""
        sent_at, asked = self._renewals.pop((peer, message.seq), (0.0, ()))
        held = set(message.xfers)
        for xfer in asked:
            fetch = self.fetches.get(xfer.xfer_id)
            if fetch is None or fetch.xfer != xfer:
                continue
            if xfer in held:
                fetch.lease.renewed(sent_at)
            else:
                fetch.fail(Revoked.code, "the prefill worker no longer holds it")

    def on_lost(self, peer: PeerId) -> None:
        """Fail the attempts at a prefill worker that is lost; their fetches go on elsewhere."""
        for fetch in self.fetches.values():
            if fetch.peer == peer and fetch.xfer is not None:
                fetch.fail(PeerLost.code, f"{peer} is lost")

    def poll(self, now: float) -> list[Fetch]:
        """Advance all fetches, send renewals that are due, and return the fetches that ended.

        An ended fetch has landed, was cancelled, or has nobody left to ask; no pull of it runs.
        """
        if now >= self._renew_at:
            self._renew_at = now + self.context.lease.renew_s
            self._renew(now)
        ended: list[Fetch] = []
        for fetch in list(self.fetches.values()):
            fetch.advance(now)
            if fetch.pulls_began_at:
                continue
            draining = fetch.xfer is None
            cancelled = fetch.ending is not None
            if fetch.landed or (draining and (cancelled or not self._begin(fetch, now))):
                del self.fetches[fetch.xfer_id]
                fetch.end()
                ended.append(fetch)
        return ended

    def _begin(self, fetch: Fetch, now: float) -> bool:
        """Start the next attempt at the next candidate with a link; False: nothing is left."""
        while fetch.candidates and fetch.attempt < self.context.transport.max_attempts:
            link = self.peers.link(fetch.candidates.popleft().peer)
            if link is not None:
                fetch.begin(link, self._incarnation, now)
                return True
        return False

    def _find(self, peer: PeerId, message: KVReady | PrefillRefused) -> Fetch | None:
        """The fetch whose attempt under way a message of the peer that was asked is about."""
        fetch = self.fetches.get(message.xfer.xfer_id)
        if fetch is None or fetch.xfer != message.xfer:
            self.context.metrics.dropped(type(message).__name__).inc()
        elif fetch.peer != peer:
            self.context.refusals.foreign(peer, message)
        else:
            return fetch
        return None

    def _renew(self, now: float) -> None:
        by_peer: dict[PeerId, list[Xfer]] = {}
        for fetch in self.fetches.values():
            if fetch.xfer is not None:
                by_peer.setdefault(fetch.peer, []).append(fetch.xfer)
        oldest = now - self.context.lease.decode_window_s
        self._renewals = {k: v for k, v in self._renewals.items() if v[0] > oldest}
        for peer, xfers in by_peer.items():
            self._seq += 1
            self._renewals[peer, self._seq] = now, tuple(xfers)
            self.context.send(peer, Renew(self._seq, tuple(xfers)))


def poll_after_s(pulls_began_at: Sequence[float], now: float) -> float:
    """Say how long the loop may sleep before it has to poll its youngest pull; inf: none runs."""
    if not pulls_began_at:
        return math.inf
    age_s = now - max(pulls_began_at)
    return min(age_s / 8, LONGEST_POLL_S) if age_s > YOUNG_S else 0.0
