"""The prefill scheduler under random load, one step ahead of a device double."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support import pairwise
from tests.support.books import check_book
from worker.api import Prefill, PrefillRefused, Release, Renew, RenewAck, Sampling, Xfer
from worker.cache.book import PageBook
from worker.config import EngineConfig, LeaseConfig
from worker.keyring import Refusals
from worker.observe.metrics import WorkerMetrics
from worker.plan import Chunk, Drawn, Plan, RowStart, tail_of
from worker.schedule.asked import PromptLimits
from worker.schedule.pace import Pace, StepTime
from worker.schedule.prefill import PrefillScheduler
from worker.schedule.req import PrefillReq
from worker.transfer.outbound import Outbound

VOCAB = 3  # few, so that prompts often share pages
SAMPLINGS = [
    Sampling(5, temperature=0.0),
    Sampling(5, temperature=0.7, min_tokens=2),
    Sampling(5, temperature=0.7, top_k=3),
]


def asked(
    tokens: Sequence[int],
    link_bytes_per_s: float = 0.0,
    sampling: Sampling | None = None,
    num_matched: int = 0,
) -> Prefill:
    """What decode asks; the last token of a prompt that it wants a token for is output already."""
    return Prefill(
        Xfer("x", 1, "d", "p"),
        tuple(tokens),
        num_matched,
        link_bytes_per_s,
        sampling,
        len(tokens) - 1,
    )


def token_after(tokens: Sequence[int]) -> int:
    """What the device double draws."""
    return hash(tuple(tokens)) % 1000


def scheduler_of(
    book: PageBook,
    num_tokens: int = 512,
    *,
    max_len: int = 10_000,
    times: Sequence[StepTime] = (),
    **engine: Any,
) -> PrefillScheduler:
    """A scheduler whose steps take up to `num_tokens`; by `times` where some are given."""
    pace = Pace(times, 4, 147_456, num_tokens, num_layers=36)
    config = EngineConfig(**{"max_prefill_tokens": num_tokens, "max_num_reqs": 64} | engine)
    return PrefillScheduler(book, config, PromptLimits(max_len), pace)


class Prompts:
    """Random prompts in and out of one scheduler; the test is device and outbound."""

    def __init__(
        self, seed: int, *, num_pages: int, page_size: int, chunk: int, rows: int, span: int = 0
    ) -> None:
        self.random = random.Random(seed)
        self.page_size, self.chunk, self.rows = page_size, chunk, rows
        self.span, self.longest = span, 100 if span else 40
        self.book = PageBook(num_pages, page_size, span=span, step_tokens=chunk)
        self.max_waiting = rows + 6
        self.scheduler = scheduler_of(self.book, chunk, max_num_reqs=rows, max_waiting=6)
        self.reqs: list[PrefillReq] = []  # admitted and not dropped, in order of arrival
        self.covered: dict[PrefillReq, int] = {}  # next token that no chunk has taken
        self.matched: dict[PrefillReq, int] = {}
        self.passed: Counter[PrefillReq] = Counter()  # by so many tokens of later prompts
        self.lacked_row: set[PrefillReq] = set()
        self.rows_of: dict[PrefillReq, int] = {}
        self.in_flight: list[tuple[Plan, list[PrefillReq], bool]] = []
        self.memory: dict[int, tuple[int, ...]] = {}  # slot -> tokens up to its own
        self.table: dict[int, dict[int, int]] = {}
        self.counts: Counter[str] = Counter()

    def turn(self, *, admitting: bool = True) -> None:
        rnd = self.random
        for _ in range(rnd.randint(0, 3) if admitting else 0):
            self.admit()
        if self.reqs and rnd.random() < 0.7:
            self.drop()
        plan = self.scheduler.plan()
        if plan is not None:
            self.launch(plan)
        if self.in_flight and rnd.random() < 0.5:
            self.execute(0)
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            self.settle()
        self.check()

    def admit(self) -> None:
        rnd = self.random
        tokens = [rnd.randrange(VOCAB) for _ in range(rnd.randint(2, self.longest))]
        if self.reqs and rnd.random() < 0.6:
            other = rnd.choice(self.reqs).tokens
            common = rnd.randint(0, min(len(tokens), len(other)))
            tokens[:common] = other[:common]
            if self.span and rnd.random() < 0.3:
                tokens = [*other[: self.longest - 9], *tokens[:9]]
        figures = self.book.num_available, self.book.num_holds
        sampling = rnd.choice([None, *SAMPLINGS])
        first = self.book.first_read(len(tokens) - 1)  # that decode reads
        if rnd.random() < 0.2:  # it wants more, which is kept then
            first = rnd.randint(0, first)
        num_matched = first * self.page_size
        req = self.scheduler.admit(asked(tokens, sampling=sampling, num_matched=num_matched))
        if req is None:
            self.counts["refused"] += 1
            assert (self.book.num_available, self.book.num_holds) == figures
            return
        self.counts["admitted"] += 1
        self.counts["matched"] += req.hold.num_matched > 0
        passed = [node for node in req.hold.nodes if not node.page]
        self.counts["matched through a gap"] += bool(passed)
        self.counts["all cached"] += req.hold.num_matched == len(tokens) - 1
        assert req.hold.num_matched <= len(tokens) - 1
        assert req.num_target_tokens == len(tokens) - (sampling is None)
        self.reqs.append(req)
        self.covered[req] = self.matched[req] = req.num_computed_tokens

    def drop(self) -> None:
        done = [r for r in self.reqs if r.num_computed_tokens == r.num_target_tokens]
        req = self.random.choice(done if done and self.random.random() < 0.7 else self.reqs)
        self.counts["dropped done" if req in done else "dropped early"] += 1
        self.counts["dropped in flight"] += any(req in reqs for _, reqs, _ in self.in_flight)
        self.scheduler.drop(req)
        self.scheduler.drop(req)  # a second call does nothing
        self.reqs.remove(req)
        assert req.hold.pages == []

    @property
    def waiting(self) -> list[PrefillReq]:
        """Those with tokens that no chunk has taken, in order of arrival."""
        return [req for req in self.reqs if self.covered[req] < req.num_target_tokens]

    @property
    def begun(self) -> list[PrefillReq]:
        """Those of the waiting ones that have a row."""
        return [req for req in self.waiting if self.covered[req] > self.matched[req]]

    def expected_owners(self) -> list[PrefillReq]:
        """Whose chunks the next step has: short ones first, but for who has been passed enough."""
        num_left = {req: len(req.tokens) - self.covered[req] for req in self.waiting}
        enough = [req for req in num_left if self.passed[req] >= len(req.tokens)]
        others = sorted((req for req in num_left if req not in enough), key=num_left.__getitem__)
        begun = set(self.begun)
        if 2 * (self.rows - len(begun)) < self.rows:  # who has a row is not passed by who has none
            others.sort(key=lambda req: req not in begun)
        owners, budget = list[PrefillReq](), self.chunk
        for req in enough + others:
            if budget > 0 and (req in begun or len(begun) < self.rows):
                begun.add(req)
                owners.append(req)
                budget -= req.num_target_tokens - self.covered[req]
        return owners

    def launch(self, plan: Plan) -> None:
        assert (plan.decode, plan.releases) == ((), ()), "no row of a prefill worker stays active"
        waiting, owners = self.waiting, self.expected_owners()
        wanted = sum(req.num_target_tokens - self.covered[req] for req in owners)
        assert plan.starts == tuple(
            RowStart(
                chunk.row, req.sampling, len(req.tokens) + 1,
                len(req.tokens) - 1 + req.sampling.min_tokens,
            )
            for req, chunk in zip(owners, plan.chunks, strict=True)
            if req.sampling is not None and chunk.sample
        )  # fmt: skip
        assert plan.tail == tail_of(start.sampling for start in plan.starts)
        assert plan.sampled_rows == tuple(start.row for start in plan.starts)
        assert 0 < sum(len(chunk.tokens) for chunk in plan.chunks) <= self.chunk
        rows = [chunk.row for chunk in plan.chunks]
        assert len(set(rows)) == len(rows) <= self.rows
        assert all(1 <= row <= self.rows for row in rows)
        for index, (req, chunk) in enumerate(zip(owners, plan.chunks, strict=True)):
            assert chunk.start == self.covered[req], "a token is left out or computed twice"
            assert chunk.tokens == req.tokens[chunk.start : chunk.start + len(chunk.tokens)]
            ends = chunk.start + len(chunk.tokens) == len(req.tokens)
            assert chunk.sample == (req.sampling is not None and ends)
            if req in self.rows_of:
                assert self.rows_of[req] == chunk.row
            else:
                self.rows_of[req], self.table[chunk.row] = chunk.row, {}
            self.covered[req] += len(chunk.tokens)
            assert self.covered[req] <= req.num_target_tokens
            assert self.covered[req] <= plan.max_seq_len_ub
            unfinished = self.covered[req] < req.num_target_tokens
            assert not unfinished or index == len(owners) - 1, "the budget goes to the first"
            self.apply_pages(plan, req, chunk.row)
        self.note_passed(waiting, dict(zip(owners, plan.chunks, strict=True)))
        used = sum(len(chunk.tokens) for chunk in plan.chunks)
        assert used == min(self.chunk, wanted), "budget left while prompts wait"
        self.counts["steps"] += 1
        self.in_flight.append((plan, owners, False))
        assert len(self.in_flight) <= 2

    def note_passed(self, waiting: list[PrefillReq], chunks: dict[PrefillReq, Chunk]) -> None:
        """A prompt waits for as many tokens of later ones as it is long, and a step, at most.

        And for a row, if all have been taken.
        """
        if len(self.begun) == self.rows:
            self.lacked_row.update(set(waiting) - set(self.begun))
        for at, req in enumerate(waiting):
            if self.covered[req] == req.num_target_tokens:
                continue
            later = [len(chunks[other].tokens) for other in waiting[at + 1 :] if other in chunks]
            self.passed[req] += sum(later)
            self.counts["passed"] += bool(later)
            self.counts["passed enough"] += self.passed[req] >= len(req.tokens)
            most = len(req.tokens) + self.chunk
            assert self.passed[req] < most or req in self.lacked_row

    def apply_pages(self, plan: Plan, req: PrefillReq, row: int) -> None:
        """The deltas alone rebuild what the hold has, and no page is queued twice."""
        for each in plan.pages:
            if each.row == row:
                assert each.pages
                for index, page in enumerate(each.pages, each.first):
                    assert index not in self.table[row], "queued twice"
                    self.table[row][index] = page
        table = [self.table[row][i] for i in range(len(self.table[row]))]
        held = req.hold.pages
        assert len(table) == len(held)
        assert all(page in (0, mine) for mine, page in zip(table, held, strict=True))
        assert len(table) >= self.book.num_pages_for(self.covered[req])

    def execute(self, index: int) -> None:
        """KV is written some time between launch and settle."""
        plan, owners, done = self.in_flight[index]
        if done:
            return
        size = self.page_size
        for req, chunk in zip(owners, plan.chunks, strict=True):
            if req.dropped:
                continue  # whatever it writes is nobody's; the book orders who writes after it
            pages = req.hold.pages
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                page = pages[position // size]
                assert page in req.hold.private, "writes a shared page"
                self.memory[page * size + position % size] = req.tokens[: position + 1]
            first = max(0, chunk.start + 1 - self.span) if self.span else 0
            for position in range(first, chunk.start + len(chunk.tokens)):
                slot = pages[position // size] * size + position % size
                assert self.memory.get(slot) == req.tokens[: position + 1], "reads another's KV"
        self.in_flight[index] = plan, owners, True

    def settle(self) -> None:
        self.execute(0)
        plan, owners, _ = self.in_flight.pop(0)
        pairs = list(zip(owners, plan.chunks, strict=True))
        drawn = [Drawn((token_after(req.tokens),), True) for req, chunk in pairs if chunk.sample]
        computed = self.scheduler.settle(plan.step, drawn)
        self.scheduler.commit(computed)
        assert computed == [req for req in owners if not req.dropped]
        for req, chunk in pairs:
            if not req.dropped:
                assert req.token == (token_after(req.tokens) if chunk.sample else None)
                self.counts["drawn"] += chunk.sample
                self.counts["drawn of many"] += len(drawn) > 1
                assert req.num_computed_tokens == chunk.start + len(chunk.tokens)
                self.counts["done"] += req.num_computed_tokens == req.num_target_tokens

    def check(self) -> None:
        check_book(self.book, [req.hold for req in self.reqs])
        waiting = self.waiting
        assert list(self.scheduler.waiting) == waiting
        assert len(waiting) <= self.max_waiting
        left = sum(r.num_target_tokens - self.covered[r] for r in waiting)
        assert self.scheduler.num_queued_tokens == left
        for req in self.reqs if self.span else ():
            self.check_window(req)

    def check_window(self, req: PrefillReq) -> None:
        """Pages in use are flat in the length of a prompt; what decode pulls stays."""
        hold, size = req.hold, self.page_size
        held = len(hold.pages) - hold.num_trimmed
        wanted = self.book.num_pages_for(req.num_target_tokens) - hold.keep_from
        assert held <= max(self.book.num_pages_for(self.span + 2 * self.chunk) + 3, wanted)
        self.counts["trimmed"] += hold.num_trimmed > 0 and held < len(hold.pages)
        for position in range(hold.keep_from * size, req.num_computed_tokens):
            slot = hold.pages[position // size] * size + position % size
            assert self.memory.get(slot) == req.tokens[: position + 1], "a pull reads another's"


CASES = [
    (0, 40, 4, 16, 4, 0),
    (1, 24, 4, 7, 2, 0),
    (2, 200, 1, 64, 3, 0),
    (3, 60, 8, 1000, 8, 0),
    (4, 40, 4, 16, 4, 11),
    (6, 100, 1, 13, 3, 2),
]


@pytest.mark.parametrize(("seed", "num_pages", "page_size", "chunk", "rows", "span"), CASES)
def test_every_prompt_is_covered_once_and_short_ones_first(
    seed, num_pages, page_size, chunk, rows, span
) -> None:
    prompts = Prompts(
        seed, num_pages=num_pages, page_size=page_size, chunk=chunk, rows=rows, span=span
    )
    while prompts.counts["steps"] < (2_000 if pairwise.whole else 700):
        prompts.turn()
    counts, least = prompts.counts, 20 if pairwise.whole else 1
    for each in ("done", "matched", "refused", "dropped early", "drawn"):
        assert counts[each] > least, each
    for each in ("matched through a gap", "trimmed") if span else ("all cached",):
        assert counts[each] > least, each
    assert counts["drawn of many"] > least or chunk < 16
    assert counts["dropped in flight"] > least
    assert min(counts["passed"], counts["passed enough"]) > least or chunk > 40
    for _ in range(2_000):
        if not prompts.reqs and not prompts.in_flight:
            break
        prompts.turn(admitting=False)
    book = prompts.book
    assert not prompts.reqs
    assert not prompts.scheduler.waiting
    assert (book.num_holds, book.num_reserved, book.num_private) == (0, 0, 0)
    assert book.num_available == book.num_pages
    assert prompts.scheduler.rows.num_free == rows


def test_steps_are_as_long_as_the_pace_says() -> None:
    """Large steps multiply faster; over a slow link the last one had better be small."""
    times = [StepTime(512, 0.013, 0.014), StepTime(2048, 0.048, 0.048)]
    for rate, longest in ((0.0, 2048), (1e11, 2048), (1e9, 512)):
        scheduler = scheduler_of(PageBook(100, 64), 2048, times=times)
        assert scheduler.admit(asked(range(4097), rate)) is not None
        steps = []
        while (plan := scheduler.plan()) is not None:
            steps.append(sum(len(chunk.tokens) for chunk in plan.chunks))
            scheduler.settle(plan.step, [])
        assert sum(steps) == 4096
        assert steps[0] == longest


def outbound_of(
    scheduler: PrefillScheduler,
    send: Callable[[Any], None],
    tracer: Any = None,
    refusals: Refusals | None = None,
) -> Outbound:
    """Prefill's side of the pull protocol alone."""
    metrics = WorkerMetrics(model="m", role="prefill", worker="w")
    return Outbound(
        "p", scheduler, 1, lambda _, message: send(message), LeaseConfig(), metrics,
        refusals or Refusals(), tracer,
    )  # fmt: skip


def test_a_prompt_is_refused_with_the_reason() -> None:
    """Too long is not "no room": it never fits here."""
    sent: list[object] = []
    outbound = outbound_of(scheduler_of(PageBook(4, 2), max_len=8), sent.append)
    for num_tokens, code in ((9, "invalid_value"), (8, "busy"), (1, "invalid_value")):
        xfer = Xfer(str(num_tokens), 1, "d", "p")
        outbound.on_prefill("decode-0/d", Prefill(xfer, tuple(range(num_tokens)), 0), 0.0)
        refused = sent.pop()
        assert (refused.xfer, refused.error.code) == (xfer, code)
    assert not sent
    assert not outbound.num_leases


@pytest.mark.parametrize("what", ["pages", "prompts"])
def test_pages_and_turns_are_left_for_a_decode_worker_that_asks_less(what: str) -> None:
    """The other takes what it gets."""
    sent: list[Any] = []
    room = {"pages": (256, 1000), "prompts": (4096, 0)}[what]
    scheduler = scheduler_of(PageBook(room[0] + 1, 2), max_num_reqs=64, max_waiting=room[1])
    outbound = outbound_of(scheduler, sent.append)
    outbound.shares.members = frozenset({"decode-0/d", "decode-1/e"})

    def ask(peer: str, number: int) -> bool:
        xfer = Xfer(str(number), 1, peer[-1], "p")
        outbound.on_prefill(peer, Prefill(xfer, tuple(range(9 * number, 9 * number + 9)), 0), 0.0)
        return not isinstance(sent.pop(), PrefillRefused)

    most = {"pages": 64, "prompts": 64}[what]
    assert sum(ask("decode-0/d", number) for number in range(100)) == most - most // 16
    assert sum(ask("decode-1/e", number) for number in range(100, 200)) == most // 16
    check_book(scheduler.book, [each.hold for each in scheduler.waiting])


def test_a_lease_is_its_decode_worker_s_alone() -> None:
    """Another member neither ends it, nor prolongs it, nor begins a later attempt of it."""
    sent: list[Any] = []
    refusals, term_s = Refusals(), LeaseConfig().prefill_window_s
    outbound = outbound_of(scheduler_of(PageBook(64, 2), 4), sent.append, refusals=refusals)
    xfer, later = Xfer("1", 1, "d", "p"), Xfer("1", 2, "d", "p")
    outbound.on_prefill("decode-0/d", Prefill(xfer, (1, 2, 3), 0), 0.0)
    outbound.on_release("decode-1/e", Release(xfer))
    outbound.on_prefill("decode-1/e", Prefill(later, (1, 2, 3), 0), 0.0)
    assert outbound.num_leases == 1
    outbound.on_renew("decode-1/e", Renew(7, (xfer,)), term_s / 2)
    assert sent.pop() == RenewAck(7, ())
    assert refusals.num_messages == 3
    outbound.sweep(term_s)
    assert outbound.num_leases == 0
