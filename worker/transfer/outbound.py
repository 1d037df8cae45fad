"""Prefill's side of the pull protocol: announcements, and the leases that pin announced pages.

    Prefill    a lease begins; cached pages are announced
    Renew      the lease is extended; all KV of settled steps is announced again
    Release    the lease ends; so it does with the Prefill of a later attempt, or when it expires

Pages of a lease are not given away before it has ended: a decode worker that has gone silent may
still read them. A lost announcement comes again with the first renewal after its step has settled.
The token that decode asked for comes with the announcement marked `last`, which names no pages if
all layer groups were announced while their step computed. So does the slot of a recurrent state,
which is final once its last step has settled.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worker.api import (
    AnyMessage,
    Error,
    FinishReason,
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
from worker.errors import Busy, KvlaneError, Revoked, UserError
from worker.keyring import Refusals
from worker.observe.metrics import WorkerMetrics
from worker.plan import Chunk
from worker.schedule.prefill import PrefillScheduler
from worker.schedule.req import PrefillReq
from worker.schedule.shares import Shares, num_pages
from worker.seldom import Seldom
from worker.transfer.lease import Lease
from worker.transfer.seal import sealed

if TYPE_CHECKING:
    from worker.observe.spans import Tracer

log = logging.getLogger("kvlane.outbound")


@dataclass(slots=True, eq=False)
class _Outgoing:
    xfer: Xfer
    peer: PeerId
    req: PrefillReq
    lease: Lease
    first_page: int  # index in the prompt of the first page that decode lacks
    key: bytes  # of announcements


@dataclass(slots=True, eq=False)
class Outbound:
    """All transfers of one prefill worker."""

    incarnation: str
    scheduler: PrefillScheduler
    num_groups: int  # layer groups that are announced one by one
    send: Callable[[PeerId, AnyMessage], None]
    lease: LeaseConfig
    metrics: WorkerMetrics
    refusals: Refusals
    tracer: "Tracer | None" = None
    draining: bool = False
    shares: Shares = field(default_factory=lambda: Shares("decode"))
    _outgoing: dict[Xfer, _Outgoing] = field(default_factory=dict)
    _log: Seldom = field(default_factory=Seldom)
    _by_req: dict[PrefillReq, _Outgoing] = field(default_factory=dict)

    @property
    def num_leases(self) -> int:
        """Leases that live."""
        return len(self._outgoing)

    def on_prefill(self, peer: PeerId, message: Prefill, now: float) -> None:
        """Admit a prompt and announce its cached pages, or refuse it."""
        xfer = message.xfer
        if xfer.decode != peer.rpartition("/")[2]:
            self.refusals.foreign(peer, message)
            return
        same = xfer.xfer_id, xfer.decode
        attempts = [x for x in self._outgoing if (x.xfer_id, x.decode) == same]
        known = any(x.attempt >= xfer.attempt for x in attempts)
        if known or xfer.prefill != self.incarnation:
            self.metrics.dropped("Prefill").inc()
            return
        for older in attempts:
            self._drop(self._outgoing[older])  # decode asks again only when its pulls are over
        try:
            # Of a prompt whose pages are all there, decode may want the state.
            most = len(message.tokens) - (2 if not self.scheduler.book.num_slots else 1)
            if not 0 <= message.num_matched <= most:
                raise UserError("nothing to prefill")
            if self.draining:
                raise Busy("draining")
            if (req := self.scheduler.admit(message)) is None:
                raise Busy("no room")
            if not self._is_shared(peer):
                self.scheduler.drop(req)
                raise Busy("no room for this worker")
        except KvlaneError as error:
            log.debug("xfer_id=%s from %s refused: %s", xfer.xfer_id, peer, error)
            self.send(peer, PrefillRefused(xfer, Error(error.code, str(error))))
            return
        log.debug("xfer_id=%s from %s: %d tokens", xfer.xfer_id, peer, len(message.tokens))
        first_page = req.num_announced_pages = message.num_matched // self.scheduler.book.page_size
        self.metrics.queried_tokens.inc(len(message.tokens))
        self.metrics.cached_tokens.inc(req.hold.num_matched)
        self.metrics.recomputed_tokens.inc(req.hold.num_matched - req.num_cached_tokens)
        lease = Lease(self.lease.prefill_window_s, now)
        outgoing = _Outgoing(xfer, peer, req, lease, first_page, message.key)
        self._outgoing[xfer] = self._by_req[req] = outgoing
        if message.trace and self.tracer is not None:
            req.trace = self.tracer.carried(message.trace, now)
            cached = {"kvlane.cached_tokens": req.num_computed_tokens}
            req.trace.enter("prefill_queue", now, cached)
            if req.num_computed_tokens == req.num_target_tokens:
                req.trace.leave(now)
        self._announce(outgoing, first_page)

    def _is_shared(self, peer: PeerId) -> bool:
        """Whether others have room enough, now that a prompt of the peer's is admitted."""
        limit, waiting, book = self.scheduler.max_reqs, self.scheduler.waiting, self.scheduler.book
        living = self._outgoing.values()
        queued = ((outgoing.peer, 1) for outgoing in living if outgoing.req in waiting)
        pages = ((outgoing.peer, num_pages(outgoing.req.hold)) for outgoing in living)
        return self.shares.allow(peer, limit, limit - len(waiting), queued) and self.shares.allow(
            peer, book.num_pages, book.num_available, pages
        )

    def on_renew(self, peer: PeerId, message: Renew, now: float) -> None:
        """Extend the leases that live, announce their pages again, and acknowledge the leases."""
        held = tuple(xfer for xfer in message.xfers if self._of(peer, xfer, message) is not None)
        for xfer in held:
            outgoing = self._outgoing[xfer]
            outgoing.lease.renewed(now)
            self._announce(outgoing, outgoing.first_page)
        self.send(peer, RenewAck(message.seq, held))

    def on_release(self, peer: PeerId, message: Release) -> None:
        """End the lease: decode has all KV, or no longer wants it."""
        if (outgoing := self._of(peer, message.xfer, message)) is not None:
            self._drop(outgoing)

    def _of(self, peer: PeerId, xfer: Xfer, message: object) -> _Outgoing | None:
        """A transfer that lives, if it is the peer's, of which `message` speaks."""
        outgoing = self._outgoing.get(xfer)
        if outgoing is None or outgoing.peer == peer:
            return outgoing
        self.refusals.foreign(peer, message)
        return None

    def announce_groups(
        self, chunks: Sequence[tuple[PrefillReq, Chunk]], num_final: int, now: float
    ) -> None:
        """Announce the first `num_final` layer groups of chunks that are being computed.

        Call it only for the running step (`Flight.running`): after the turn has handled its
        messages and before that step settles. By then all KV of earlier steps has been announced. A
        request that a Release has dropped since its step was launched is passed over (`dropped`).
        """
        for req, chunk in chunks:
            groups = range(req.num_announced_groups, num_final)
            if req.dropped or not groups:
                continue
            req.num_announced_groups = num_final
            end, first_page = chunk.start + len(chunk.tokens), req.num_announced_pages
            if req.num_announced_groups == self.num_groups:
                req.prefill_s = now - req.started_at
            if self._pages(req, first_page, end):
                self._send_ready(self._by_req[req], first_page, end, groups)

    def announce_settled(self, reqs: Sequence[PrefillReq], now: float) -> None:
        """Announce KV that the settled step made final, unless `announce_groups` already has."""
        for req in reqs:
            if req.token is not None or req.num_announced_groups < self.num_groups:
                req.prefill_s = now - req.started_at
            self._announce(self._by_req[req], req.num_announced_pages, req.num_announced_groups)
            req.num_announced_groups = 0

    def announce_found(self, req: PrefillReq) -> None:
        """Announce pages that a tier has brought."""
        if (outgoing := self._by_req.get(req)) is not None:
            self._announce(outgoing, req.num_announced_pages)

    def sweep(self, now: float) -> None:
        """Drop transfers whose lease has expired."""
        for outgoing in list(self._outgoing.values()):
            if outgoing.lease.expired(now):
                is_news = self._log.news(outgoing.peer, "lets leases end")
                text = "xfer_id=%s: its lease ended without a release of %s"
                level = logging.WARNING if is_news else logging.DEBUG
                log.log(level, text, outgoing.xfer.xfer_id, outgoing.peer)
                self.metrics.lease_expired.inc()
                self._drop(outgoing, Revoked.code)

    def _announce(self, outgoing: _Outgoing, first_page: int, first_group: int = 0) -> None:
        """Announce computed pages from index `first_page` on, layer groups from `first_group` on.

        A KVReady is sent even without pages: a request's first KVReady acknowledges its Prefill.
        """
        req, groups = outgoing.req, range(first_group, self.num_groups)
        num_pages = len(self._pages(req, first_page, req.num_stored_tokens))
        req.num_announced_pages = max(req.num_announced_pages, first_page + num_pages)
        if groups or req.token is not None or req.hold.slot:
            self._send_ready(outgoing, first_page, req.num_stored_tokens, groups)

    def _send_ready(
        self, outgoing: _Outgoing, first_page: int, num_tokens: int, groups: range
    ) -> None:
        req = outgoing.req
        pages = self._pages(req, first_page, num_tokens) if groups else ()
        final = num_tokens == req.num_target_tokens and groups.stop == self.num_groups
        last = final and not req.awaits_token
        slot = req.hold.slot
        if slot and req.num_computed_tokens < req.num_target_tokens:
            last = False  # its last step has not settled
        figures = groups.start, len(groups), last, req.num_cached_tokens, req.prefill_s, req.token
        ready = KVReady(outgoing.xfer, first_page, pages, *figures, slot if last else 0)
        self.send(outgoing.peer, sealed(ready, outgoing.key))

    def _pages(self, req: PrefillReq, first: int, num_tokens: int) -> tuple[int, ...]:
        """Ids of the pages, from index `first` on, whose KV is complete after `num_tokens` tokens.

        Full pages only; at the end of the prompt its last, partly filled page as well.
        """
        page_size, at_end = self.scheduler.book.page_size, num_tokens == req.num_target_tokens
        end = -(-num_tokens // page_size) if at_end else num_tokens // page_size
        return tuple(req.hold.pages[first:end])

    def _drop(self, outgoing: _Outgoing, cause: str = FinishReason.ABORT.value) -> None:
        if outgoing.req.trace is not None:  # if it is in a stage, that is cut off
            outgoing.req.trace.leave(time.monotonic(), error=cause)
        del self._outgoing[outgoing.xfer]
        del self._by_req[outgoing.req]
        self.scheduler.drop(outgoing.req)
