"""One request's KV on its way from a prefill worker, over one or more attempts.

    asked ── KVReady ──> pulls run while more is announced ── all ended within the lease ──> landed
      │ refused, peer lost, lease ended, pull failed or too old
      └──> draining ── every pull over ──> `Inbound` begins the next attempt, or gives up

Pages are bound to the request in prompt order, and stay bound when an attempt fails: only our own
pulls write to them. The next attempt pulls from the first page on that lacks a layer group. Where
all layers have a window, pages that nobody will read are neither asked for nor bound.

A prefill worker may draw the request's next token. It is appended to req.tokens when it arrives,
most often before the KV lands, and stays there if the attempt fails later.
"""

import logging
import math
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worker.api import AnyMessage, Candidate, FinishReason, KVReady, PeerId, Prefill, Release, Xfer
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout
from worker.config import LeaseConfig, TransportConfig
from worker.errors import OutOfPages, Revoked, TransferError, TransferTimeout
from worker.keyring import Refusals
from worker.observe.metrics import WorkerMetrics
from worker.schedule.asked import known
from worker.schedule.req import Req
from worker.seldom import Seldom
from worker.transfer.base import Pull, PullState
from worker.transfer.lease import Lease
from worker.transfer.seal import KEY_BYTES, is_sealed
from worker.transfer.sources import Link

log = logging.getLogger("kvlane.fetch")


@dataclass(slots=True)
class FetchContext:
    """The parts of a worker that all its fetches share."""

    book: PageBook
    layout: KVLayout
    send: Callable[[PeerId, AnyMessage], None]
    lease: LeaseConfig
    transport: TransportConfig
    metrics: WorkerMetrics
    refusals: Refusals
    vocab_size: int
    prefill_draws: bool  # disaggregation.first_token
    log: Seldom = field(default_factory=Seldom)

    def landed(self, link: Link, num_bytes: int, took_s: float, now: float) -> None:
        """Record a pull that has landed."""
        self.metrics.pulled_bytes(link.source.transport).inc(num_bytes)
        self.metrics.pull_seconds(link.source.transport).observe(took_s)
        link.rate.landed(num_bytes, took_s, now)


class _Ready(NamedTuple):
    """Announced pages that may be pulled, and which of their layer groups; or the state."""

    numbers: tuple[int, ...]  # of the pages, by their order in the prompt
    remote: tuple[int, ...]  # its page id at the peer
    groups: range
    state_slot: int = 0  # at the peer, and nothing else


class _RunningPull(NamedTuple):
    pull: Pull
    began_at: float
    ready: _Ready


class _Pages:
    """The prompt's pages in one attempt: which layer groups were announced, and have landed."""

    def __init__(self, num_groups: int) -> None:
        self.ready: deque[_Ready] = deque()  # announced, neither bound nor pulled yet
        self._num_groups = num_groups
        self._state_announced = self.state_landed = False
        # By index of a page in the prompt: bits of groups; number of groups.
        self._announced: dict[int, int] = {}
        self._num_landed: Counter[int] = Counter()

    def announce(self, message: KVReady, wanted: range) -> None:
        groups = ((1 << message.num_groups) - 1) << message.first_group
        fresh: dict[int, list[tuple[int, int]]] = {}  # bits of new groups -> (number, remote) pairs
        for number, remote in enumerate(message.pages, message.first_page):
            if number in wanted:
                seen = self._announced.get(number, 0)
                self._announced[number] = seen | groups
                fresh.setdefault(groups & ~seen, []).append((number, remote))
        if message.state_slot and not self._state_announced:
            self._state_announced = True
            self.ready.append(_Ready((), (), range(0), message.state_slot))
        for new, pairs in fresh.items():
            numbers, pages = zip(*pairs, strict=True)
            self.ready.extend(_Ready(numbers, pages, run) for run in bit_runs(new))

    def land(self, ready: _Ready) -> None:
        self.state_landed |= bool(ready.state_slot)
        for number in ready.numbers:
            self._num_landed[number] += len(ready.groups)

    def has_landed(self, number: int) -> bool:
        """Whether all layer groups of a page have landed; a group is pulled once."""
        return self._num_landed[number] == self._num_groups


class Fetch:
    """Brings KV of req.tokens[:-1] into req.hold.

    `xfer` is the attempt under way, None while draining. The first `num_landed_pages` pages of the
    prompt are in our pool, those matched in the prefix tree included; or nobody will read them.
    """

    def __init__(
        self, context: FetchContext, req: Req, candidates: Sequence[Candidate], number: int
    ) -> None:
        assert req.hold is not None
        # number: 1 for this worker's first fetch, 2 for the next, ...
        self.xfer_id = f"{req.req_id}:{req.dispatch}:{number}"
        self.req = req
        self.hold = req.hold
        self.candidates = deque(candidates)
        self.xfer: Xfer | None = None
        self.peer: PeerId = ""  # of the last attempt
        self.attempt = 0
        self.ending: FinishReason | None = None  # why req ends, once no pull runs; None: it goes on
        # Pages with all before them here, so that the rest of the prompt can be computed.
        self._num_found_pages = len(req.hold.pages)
        self._first_read = context.book.first_read(len(req.tokens) - 1)
        self.num_landed_pages = max(self._num_found_pages, self._first_read)
        self._context = context
        self._link: Link | None = None  # to `peer`
        self._transport = ""  # of it, as metrics show it
        self._key = b""  # of this attempt's announcements
        self._num_tokens = len(req.tokens)  # req.tokens is longer once a token came with the KV
        self._awaits_token = False  # the attempt under way is to bring one
        self._began_at = time.monotonic()
        self.lease = Lease(context.lease.decode_window_s, self._began_at)  # of the last attempt
        self._last_announced_at = 0.0  # when this attempt's announcement with `last` came
        self._num_bytes = 0  # pulled
        self._pull_s = self._pulled_at = 0.0  # in which pulls ran; until when
        self._pulls_from = 0.0  # when the first one began that has landed
        self._pages = _Pages(context.layout.num_groups)  # of the last attempt
        self._running: list[_RunningPull] = []

    @property
    def pulls_began_at(self) -> list[float]:
        """When the pulls that run began."""
        return [running.began_at for running in self._running]

    @property
    def landed(self) -> bool:
        """Whether all pages of tokens[:-1], and their state, are here, and no token is awaited."""
        has_state = self._pages.state_landed or not self.hold.slot
        return (
            not self._awaits_token and has_state and self.num_landed_pages >= self._num_wanted_pages
        )

    @property
    def _num_wanted_pages(self) -> int:
        num_tokens = len(self.req.tokens) - (not self._awaits_token)
        return self._context.book.num_pages_for(num_tokens)

    def uses(self, link: Link) -> bool:
        """Whether a pull over `link` runs."""
        return self._link is link and bool(self._running)

    def begin(self, link: Link, incarnation: str, now: float) -> None:
        """Start the next attempt by asking the peer of `link`; no earlier pull may run."""
        assert not self._running
        self.attempt += 1
        self._link, self.peer, self._transport = link, link.peer, link.source.transport
        self.xfer = Xfer(self.xfer_id, self.attempt, incarnation, link.peer.rpartition("/")[2])
        self.lease = Lease(self._context.lease.decode_window_s, now)
        self._last_announced_at = 0.0
        self._pages = _Pages(self._context.layout.num_groups)
        req, num_matched = self.req, self.num_landed_pages * self._context.book.page_size
        num_matched = min(num_matched, len(req.tokens) - 1)  # it may lack the state alone
        # One token a fetch at most: the hold has pages reserved for no more.
        is_first = len(req.tokens) == self._num_tokens
        draws = self._context.prefill_draws and not (req.leads and self.hold.slot)
        self._awaits_token = is_first and draws and req.sampling.is_plain
        sampling = req.sampling if self._awaits_token else None
        attributes = {"kvlane.worker": link.peer, "kvlane.placed": "remote"}
        req.timeline.enter("prefill", now, attributes, asks=True)
        rate = link.bytes_per_s_at(now)
        asked = tuple(req.tokens), num_matched, rate, sampling, req.num_prompt_tokens
        self._key = secrets.token_bytes(KEY_BYTES)
        rest = req.timeline.carried, req.salt, self._key
        self._context.send(link.peer, Prefill(self.xfer, *asked, *rest))

    def knows(self, message: KVReady) -> bool:
        """Whether an announcement is of whoever was asked in this attempt, as that one made it."""
        return is_sealed(message, self._key)

    def believes(self, message: KVReady) -> bool:
        """Whether an announcement can be; a worker gone bad may send any numbers."""
        first, num_groups = message.first_group, self._context.layout.num_groups
        return (
            0 <= first <= first + message.num_groups <= num_groups
            and (message.token is None or known((message.token,), self._context.vocab_size))
            and 0 <= message.prefill_s < math.inf
            and 0 <= message.num_cached_tokens <= len(self.req.tokens)
            and bool(self.hold.slot or not message.state_slot)
        )

    def announced(self, message: KVReady) -> bool:
        """Queue pages that are new; returns whether a token came, which ends req.tokens now."""
        req = self.req
        if len(req.tokens) == req.num_prompt_tokens:
            req.num_cached_tokens = max(req.num_cached_tokens, message.num_cached_tokens)
        if message.last and not self._last_announced_at:
            self._last_announced_at = now = time.monotonic()
            req.timeline.announced(now, message.prefill_s, self.peer, self._transport)
        self._pages.announce(message, range(self.num_landed_pages, self._num_wanted_pages))
        token = message.token if self._awaits_token else None
        if message.last:  # without a token: the worker is of a version that draws none
            self._awaits_token = False
        if token is not None:
            req.tokens.append(token)
        return token is not None

    def advance(self, now: float) -> None:
        """Start the pulls that can start, poll those that run, and notice failures."""
        if self.xfer is not None:
            self._start_pulls(now)
            if self.lease.expired(now):
                self.fail(Revoked.code, "its lease ended")
        for running in list(self._running):
            self._poll(running)

    def fail(self, cause: str, why: str) -> None:
        """End the attempt without success; metrics count it under `cause`.

        The log has the first, the tenth, the hundredth of a peer in ten minutes, others at DEBUG.
        """
        is_news = self._context.log.news(self.peer, f"fails fetches: {cause}")
        text, level = (
            "req_id=%s attempt %d at %s: %s",
            logging.WARNING if is_news else logging.DEBUG,
        )
        log.log(level, text, self.req.req_id, self.attempt, self.peer, why)
        self._context.metrics.fetch_retries(cause).inc()
        self.req.timeline.fail(time.monotonic(), cause, why)
        self.drain()

    def drain(self) -> None:
        """End the attempt: release the peer, start no new pull, cancel the running ones."""
        if self.xfer is not None:
            self._context.send(self.peer, Release(self.xfer))
        self.xfer, self._awaits_token = None, False
        self._pages.ready.clear()
        for running in self._running:
            running.pull.cancel()

    def end(self) -> None:
        """Set req.num_computed_tokens to landed tokens, and release the peer. No pull may run."""
        assert not self._running
        self.drain()
        book = self._context.book
        if self._first_read > self._num_found_pages and not self.landed:
            self.num_landed_pages = self._num_found_pages
            book.cut(self.hold, self._num_found_pages)
        num_tokens = self.num_landed_pages * book.page_size
        if self.hold.slot and not self.landed:
            num_tokens = 0  # pages without the state of their end: all is computed anew
        self.req.num_computed_tokens = min(num_tokens, len(self.req.tokens) - 1)
        book.trim(self.hold, self.req.num_computed_tokens)
        self.req.timeline.pulled(self._num_bytes, self._pull_s, self._pulls_from)
        if self.landed and self.ending is None:
            now, metrics = time.monotonic(), self._context.metrics
            metrics.fetch_seconds(self._transport).observe(now - self._began_at)
            if self._last_announced_at:
                metrics.transfer_seconds(self._transport).observe(now - self._last_announced_at)

    def _start_pulls(self, now: float) -> None:
        book, link = self._context.book, self._link
        if self._awaits_token and len(self.req.tokens) + 1 == self.req.max_len:
            return  # the awaited token will end the request: pull the KV only if none comes
        while self._pages.ready and link is not None:
            ready = self._pages.ready[0]
            if ready.state_slot:
                self._pages.ready.popleft()
                states = [(self.hold.slot, ready.state_slot)]
                pull = link.source.pull([], ready.groups, states)
                self._running.append(_RunningPull(pull, now, ready))
                continue
            try:
                num_slots = (ready.numbers[-1] + 1) * book.page_size
                book.bind(self.hold, num_slots, for_pull=True, first=self._first_read)
            except OutOfPages:
                return  # a step in flight may still use freed pages: try again next turn
            self._pages.ready.popleft()
            local = [self.hold.pages[number] for number in ready.numbers]
            pairs = list(zip(local, ready.remote, strict=True))
            self._running.append(_RunningPull(link.source.pull(pairs, ready.groups), now, ready))

    def _poll(self, running: _RunningPull) -> None:
        state = running.pull.poll()
        now = time.monotonic()
        if state is PullState.RUNNING:
            too_old = now - running.began_at > self._context.transport.pull_timeout_s
            if too_old and self.xfer is not None:
                self.fail(TransferTimeout.code, "a pull took too long")
            return
        self._running.remove(running)
        self._context.metrics.pulls(self._transport, state.value).inc()
        if self.xfer is None:
            return  # the attempt is over: pages of late pulls do not count as landed
        if state is PullState.FAILED:
            self.fail(TransferError.code, running.pull.error or "pull failed")
        elif not self.lease.covers(now):
            self.fail(Revoked.code, "a pull ended outside its lease")
        else:
            num_bytes, link = running.pull.num_bytes, self._link
            assert link is not None
            self._context.landed(link, num_bytes, now - running.began_at, now)
            self._num_bytes += num_bytes
            self._pulls_from = self._pulls_from or running.began_at
            self._pull_s += now - max(running.began_at, self._pulled_at)  # several run at once
            self._pulled_at = now
            self._pages.land(running.ready)
            while self._pages.has_landed(self.num_landed_pages):
                self.num_landed_pages += 1


def bit_runs(bits: int) -> Iterator[range]:
    """Runs of set bits, lowest first."""
    return (range(*run.span()) for run in re.finditer("1+", f"{bits:b}"[::-1]))
