"""One request's KV on its way from a prefill worker, over one or more attempts.

    asked ── KVReady ──> pulls run while more is announced ── all landed in the window ──> landed
      │ refused, peer lost, lease ended, pull failed or too old
      └──> draining ── every pull over ──> `Inbound` begins the next attempt, or gives up

Pages are bound to the request in order and stay bound over attempts, because only our own pulls
write them; whole pages that landed count for the next attempt.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from worker.api import AnyMessage, Candidate, KVReady, PeerId, Prefill, Release, Xfer
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout
from worker.config import LeaseConfig, TransportConfig
from worker.errors import OutOfPages, Revoked, TransferError, TransferTimeout
from worker.metrics import WorkerMetrics
from worker.pull.lease import PullWindow
from worker.schedule.req import Req
from worker.transfer.base import Peer, Pull, PullState
from worker.transfer.layout import PoolPages, plan_runs

log = logging.getLogger("kvlane.fetch")
RATE_WEIGHT = 0.1  # of the newest pull in the moving average of bytes per second


@dataclass(slots=True)
class FetchContext:
    """What all fetches of a worker share. Filled by Inbound."""

    book: PageBook
    layout: KVLayout
    send: Callable[[PeerId, AnyMessage], None]
    lease: LeaseConfig
    transport: TransportConfig
    metrics: WorkerMetrics
    bytes_per_s: float = 0.0  # moving average over pulls; 0 = none yet

    @property
    def label(self) -> str:
        """Name and kind of the transport, as metrics show it."""
        return f"{self.transport.name}/{self.transport.kind}"


class _Ready(NamedTuple):
    """What may be pulled: pages by their number in the prompt, and the layer groups of them."""

    numbers: tuple[int, ...]
    remote: tuple[int, ...]  # page ids of the peer
    groups: range


@dataclass(slots=True)
class _Range:
    """A pull under way."""

    pull: Pull
    link: Peer
    began_at: float
    ready: _Ready


class Fetch:
    """Brings KV of req.tokens[:-1] into req.hold.

    `xfer` is the attempt under way, None while draining. `num_landed` counts the pages of the
    prompt that are here without a gap, those matched in the tree included.
    """

    def __init__(
        self, context: FetchContext, req: Req, candidates: list[Candidate], number: int, now: float
    ) -> None:
        assert req.hold is not None
        self.xfer_id = f"{req.req_id}:{req.dispatch}:{number}"  # the same over all attempts
        self.req = req
        self.hold = req.hold
        self.candidates = deque(candidates)
        self.xfer: Xfer | None = None
        self.peer: PeerId = ""
        self.attempt = 0
        self.aborted = False
        self.num_landed = len(req.hold.pages)
        self._context = context
        self._began_at = now
        self._sent_at = now
        self._window = PullWindow(context.lease.decode_window_s)
        self._computed_at = 0.0  # when this attempt's last page was announced
        self._prefill_s = 0.0
        self._pool_pages = PoolPages(0, 0)  # of this attempt
        self._announced: deque[_Ready] = deque()  # not bound and pulled yet
        self._ranges: list[_Range] = []
        # Number of a page in the prompt -> its layer groups, as bits, in this attempt.
        self._seen_groups: dict[int, int] = {}
        self._landed_groups: dict[int, int] = {}

    @property
    def pulls_began_at(self) -> list[float]:
        """When each pull that runs began."""
        return [each.began_at for each in self._ranges]

    @property
    def landed(self) -> bool:
        """All that is wanted is here, read under the lease."""
        return self.num_landed == self._num_wanted

    @property
    def _num_wanted(self) -> int:
        return self._context.book.num_pages_for(len(self.req.tokens) - 1)

    def uses(self, link: Peer) -> bool:
        """Whether a pull over `link` runs."""
        return any(each.link is link for each in self._ranges)

    def begin(
        self,
        peer: PeerId,
        incarnation: str,
        now: float,
        pool_pages: PoolPages,
        link_bytes_per_s: float = 0.0,
    ) -> None:
        """Ask `peer`, with no pull of an earlier attempt running.

        `pool_pages`: of our pool and the peer's.
        `link_bytes_per_s`: what its link was measured at; 0 = not known.
        """
        assert not self._ranges
        self.attempt += 1
        prefill = peer.rpartition("/")[2]
        self.xfer = Xfer(self.xfer_id, self.attempt, incarnation, prefill)
        self.peer, self._sent_at = peer, now
        self._pool_pages = pool_pages
        self._window = PullWindow(self._context.lease.decode_window_s)
        self._computed_at = 0.0
        self._seen_groups.clear()
        self._landed_groups.clear()
        num_matched = self.num_landed * self._context.book.page_size
        tokens = tuple(self.req.tokens)
        self._context.send(peer, Prefill(self.xfer, tokens, num_matched, link_bytes_per_s))

    def announced(self, message: KVReady) -> None:
        """Pages may be pulled; also the acknowledgement of our Prefill.

        What was announced before is passed over: every renewal brings it again.
        """
        self._window.acknowledged(self._sent_at)
        req = self.req
        if len(req.tokens) == req.num_prompt_tokens:
            req.num_cached_tokens = max(req.num_cached_tokens, message.num_cached_tokens)
        if message.last and not self._computed_at:
            self._computed_at, self._prefill_s = time.monotonic(), message.prefill_s
        said = _bits(range(message.first_group, message.first_group + message.num_groups))
        fresh: dict[int, list[tuple[int, int]]] = {}  # by the groups that are new, as bits
        for number, remote in enumerate(message.pages, message.first_page):
            seen = self._seen_groups.get(number, 0)
            if said & ~seen and self.num_landed <= number < self._num_wanted:
                self._seen_groups[number] = seen | said
                fresh.setdefault(said & ~seen, []).append((number, remote))
        for new, pairs in fresh.items():
            numbers, pages = zip(*pairs, strict=True)
            self._announced.extend(_Ready(numbers, pages, groups) for groups in _ranges(new))

    def renewed(self, sent_at: float) -> None:
        """The renewal that we sent at `sent_at` was acknowledged."""
        self._window.acknowledged(sent_at)

    def advance(self, link: Peer | None, now: float) -> None:
        """Start the pulls that can start, move the others on, notice what has failed."""
        if self.xfer is not None:
            self._start_pulls(link, now)
            answered = self._window.ends_at > 0
            first = self._sent_at + self._context.lease.decode_window_s
            if now > (self._window.ends_at if answered else first):
                self.fail(Revoked.code, "its lease ended")
        for each in list(self._ranges):
            self._advance_range(each)

    def fail(self, cause: str, why: str) -> None:
        """The attempt is over without success."""
        log.warning("req_id=%s attempt %d at %s: %s", self.req.req_id, self.attempt, self.peer, why)
        self._context.metrics.fetch_retries(cause).inc()
        self.drain()

    def drain(self) -> None:
        """End the attempt: nothing new is issued, what runs is cancelled and awaited."""
        if self.xfer is not None:
            self._context.send(self.peer, Release(self.xfer))
        self.xfer = None
        self._announced.clear()
        for each in self._ranges:
            each.pull.cancel()

    def end(self) -> None:
        """Tell the request what is here now; no pull runs any more."""
        assert not self._ranges
        landed = self.landed and self.xfer is not None
        self.drain()
        num_tokens = self.num_landed * self._context.book.page_size
        self.req.num_computed_tokens = min(num_tokens, len(self.req.tokens) - 1)
        if landed:
            marks = self.req.marks
            if not marks.row_at:
                marks.announced_at, marks.prefill_s = self._computed_at, self._prefill_s
                marks.prefilled_by = self.peer
            took_s = time.monotonic() - self._began_at
            self._context.metrics.fetch_seconds(self._context.label).observe(took_s)

    def _start_pulls(self, link: Peer | None, now: float) -> None:
        """Bind page ids for what was announced and pull into them, in order."""
        book = self._context.book
        while self._announced and link is not None:
            ready = self._announced[0]
            try:
                book.bind(self.hold, (ready.numbers[-1] + 1) * book.page_size, for_pull=True)
            except OutOfPages:
                return  # pages still cool; the step in flight settles soon
            self._announced.popleft()
            local = [self.hold.pages[number] for number in ready.numbers]
            pairs = list(zip(local, ready.remote, strict=True))
            runs = plan_runs(self._context.layout, pairs, self._pool_pages, ready.groups)
            pull = link.pull(runs)
            self._ranges.append(_Range(pull, link, now, ready))

    def _advance_range(self, each: _Range) -> None:
        state = each.pull.poll()
        now = time.monotonic()
        if state is PullState.RUNNING:
            too_old = now - each.began_at > self._context.transport.pull_timeout_s
            if too_old and self.xfer is not None:
                self.fail(TransferTimeout.code, "a pull took too long")
            return
        self._ranges.remove(each)
        self._context.metrics.pulls(self._context.label, state.value).inc()
        if self.xfer is None:
            return  # draining: whatever arrived, nobody trusts it
        if state is PullState.FAILED:
            self.fail(TransferError.code, each.pull.error or "pull failed")
        elif not self._window.covers(now):
            self.fail(Revoked.code, "a pull ended outside its lease")
        else:
            self._count(each, now - each.began_at)

    def _count(self, each: _Range, took_s: float) -> None:
        context = self._context
        context.metrics.pulled_bytes(context.label).inc(each.pull.num_bytes)
        context.metrics.pull_seconds(context.label).observe(took_s)
        rate = each.pull.num_bytes / max(took_s, 1e-6)
        old = context.bytes_per_s
        context.bytes_per_s = rate if not old else (1 - RATE_WEIGHT) * old + RATE_WEIGHT * rate
        landed = self._landed_groups
        for number in each.ready.numbers:
            landed[number] = landed.get(number, 0) | _bits(each.ready.groups)
        all_groups = _bits(range(context.layout.regions[0].num_groups))
        while landed.get(self.num_landed, 0) == all_groups:
            self.num_landed += 1


def _bits(groups: range) -> int:
    return sum(1 << group for group in groups)


def _ranges(bits: int) -> Iterator[range]:
    """Runs of set bits, lowest first."""
    first = 0
    while bits >> first:
        first += ((bits >> first) & -(bits >> first)).bit_length() - 1  # to the next set bit
        length = (~(bits >> first) & ((bits >> first) + 1)).bit_length() - 1  # ones from there on
        yield range(first, first + length)
        first += length
