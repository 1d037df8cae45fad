"""Where the requests of a decode worker stand: they wait for chunks, a row or pages, or run.

Admission reserves pages for the uncached prompt and growth_tokens of output. After that a row takes
free pages as it grows. When no page is left, the youngest row is preempted: it gives up its pages
and is admitted again later with prompt + output as its prompt. Its tokens do not change, because a
token depends only on the text before it, the seed and its position.
"""

from collections import deque
from collections.abc import Callable
from operator import attrgetter

from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.plan import Chunk
from worker.schedule.order import in_order, note_passed
from worker.schedule.prefill import chunk_end
from worker.schedule.req import Phase, Req
from worker.schedule.retention import Retention
from worker.schedule.rows import RowTable
from worker.schedule.shares import RouterShares

ARRIVAL = attrgetter("arrival")


class DecodeQueues:
    """The requests of one decode worker, with their pages and rows.

    Invariant: an admitted request that is not FINISHED is in exactly one of `local`, `ready`,
    `running`, `preempted`, or is FETCHING and known to Inbound. All but preempted requests have a
    hold.
    """

    def __init__(
        self, book: PageBook, engine: EngineConfig, *, grain: int = 1, with_text: bool = False
    ) -> None:
        """grain: chunks that are not a prompt's last end at multiples of it.

        with_text: the drafter reads the rows' tokens.
        """
        self.book, self._engine, self._grain = book, engine, grain
        self.local: deque[Req] = deque()
        self.ready: deque[Req] = deque()
        self.running: dict[int, Req] = {}  # by row
        self.preempted: list[Req] = []
        self.leaving: set[Req] = set()  # preempted as soon as their step in flight settles
        self.shares = RouterShares(book, engine)
        self.retention = Retention(book)
        self.rows = RowTable(
            int(engine.max_num_reqs), int(engine.penalty_rows), with_text=with_text
        )
        # Called as a request loses its row, and just before it gets one.
        self.on_preempt: Callable[[Req], None] = lambda req: None
        self.on_row: Callable[[Req, float], None] = lambda req, now: None
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether a step runs or can run; preempted requests may wait for pages of fetches."""
        return bool(self.running or self.ready or self.local)

    def admit(self, req: Req) -> bool:
        """Open a hold for a new or preempted request; False, changing nothing, if it does not fit.

        A new request is also refused while preempted ones wait, or if it leaves too little for the
        shares of other routers. But if its router has less than its own, it waits for none, and a
        request of another is preempted for it.
        """
        new, shares = req.phase is Phase.NEW, self.shares
        if new and self.preempted and not shares.is_short(req.router):
            return False
        growth = max(2, self._engine.growth_tokens)  # a prefill worker may draw one, then fail
        num_slots = min(len(req.tokens) + growth, req.max_len)
        # What the tree holds has no logits.
        most = 0 if req.is_to_score else len(req.tokens) - 1
        hold = self.book.open(req.tokens, num_slots, max_matched=most, salt=req.salt)
        if hold is not None and not shares.allow_pages(req.router):
            self.book.close(hold)
            hold = None
        if hold is None:
            if new and not self.leaving and (victim := shares.victim_for(req.router)) is not None:
                self.preempt(victim)
            return False
        shares.holders.add(req)
        if new:
            self._arrivals += 1
            req.arrival = self._arrivals
            req.num_cached_tokens = self.book.snapshots.resumable(hold, most)
        else:
            self.preempted.remove(req)
        req.hold, req.num_table_pages = hold, 0
        req.num_computed_tokens = hold.num_matched
        req.phase = Phase.FETCHING
        return True

    def prefill_locally(self, req: Req) -> None:
        """Queue the rest of the prompt; KV of tokens[: num_computed_tokens] is here.

        Where layers are recurrent, what lies behind the deepest snapshot is computed.
        """
        assert req.hold is not None
        req.num_planned_tokens = req.num_computed_tokens
        if req.hold.slot:
            req.num_planned_tokens = self.book.snapshots.resume(req.hold, len(req.tokens) - 1)
            if len(req.tokens) == req.num_prompt_tokens:
                req.num_cached_tokens = req.num_planned_tokens
        req.phase = Phase.LOCAL
        self.local.append(req)

    def fork(self, req: Req, leader: Req) -> bool:
        """Have KV and state of a prompt copied from another choice of it; False: it has run on."""
        alike = leader.tokens == req.tokens and leader.salt == req.salt
        if leader.phase is not Phase.READY or not alike:
            return False
        assert leader.hold is not None
        assert req.hold is not None
        num_stored = len(req.tokens) - 1
        if not req.hold.slot or req.hold.num_matched + self.book.page_size <= num_stored:
            return False
        self.book.bind(req.hold, num_stored)  # reserved at admission: cannot fail
        self.book.snapshots.fork(leader.hold, req.hold)
        return True

    def make_ready(self, req: Req) -> None:
        """Enter KV of tokens[:-1], which is final, into the tree; queue `req` for a row."""
        assert req.hold is not None
        req.num_computed_tokens = len(req.tokens) - 1
        self.book.commit(req.hold, req.tokens[:-1])
        req.phase = Phase.READY
        self.ready.append(req)

    def start_ready(self, now: float) -> None:
        """Give rows to ready requests, in their order, as far as there are any.

        The last one, or penalty slot, is left for an older one of `local`, while none of these has
        a row.
        """
        begun = any(req.row for req in self.local)
        arrivals = (req.arrival for req in self.local if not begun and self._may_start(req))
        first = next(arrivals, self._arrivals)
        for req in list(self.ready):
            if not self.rows.num_free:
                break  # no row is free, so no waiting request can start
            is_left = first < req.arrival and self.rows.num_left(req.sampling) == 1
            if is_left or not self._may_start(req):
                continue  # others may go first, of which some need no penalty slot
            self.ready.remove(req)
            self.on_row(req, now)
            assert req.hold is not None
            # Binds the last token's slot, too: a drafter stores its KV there before the first
            # decode step is planned. Reserved at admission, so `bind` cannot fail.
            self.book.bind(req.hold, len(req.tokens))
            self.rows.enter(req, now, active=True)
            self.rows.queue_pages(req)
            self._runs(req)

    def take_chunks(self, now: float) -> list[tuple[Req, Chunk]]:
        """The chunks of one step of local prompts; who gets its last chunk is running then."""
        budget = int(self._engine.max_prefill_tokens)
        computed: list[tuple[Req, Chunk]] = []
        arrived = list(self.local)
        for req in in_order(arrived, begun_first=self.rows.are_scarce):
            assert req.hold is not None
            start = req.num_planned_tokens
            end = chunk_end(start, budget, len(req.tokens), self._grain)
            if end == start:
                break  # less is left of the step than a chunk needs, or nothing
            if not req.row:
                if not self._may_start(req):
                    continue
                self.on_row(req, now)
                self.rows.enter(req, now, active=False)
            end, *snapshot = self.book.snapshots.store(req.hold, start, end, len(req.tokens))
            last = end == len(req.tokens)
            # As in `start_ready`, with the slot of the token to be drawn, for a drafter.
            self.book.bind(req.hold, end + last)
            self.rows.queue_pages(req)
            tokens = tuple(req.tokens[start:end])
            scored = req.to_score(start, end)
            chunk = Chunk(
                req.row, start, tokens, last, req.hold.slot, scored, req.hold.num_matched,
                (snapshot[0], snapshot[1]),
            )  # fmt: skip
            computed.append((req, chunk))
            req.num_planned_tokens = end
            budget -= end - start
            if last:
                self.local.remove(req)
                self._runs(req)
        note_passed(arrived, {req: len(chunk.tokens) for req, chunk in computed})
        return computed

    def finish(self, req: Req) -> None:
        """Give back all that `req` holds, at any phase; a second call does nothing.

        No pull into its pages may run.
        """
        if req.phase is Phase.FINISHED:
            return
        queues = {Phase.LOCAL: self.local, Phase.READY: self.ready, Phase.PREEMPTED: self.preempted}
        if req.phase in queues:
            queues[req.phase].remove(req)
        self.leaving.discard(req)
        self._release(req)
        req.phase = Phase.FINISHED

    def preempt(self, req: Req) -> bool:
        """Take its row and pages from `req`, at once or when its step in flight settles: False."""
        self.on_preempt(req)
        if req.num_in_flight:
            self.leaving.add(req)
            return False
        self.put_off(req)
        return True

    def put_off(self, req: Req) -> None:
        """Free the row and pages of `req`, which has no step in flight, and queue it again."""
        self._release(req)
        req.phase = Phase.PREEMPTED
        self.preempted.append(req)
        self.preempted.sort(key=ARRIVAL)

    def _release(self, req: Req) -> None:
        """Give back row and pages; full pages of computed tokens stay in the prefix tree."""
        if req.row:
            self.running.pop(req.row, None)
            self.rows.release(req.row)
            req.row = 0
        if req.hold is not None:
            self.book.snapshots.leave_row(req.hold, req.num_folded, req.num_folded_ub)
            self.book.commit(req.hold, req.tokens[: req.num_computed_tokens])
            if req.session:
                self.retention.ended(req.hold, req.session, req.keep_s)
            self.book.close(req.hold)
            req.hold = None
            self.shares.holders.discard(req)

    def _may_start(self, req: Req) -> bool:
        """Whether it may have a row now."""
        return self.rows.num_left(req.sampling) > 0 and self.shares.allow_row(req.router)

    def _runs(self, req: Req) -> None:
        req.phase = Phase.RUNNING
        self.running[req.row] = req
