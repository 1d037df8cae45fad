"""Prefill's side of the pull protocol: announcements, and the leases that pin announced pages.

A lease begins with `Prefill`, is prolonged by `Renew` and ends with `Release` or by itself. Its
pages are never preempted or given away before that: a decode worker that has gone silent may still
be reading them. Each renewal is answered with all that was announced before, too: an announcement
that a broken connection swallowed costs no more than the time to the next renewal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.api import (
    AnyMessage,
    Error,
    KVReady,
    PeerId,
    Prefill,
    PrefillRefused,
    Release,
    Renew,
    RenewAck,
    Xfer,
)
from worker.config import LeaseConfig
from worker.errors import Busy, UserError
from worker.metrics import WorkerMetrics
from worker.plan import Chunk
from worker.pull.lease import PinLease
from worker.schedule.prefill import PrefillScheduler
from worker.schedule.req import PrefillReq

log = logging.getLogger("kvlane.outbound")
BUSY_RETRY_S = 0.1


@dataclass(slots=True, eq=False)
class _Pinned:
    """One transfer as its source sees it."""

    xfer: Xfer
    peer: PeerId
    req: PrefillReq
    lease: PinLease
    first_page: int  # of the prompt, that decode does not hold itself


class Outbound:
    """All transfers that this prefill worker is the source of."""

    def __init__(
        self,
        incarnation: str,
        scheduler: PrefillScheduler,
        num_groups: int,
        send: Callable[[PeerId, AnyMessage], None],
        lease: LeaseConfig,
        metrics: WorkerMetrics,
    ) -> None:
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._page_size = scheduler.book.page_size
        self._num_groups = num_groups
        self._send = send
        self._window_s = lease.prefill_window_s
        self._metrics = metrics
        self._pinned: dict[Xfer, _Pinned] = {}
        self._by_req: dict[PrefillReq, _Pinned] = {}
        self.draining = False

    @property
    def num_leases(self) -> int:
        """Leases that live."""
        return len(self._pinned)

    def on_prefill(self, peer: PeerId, message: Prefill, now: float) -> None:
        """Admit a prompt and announce what is cached of it; or refuse."""
        xfer = message.xfer
        attempts = [
            x for x in self._pinned if x.xfer_id == xfer.xfer_id and x.decode == xfer.decode
        ]
        known = any(x.attempt >= xfer.attempt for x in attempts)
        if known or xfer.prefill != self._incarnation:
            self._metrics.dropped("Prefill").inc()
            return
        for older in attempts:
            self._drop(self._pinned[older])  # decode asks again only when its pulls are over
        if not 0 <= message.num_matched < len(message.tokens) - 1:
            self._refuse(peer, xfer, UserError("nothing to prefill"))
            return
        req = None
        if not self.draining:
            req = self._scheduler.admit(xfer.xfer_id, message.tokens, message.link_bytes_per_s)
        if req is None:
            reason = "draining" if self.draining else "no room"
            self._refuse(peer, xfer, Busy(reason, BUSY_RETRY_S))
            return
        first_page = req.num_announced_pages = message.num_matched // self._page_size
        self._metrics.cached_tokens.inc(req.num_computed_tokens)
        lease = PinLease(self._window_s, now + self._window_s)
        pinned = _Pinned(xfer, peer, req, lease, first_page)
        self._pinned[xfer] = self._by_req[req] = pinned
        self._announce(pinned, first_page)

    def on_renew(self, peer: PeerId, message: Renew, now: float) -> None:
        """Prolong the leases that live, say again what is ready, and name them in the answer."""
        held = [self._pinned[xfer] for xfer in message.xfers if xfer in self._pinned]
        for pinned in held:
            pinned.lease.renewed(now)
            self._announce(pinned, pinned.first_page)
        self._send(peer, RenewAck(message.seq, tuple(pinned.xfer for pinned in held)))

    def on_release(self, message: Release) -> None:
        """Decode has it, or no longer wants it."""
        pinned = self._pinned.get(message.xfer)
        if pinned is not None:
            self._drop(pinned)

    def groups_final(
        self, chunks: Sequence[tuple[PrefillReq, Chunk]], num_groups: int, now: float
    ) -> None:
        """The first `num_groups` layer groups of these chunks are final; their step is under way.

        Only for the step that settles in this turn: the KV of all steps before it is announced, and
        no Release of what is said here is handled before.
        """
        for req, chunk in chunks:
            first_group = req.num_announced_groups
            if req.dropped or num_groups <= first_group:
                continue
            req.num_announced_groups = num_groups
            end = chunk.start + len(chunk.tokens)
            last = end == req.num_target_tokens and self._all_told(req)
            if last:
                req.prefill_s = now - req.started_at
            pages = self._pages(req, req.num_announced_pages, end)
            if pages:
                groups = range(first_group, num_groups)
                self._say(self._by_req[req], req.num_announced_pages, pages, groups, last=last)

    def grown(self, reqs: Sequence[PrefillReq], now: float) -> None:
        """A step has settled: announce what has become final by it and was not announced yet."""
        for req in reqs:
            if not self._all_told(req):
                req.prefill_s = now - req.started_at
            self._announce(self._by_req[req], req.num_announced_pages, req.num_announced_groups)
            req.num_announced_groups = 0

    def sweep(self, now: float) -> None:
        """Let go of what nobody renewed."""
        for pinned in [each for each in self._pinned.values() if each.lease.expired(now)]:
            log.warning("lease of %s ended without a release", pinned.xfer.xfer_id)
            self._metrics.lease_expired.inc()
            self._drop(pinned)

    def _all_told(self, req: PrefillReq) -> bool:
        """Whether all layer groups of a chunk are announced that is still being computed."""
        return req.num_announced_groups == self._num_groups

    def _announce(self, pinned: _Pinned, first: int, first_group: int = 0) -> None:
        """Pages from number `first` on, as far as all is computed, from `first_group` on.

        The first announcement goes out even without pages: it acknowledges the request.
        """
        req = pinned.req
        pages = self._pages(req, first, req.num_computed_tokens)
        req.num_announced_pages = max(req.num_announced_pages, first + len(pages))
        last = req.num_computed_tokens == req.num_target_tokens
        if first_group < self._num_groups:
            self._say(pinned, first, pages, range(first_group, self._num_groups), last=last)

    def _pages(self, req: PrefillReq, first: int, num_tokens: int) -> tuple[int, ...]:
        """Ids of the pages from number `first` on that are whole after `num_tokens` tokens.

        The last one of a prompt is as whole as it gets.
        """
        end = num_tokens // self._page_size
        if num_tokens == req.num_target_tokens:
            end = -(-num_tokens // self._page_size)
        return tuple(req.hold.pages[first:end])

    def _say(
        self, pinned: _Pinned, first: int, pages: tuple[int, ...], groups: range, *, last: bool
    ) -> None:
        cached, prefill_s = pinned.req.hold.num_matched, pinned.req.prefill_s
        self._send(
            pinned.peer,
            KVReady(pinned.xfer, first, pages, groups.start, len(groups), last, cached, prefill_s),
        )

    def _refuse(self, peer: PeerId, xfer: Xfer, error: Busy | UserError) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, Busy) else 0.0
        self._send(peer, PrefillRefused(xfer, Error(error.code, str(error)), retry_after_s))

    def _drop(self, pinned: _Pinned) -> None:
        del self._pinned[pinned.xfer]
        del self._by_req[pinned.req]
        self._scheduler.drop(pinned.req)
