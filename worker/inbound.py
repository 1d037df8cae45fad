"""Decode's side of the pull protocol (ARCHITECTURE section 4, steps 4 to 6).

One Fetch brings the KV of one request, over one or more attempts:

    ASKED ── KVReady ──> pulls run while more is announced ── all landed in the window ──> landed
      │ refused, peer lost, lease ended, pull failed or too old
      └──> DRAINING ── every pull over ──> next candidate, or none left: exhausted

Pages are bound to the request in order and stay bound over attempts, because only our own pulls
write them; whole pages that landed count for the next attempt.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from worker.api import (
    AnyMessage,
    Candidate,
    KVReady,
    PeerId,
    Prefill,
    PrefillRefused,
    Release,
    Renew,
    RenewAck,
    Xfer,
)
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout
from worker.config import LeaseConfig, TransportConfig
from worker.errors import (
    OutOfPages,
    PeerLost,
    Revoked,
    TransferError,
    TransferTimeout,
)
from worker.lease import PullWindow
from worker.metrics import WorkerMetrics
from worker.peers import PrefillPeers
from worker.req import Req
from worker.transfer.base import Peer, Pull, PullState
from worker.transfer.layout import plan_runs

log = logging.getLogger("kvlane.inbound")


@dataclass(slots=True)
class _Range:
    """A pull under way: pages [first_page, first_page + num_pages) of the prompt, some groups."""

    pull: Pull
    link: Peer
    began_at: float
    first_page: int
    num_pages: int
    num_groups: int


@dataclass(slots=True, eq=False)
class Fetch:
    """One request's KV on its way. Filled by Inbound only."""

    req: Req
    candidates: deque[Candidate]
    window: PullWindow
    began_at: float
    xfer: Xfer | None = None  # None while draining between attempts
    peer: PeerId = ""
    attempt: int = 0
    sent_at: float = 0.0
    announced: deque[KVReady] = field(default_factory=deque)  # not bound and pulled yet
    ranges: list[_Range] = field(default_factory=list)
    landed_groups: dict[int, int] = field(default_factory=dict)  # page of the prompt -> groups
    num_landed: int = 0  # pages of the prompt that are here without a gap, matched ones included
    aborted: bool = False


@dataclass(slots=True, frozen=True)
class Arrived:
    """A fetch that is over, with no pull running: all landed, or nobody left to ask, or aborted."""

    req: Req
    landed: bool
    aborted: bool


class Inbound:
    """All fetches of one decode worker."""

    def __init__(
        self,
        incarnation: str,
        book: PageBook,
        layout: KVLayout,
        peers: PrefillPeers,
        send: Callable[[PeerId, AnyMessage], None],
        lease: LeaseConfig,
        transport: TransportConfig,
        metrics: WorkerMetrics,
    ) -> None:
        self._incarnation = incarnation
        self._book = book
        self._layout = layout
        self._peers = peers
        self._send = send
        self._lease = lease
        self._transport = transport
        self._metrics = metrics
        self._label = f"{transport.name}/{transport.kind}"
        self._fetches: dict[str, Fetch] = {}  # by xfer_id
        self._by_req: dict[Req, Fetch] = {}
        self._renew_at = 0.0
        self._renewals: dict[tuple[PeerId, int], tuple[float, tuple[Xfer, ...]]] = {}
        self._seq = 0
        self.bytes_per_s = 0.0  # moving average over pulls; 0 = none yet

    @property
    def num_fetches(self) -> int:
        """Requests whose KV is on its way."""
        return len(self._fetches)

    @property
    def num_pulls(self) -> int:
        """Pulls that run."""
        return sum(len(fetch.ranges) for fetch in self._fetches.values())

    def uses(self, link: Peer) -> bool:
        """Whether a pull over `link` runs."""
        return any(r.link is link for fetch in self._fetches.values() for r in fetch.ranges)

    def start(self, req: Req, candidates: Sequence[Candidate], now: float) -> bool:
        """Ask the first candidate that can be pulled from; False when there is none."""
        assert req.hold is not None
        fetch = Fetch(req, deque(candidates), PullWindow(self._lease.decode_window_s), now)
        fetch.num_landed = len(req.hold.pages)
        return self._next_attempt(fetch, now)

    def abort(self, req: Req) -> None:
        """No longer wanted; `poll` returns it as aborted once its pulls are over."""
        fetch = self._by_req.get(req)
        if fetch is not None and not fetch.aborted:
            fetch.aborted = True
            self._drain(fetch)

    # Messages.

    def on_ready(self, message: KVReady, now: float) -> None:
        """Pages may be pulled; also the acknowledgement of our Prefill."""
        fetch = self._find(message.xfer, "KVReady")
        if fetch is None:
            return
        fetch.window.acknowledged(fetch.sent_at)
        req = fetch.req
        if len(req.tokens) == req.num_prompt_tokens:
            req.num_cached_tokens = max(req.num_cached_tokens, message.num_cached_tokens)
        if message.pages:
            fetch.announced.append(message)

    def on_refused(self, message: PrefillRefused, now: float) -> None:
        """That worker has no room; try the next."""
        fetch = self._find(message.xfer, "PrefillRefused")
        if fetch is not None:
            self._fail(fetch, "busy", message.error.message)

    def on_renew_ack(self, peer: PeerId, message: RenewAck) -> None:
        """Prolong what the peer still holds; what it no longer holds is lost."""
        sent_at, asked = self._renewals.pop((peer, message.seq), (0.0, ()))
        held = set(message.xfers)
        for xfer in asked:
            fetch = self._fetches.get(xfer.xfer_id)
            if fetch is None or fetch.xfer != xfer:
                continue
            if xfer in held:
                fetch.window.acknowledged(sent_at)
            else:
                self._fail(fetch, Revoked.code, "the prefill worker no longer holds it")

    def on_lost(self, peer: PeerId) -> None:
        """A prefill worker died: its fetches go on elsewhere."""
        for fetch in list(self._fetches.values()):
            if fetch.peer == peer and fetch.xfer is not None:
                self._fail(fetch, PeerLost.code, f"{peer} is lost")
        self._renewals = {key: value for key, value in self._renewals.items() if key[0] != peer}

    # Every turn.

    def poll(self, now: float) -> list[Arrived]:
        """Move all pulls on; the fetches that are over."""
        if now >= self._renew_at:
            self._renew_at = now + self._lease.renew_s
            self._renew(now)
        arrived: list[Arrived] = []
        for fetch in list(self._fetches.values()):
            if fetch.xfer is not None:
                self._bind_announced(fetch, now)
                self._check_window(fetch, now)
            self._poll_ranges(fetch)
            if fetch.ranges:
                continue
            if fetch.xfer is not None:
                if fetch.num_landed == self._num_wanted(fetch.req):
                    arrived.append(self._end(fetch, landed=True))
            elif fetch.aborted or not self._next_attempt(fetch, now):
                arrived.append(self._end(fetch, landed=False))
        return arrived

    def _num_wanted(self, req: Req) -> int:
        """Pages that KV of tokens[:-1] fills."""
        return self._book.num_pages_for(len(req.tokens) - 1)

    def _next_attempt(self, fetch: Fetch, now: float) -> bool:
        while fetch.candidates and fetch.attempt < self._transport.max_attempts:
            candidate = fetch.candidates.popleft()
            if self._peers.link(candidate.peer) is None:
                continue
            req = fetch.req
            fetch.attempt += 1
            xfer_id = f"{req.req_id}:{req.dispatch}:{len(req.tokens)}"
            prefill = candidate.peer.rpartition("/")[2]
            fetch.xfer = Xfer(xfer_id, fetch.attempt, self._incarnation, prefill)
            fetch.peer, fetch.sent_at = candidate.peer, now
            fetch.window = PullWindow(self._lease.decode_window_s)
            fetch.landed_groups.clear()
            self._fetches[xfer_id] = self._by_req[req] = fetch
            num_matched = fetch.num_landed * self._book.page_size
            self._send(fetch.peer, Prefill(fetch.xfer, tuple(req.tokens), num_matched))
            return True
        return False

    def _find(self, xfer: Xfer, kind: str) -> Fetch | None:
        fetch = self._fetches.get(xfer.xfer_id)
        if fetch is None or fetch.xfer != xfer:
            self._metrics.dropped(kind).inc()
            return None
        return fetch

    def _bind_announced(self, fetch: Fetch, now: float) -> None:
        """Bind page ids for what was announced and start its pulls, in order."""
        link = self._peers.link(fetch.peer)
        hold = fetch.req.hold
        assert hold is not None
        while fetch.announced and link is not None:
            ready = fetch.announced[0]
            end = ready.first_page + len(ready.pages)
            try:
                self._book.bind(hold, end * self._book.page_size, for_pull=True)
            except OutOfPages:
                return  # pages still cool; the step in flight settles soon
            fetch.announced.popleft()
            local = hold.pages[ready.first_page : end]
            groups = range(ready.first_group, ready.first_group + ready.num_groups)
            runs = plan_runs(self._layout, list(zip(local, ready.pages, strict=True)), groups)
            num_pages = len(ready.pages)
            fetch.ranges.append(
                _Range(link.pull(runs), link, now, ready.first_page, num_pages, ready.num_groups)
            )

    def _check_window(self, fetch: Fetch, now: float) -> None:
        answered = fetch.window.ends_at > 0
        limit = fetch.window.ends_at if answered else fetch.sent_at + self._lease.decode_window_s
        if now > limit:
            self._fail(fetch, Revoked.code, "its lease ended")

    def _poll_ranges(self, fetch: Fetch) -> None:
        for each in list(fetch.ranges):
            state = each.pull.poll()
            now = time.monotonic()
            if state is PullState.RUNNING:
                if now - each.began_at > self._transport.pull_timeout_s and fetch.xfer is not None:
                    self._fail(fetch, TransferTimeout.code, "a pull took too long")
                continue
            fetch.ranges.remove(each)
            self._metrics.pulls(self._label, state.value).inc()
            if state is PullState.FAILED:
                if fetch.xfer is not None:
                    self._fail(fetch, TransferError.code, each.pull.error or "pull failed")
            elif fetch.xfer is not None:
                self._landed(fetch, each, now)

    def _landed(self, fetch: Fetch, each: _Range, now: float) -> None:
        took_s = max(now - each.began_at, 1e-6)
        self._metrics.pulled_bytes(self._label).inc(each.pull.num_bytes)
        self._metrics.pull_seconds(self._label).observe(took_s)
        rate = each.pull.num_bytes / took_s
        self.bytes_per_s = rate if not self.bytes_per_s else 0.9 * self.bytes_per_s + 0.1 * rate
        if not fetch.window.covers(now):
            self._fail(fetch, Revoked.code, "a pull ended outside its lease")
            return
        for page in range(each.first_page, each.first_page + each.num_pages):
            groups = fetch.landed_groups.get(page, 0) + each.num_groups
            fetch.landed_groups[page] = groups
        while fetch.landed_groups.get(fetch.num_landed, 0) == self._num_groups:
            fetch.num_landed += 1

    @property
    def _num_groups(self) -> int:
        return self._layout.regions[0].num_groups

    def _fail(self, fetch: Fetch, cause: str, why: str) -> None:
        log.warning(
            "req_id=%s attempt %d at %s: %s", fetch.req.req_id, fetch.attempt, fetch.peer, why
        )
        self._metrics.fetch_retries(cause).inc()
        self._drain(fetch)

    def _drain(self, fetch: Fetch) -> None:
        """End the attempt: nothing new is issued, what runs is cancelled and awaited."""
        if fetch.xfer is not None:
            self._send(fetch.peer, Release(fetch.xfer))
        fetch.xfer = None
        fetch.announced.clear()
        for each in fetch.ranges:
            each.pull.cancel()

    def _end(self, fetch: Fetch, *, landed: bool) -> Arrived:
        req = fetch.req
        if fetch.xfer is not None:
            self._send(fetch.peer, Release(fetch.xfer))
        self._fetches = {key: each for key, each in self._fetches.items() if each is not fetch}
        self._by_req.pop(req, None)
        req.num_computed_tokens = fetch.num_landed * self._book.page_size
        if landed:
            req.num_computed_tokens = len(req.tokens) - 1
            self._metrics.fetch_seconds(self._label).observe(time.monotonic() - fetch.began_at)
        return Arrived(req, landed, fetch.aborted)

    def _renew(self, now: float) -> None:
        """One Renew for each peer with live fetches."""
        by_peer: dict[PeerId, list[Xfer]] = {}
        for fetch in self._fetches.values():
            if fetch.xfer is not None:
                by_peer.setdefault(fetch.peer, []).append(fetch.xfer)
        oldest = now - self._lease.decode_window_s
        self._renewals = {k: v for k, v in self._renewals.items() if v[0] > oldest}
        for peer, xfers in by_peer.items():
            self._seq += 1
            self._renewals[peer, self._seq] = now, tuple(xfers)
            self._send(peer, Renew(self._seq, tuple(xfers)))
