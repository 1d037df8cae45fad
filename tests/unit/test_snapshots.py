"""Snapshots of recurrent state under random prompts, against a naive model of what should be kept.

The device is a double: a slot of state holds the tokens that are in it, a slot of KV those up to
its own. So whoever resumes from another text, or rewrites what others read, is found.
"""

import random
from collections import Counter
from typing import Any

import pytest

from tests.support.books import check_book, check_snapshots
from tests.support.pairwise import in_whole, whole
from worker.api import Prefill, Sampling, Xfer
from worker.cache.book import Hold, PageBook
from worker.cache.prefix import Node
from worker.cache.snapshots import last_line
from worker.config import EngineConfig
from worker.plan import Chunk, Copies, Drawn, Plan
from worker.schedule.asked import PromptLimits
from worker.schedule.decode import DecodeScheduler
from worker.schedule.pace import Pace
from worker.schedule.prefill import PrefillScheduler
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import PrefillReq, Req
from worker.schedule.width import WidthPolicy

SIZE, GRID, ROWS = 16, 64, 4
Text = tuple[Any, ...]


class Naive:
    """Which prefixes should have a snapshot, least recently used first. Pages are never short."""

    def __init__(self, num: int) -> None:
        self.num, self.kept, self.promised = num, list[Text](), 0

    def resumable(self, tokens: Text, most: int) -> int:
        lines = range(most // GRID * GRID, 0, -GRID)
        return next((line for line in lines if tokens[:line] in self.kept), 0)

    def use(self, prefix: Text) -> None:
        if prefix in self.kept:
            self.kept.remove(prefix)
        self.kept.append(prefix)

    def take(self) -> bool:
        if len(self.kept) + self.promised == self.num:
            if not self.kept:
                return False
            del self.kept[0]
        self.promised += 1
        return True

    def keep(self, prefix: Text, pages: set[Text]) -> None:
        self.promised -= 1
        is_new = prefix not in self.kept
        self.use(prefix)
        found = 1
        for end in range(len(prefix) - SIZE, 0, -SIZE) if is_new else ():
            above = prefix[:end]
            if sum(page[:-SIZE] == above for page in pages) > 1:
                break
            if above in self.kept:
                found += 1
                if found > 2:
                    self.kept.remove(above)


class Prompts:
    """Random prompts in and out of one scheduler; the test is device and outbound."""

    def __init__(self, seed: int, num_pages: int, num_snapshots: int, chunk: int = 160) -> None:
        self.random = random.Random(seed)
        self.exact = num_pages > 1000  # no page is ever evicted
        self.book = PageBook(num_pages, SIZE, num_slots=7, num_snapshots=num_snapshots)
        limits = PromptLimits(1000, grain=GRID)
        engine = EngineConfig(max_num_reqs=ROWS)
        self.scheduler = PrefillScheduler(self.book, engine, limits, Pace([], 1, 1, chunk, 2, 0.5))
        self.naive = Naive(num_snapshots)
        self.reqs: list[PrefillReq] = []
        self.texts: list[Text] = [()]
        self.states: dict[int, Text] = {}  # by slot
        self.memory: dict[int, Text] = {}  # by slot of KV
        self.in_flight: list[tuple[Plan, list[PrefillReq], list[list[int]]]] = []
        self.counts: Counter[str] = Counter()

    def turn(self) -> None:
        if self.random.random() < 0.6:
            self.admit()
        if self.reqs and self.random.random() < 0.5:
            self.drop(self.random.choice(self.reqs))
        if len(self.in_flight) < 2 and (plan := self.scheduler.plan()) is not None:
            self.launch(plan)
        if self.in_flight and self.random.random() < 0.7:
            self.settle()
        self.check()

    def admit(self) -> None:
        rnd = self.random
        base = rnd.choice(self.texts[-12:])
        base = base[: rnd.choice((len(base), rnd.randint(0, len(base)), len(base) // GRID * GRID))]
        more = rnd.choice((1, 2, 17, 64, 65, rnd.randint(1, 150)))
        tokens = (*base[:500], *(rnd.randrange(3) for _ in range(more)))
        if len(tokens) < 2:
            return
        sampling = rnd.choice((None, Sampling(5, temperature=0.0)))
        asked = Prefill(Xfer("x", 1, "d", "p"), tokens, 0, 0.0, sampling, len(tokens))
        req = self.scheduler.admit(asked)
        if req is None:
            self.counts["refused"] += 1
            return
        start, most = req.num_computed_tokens, min(req.num_target_tokens - 1, req.hold.num_matched)
        assert start % GRID == 0
        if self.exact:
            assert start == self.naive.resumable(tokens, most)
            if start:
                self.naive.use(tokens[:start])
        self.counts["resumed"] += start > 0
        self.counts["deeper pages"] += req.hold.num_matched >= start + GRID
        self.counts["at the end"] += req.hold.num_matched >= req.num_target_tokens > start
        self.reqs.append(req)
        self.texts.append(tokens)

    def drop(self, req: PrefillReq) -> None:
        self.counts["dropped early"] += req.num_computed_tokens < req.num_target_tokens
        self.naive.promised -= len(req.hold.snapshots)
        self.scheduler.drop(req)
        self.reqs.remove(req)

    def launch(self, plan: Plan) -> None:
        for source, target in plan.copies.slots if plan.copies else ():
            self.states[target] = self.states[source]
        owners = [next(r for r in self.reqs if r.hold.slot == c.state_slot) for c in plan.chunks]
        for req, chunk in zip(owners, plan.chunks, strict=True):
            start, end = chunk.start, chunk.start + len(chunk.tokens)
            assert chunk.tokens == req.tokens[start:end]
            assert start == 0 or self.states[chunk.state_slot] == req.tokens[:start]
            assert start < end == req.num_planned_tokens
            assert chunk.store_from == req.hold.num_matched
            self.store_kv(req, max(start, chunk.store_from), end)
            at, slot = chunk.snapshot
            if slot:
                assert start < at <= end
                lines = {n // GRID * GRID for n in (req.hold.num_matched, req.num_target_tokens)}
                assert at in lines
                assert self.naive.take() or not self.exact
                self.states[slot] = req.tokens[:at]
                self.counts["branch points"] += at == min(lines) < max(lines)
            self.states[chunk.state_slot] = req.tokens[:end]
        self.in_flight.append((plan, owners, [list(req.hold.snapshots) for req in owners]))

    def store_kv(self, req: PrefillReq, start: int, end: int) -> None:
        pages = req.hold.pages
        for position in range(end):
            slot = pages[position // SIZE] * SIZE + position % SIZE
            if position >= start:
                assert pages[position // SIZE] in req.hold.private, "writes a shared page"
                self.memory[slot] = req.tokens[: position + 1]
            assert self.memory[slot] == req.tokens[: position + 1], "reads another's KV"

    def settle(self) -> None:
        plan, owners, _ = self.in_flight.pop(0)
        drawn = [Drawn((1,), True) for chunk in plan.chunks if chunk.sample]
        promised = {req: dict(req.hold.snapshots) for req in owners}
        computed = self.scheduler.settle(plan.step, drawn)
        for req in computed:
            self.scheduler.commit([req])
            pages = set(prefixes(self.book))
            for at in promised[req].keys() - req.hold.snapshots.keys():
                self.naive.keep(req.tokens[:at], pages)

    def check(self) -> None:
        holds = [req.hold for req in self.reqs]
        check_book(self.book, holds)
        check_snapshots(self.book, holds)
        assert all(len(hold.nodes) * SIZE >= hold.num_matched for hold in holds)
        for prefix, node in prefixes(self.book).items():
            if node.state:
                assert self.states[node.state] == prefix
        if self.exact:
            used = [path_of(node) for node in self.book.snapshots.nodes]
            assert used == self.naive.kept
        free = self.book.snapshots.num_slots - self.book.snapshots.num_used
        self.counts["full"] += not free


def path_of(node: Node) -> Text:
    return tuple(token for each in node.path() for token in each.key)


def prefixes(book: PageBook) -> dict[Text, Node]:
    found, todo = dict[Text, Node](), [book.tree.root]
    while todo:
        node = todo.pop()
        found |= {path_of(child): child for child in node.children.values()}
        todo += node.children.values()
    return found


@pytest.mark.parametrize(
    ("seed", "num_pages", "num_snapshots"),
    [(0, 4000, 8), (6, 90, 4), *in_whole((1, 4000, 3), (3, 90, 8), (4, 4000, 1), (5, 90, 2))],
)
def test_snapshots_are_of_their_text_and_kept_as_a_naive_model_says(
    seed: int, num_pages: int, num_snapshots: int
) -> None:
    prompts = Prompts(seed, num_pages, num_snapshots)
    for _ in range(300):
        prompts.turn()
    counts = prompts.counts
    wanted = ["resumed", "deeper pages", "at the end", "dropped early", "full"]
    for each in [*wanted, *(["branch points"] if num_snapshots > 1 else [])]:
        assert counts[each] > 1, (each, counts)
    while prompts.in_flight:
        prompts.settle()
    for req in list(prompts.reqs):
        prompts.drop(req)
    prompts.book.forget()
    assert prompts.book.snapshots.num_used == 0, "snapshots go with their nodes"
    assert prompts.book.num_available == prompts.book.num_pages


@pytest.mark.parametrize(("num_snapshots", "prefix_cache"), [(0, True), (8, False)])
def test_without_snapshots_prompts_are_computed_whole(num_snapshots, prefix_cache) -> None:
    """Pages are shared all the same, and not stored again."""
    book = PageBook(99, SIZE, num_slots=4, num_snapshots=num_snapshots, prefix_cache=prefix_cache)
    limits, pace = PromptLimits(512, grain=GRID), Pace([], 1, 1, 512, 2, 0.5)
    scheduler = PrefillScheduler(book, EngineConfig(max_num_reqs=2), limits, pace)
    for again in (False, True):
        asked = Prefill(Xfer("x", 1, "d", "p"), tuple(range(200)), 0, 0.0, None, 200)
        req = scheduler.admit(asked)
        assert req is not None
        plan = scheduler.plan()
        assert plan is not None
        (chunk,) = plan.chunks
        assert (chunk.start, len(chunk.tokens), chunk.snapshot) == (0, 199, (0, 0))
        assert chunk.store_from == (192 if again and prefix_cache else 0)
        assert plan.copies is None
        scheduler.commit(scheduler.settle(plan.step, []))
        scheduler.drop(req)


def test_a_copy_is_forgotten_with_the_request_that_it_was_for() -> None:
    """Its slot may be pulled into before the next plan is launched."""
    book = PageBook(99, SIZE, num_slots=3, num_snapshots=2)
    first = hold_of(book, range(128), 129)
    book.bind(first, 128)
    assert book.snapshots.store(first, 0, 128, 128) == (128, 128, 4)
    book.commit(first, range(128))
    book.close(first)
    again = hold_of(book, range(129), 130)
    assert book.snapshots.resume(again, 128) == 128
    book.close(again)
    assert not book.snapshots.copies
    assert book.snapshots.resumable(hold_of(book, range(129), 130), 127) == 0


def hold_of(book: PageBook, tokens: range, num_slots: int) -> Hold:
    hold = book.open(tokens, num_slots, max_matched=len(tokens) - 1)
    assert hold is not None
    return hold


class Row:
    """What the device knows of one: KV of `length` tokens, a state of `folded`."""

    def __init__(self, req: Req) -> None:
        self.req, self.text, self.slot = req, list(req.tokens), req.hold.slot
        self.length = self.folded = self.snapshot = 0
        self.active = False


class Decoding:
    """Random requests that are prefilled and decoded by one worker, two steps in flight."""

    def __init__(self, seed: int, widths: tuple[int, ...], num_pages: int) -> None:
        self.random = random.Random(seed)
        self.book = PageBook(num_pages, SIZE, num_slots=9, num_snapshots=6)
        engine = EngineConfig(
            max_num_reqs=ROWS, max_prefill_tokens=128, penalty_rows=1, growth_tokens=1
        )
        self.queues = DecodeQueues(self.book, engine, grain=GRID)
        self.scheduler = DecodeScheduler(self.queues, frozenset((0,)), WidthPolicy(widths))
        self.reqs: list[Req] = []
        self.rows: dict[int, Row] = {}
        self.states: dict[int, Text] = {}
        self.texts: list[Text] = [(1,) * 70]
        self.in_flight: list[tuple[int, list[Drawn]]] = []
        self.counts: Counter[str] = Counter()

    def turn(self) -> None:
        rnd = self.random
        if len(self.reqs) < 7:
            self.admit()
        for req in list(self.queues.preempted):
            if self.queues.admit(req):
                self.counts["preempted"] += 1
                self.queues.prefill_locally(req)
        if self.reqs and rnd.random() < 0.02:
            req = rnd.choice(self.reqs)  # a stop string was found, some tokens ago
            del req.tokens[max(req.num_prompt_tokens, len(req.tokens) - rnd.randint(0, 9)) :]
            req.num_computed_tokens = min(req.num_computed_tokens, len(req.tokens))
            self.finish(req)
        if len(self.in_flight) < 2 and (plan := self.scheduler.plan()) is not None:
            self.in_flight.append((plan.step, self.execute(plan)))
        if len(self.in_flight) > 1 or (self.in_flight and rnd.random() < 0.3):
            step, drawn = self.in_flight.pop(0)
            for req, _, _, reason in self.scheduler.settle(step, drawn):
                if reason is not None:
                    self.counts[f"{reason}"] += 1
                    self.finish(req)
        holds = [req.hold for req in self.reqs if req.hold is not None]
        check_book(self.book, holds)
        check_snapshots(self.book, holds)
        for prefix, node in prefixes(self.book).items():
            if node.state:
                assert self.states[node.state] == prefix

    def admit(self) -> None:
        rnd = self.random
        base = rnd.choice(self.texts[-6:])
        tokens = [*base[:300], *(rnd.randrange(1, 4) for _ in range(rnd.randint(1, 30)))]
        sampling = Sampling(rnd.choice((20, 90, 200)), temperature=0.0)
        req = Req(str(len(self.texts)), 1, "", tokens, len(tokens), sampling, 0.0)
        if self.queues.admit(req):
            self.queues.prefill_locally(req)
            self.counts["resumed"] += req.num_planned_tokens > 0
            self.reqs.append(req)

    def finish(self, req: Req) -> None:
        self.texts.append(tuple(req.tokens))
        self.counts["left"] += req.hold is not None and bool(req.hold.row_snapshot)
        before = len(self.book.snapshots.nodes)
        self.queues.finish(req)
        self.counts["donated"] += len(self.book.snapshots.nodes) > before
        self.reqs.remove(req)

    def execute(self, plan: Plan) -> list[Drawn]:
        """All at once, as steps of one stream: nothing that is launched later comes before."""
        for source, target in plan.copies.slots if plan.copies else ():
            self.states[target] = self.states[source]
        if plan.chunks:
            found = [self.chunk(chunk) for chunk in plan.chunks]
            self.change(plan)
            return [self.draw(row, 1) for row, last in found if last]
        self.change(plan)
        return [self.window(self.rows[row], plan.width) for row in plan.decode]

    def change(self, plan: Plan) -> None:
        for row in plan.releases:
            if row in self.rows and row not in [start.row for start in plan.starts]:
                self.rows[row].active = False
        for row, slot in plan.snapshots:
            self.rows[row].snapshot = slot

    def chunk(self, chunk: Chunk) -> tuple[Row, bool]:
        req = next(req for req in self.reqs if req.row == chunk.row and req.hold is not None)
        row = self.rows.get(chunk.row)
        if row is None or row.req is not req or row.slot != req.hold.slot:
            row = self.rows[chunk.row] = Row(req)
        end = chunk.start + len(chunk.tokens)
        assert chunk.start == 0 or self.states[row.slot] == tuple(row.text[: chunk.start])
        at, slot = chunk.snapshot
        if slot:
            self.states[slot] = tuple(row.text[:at])
        self.states[row.slot] = tuple(row.text[:end])
        row.length = row.folded = end
        row.active = chunk.sample
        return row, chunk.sample

    def window(self, row: Row, width: int) -> Drawn:
        if not row.active:
            return Drawn((1,), True)  # of a row that has ended: nobody reads it
        end = row.length + (width == 1)
        if row.snapshot and last_line(end, GRID) > row.folded:
            self.states[row.snapshot] = tuple(row.text[: last_line(end, GRID)])
            self.counts["passed"] += 1
        row.folded = end
        assert self.states[row.slot] is not None
        self.states[row.slot] = tuple(row.text[:end])
        drawn = self.draw(row, width)
        row.length += len(drawn.tokens)
        return drawn

    def draw(self, row: Row, width: int) -> Drawn:
        tokens: list[int] = []
        for _ in range(self.random.randint(1, width)):
            tokens.append(0 if self.random.random() < 0.01 else self.random.randrange(1, 4))
            row.text.append(tokens[-1])
            row.active = tokens[-1] != 0 and len(row.text) < row.req.max_len
            if not row.active:
                break
        return Drawn(tuple(tokens), not row.active)


@pytest.mark.parametrize(
    ("seed", "widths", "num_pages"),
    [(0, (1,), 75), (1, (4,), 75), *in_whole((2, (1, 4), 70), (3, (8,), 75), (4, (1, 8), 75))],
)
def test_what_decode_steps_leave_is_the_state_of_its_text(
    seed: int, widths: tuple[int, ...], num_pages: int
) -> None:
    made = Decoding(seed, widths, num_pages)
    for _ in range(1500 if whole else 800):
        made.turn()
    for each in ("resumed", "donated", "passed", "left", "stop", "length", "preempted"):
        assert made.counts[each] > 2, (each, made.counts)
    for req in list(made.reqs):
        made.finish(req)
    made.book.forget()
    assert made.book.snapshots.num_used == made.book.num_holds == 0


def test_a_snapshot_that_steps_may_store_again_is_not_left() -> None:
    """Nor one from before the row had its slot; the deepest that has settled is."""
    book = PageBook(99, SIZE, num_slots=3, num_snapshots=4)
    text = range(260)
    for bound, folded, folded_ub, at in (
        (120, 130, 131, 128), (120, 191, 192, 0), (130, 131, 140, 0), (190, 193, 200, 192),
        (60, 255, 255, 192), (60, 255, 256, 0),
    ):  # fmt: skip
        hold = hold_of(book, text, 260)
        book.bind(hold, 260)
        assert book.snapshots.store_of_row(hold, bound) > 0
        assert book.snapshots.store_of_row(hold, bound) == 0, "it has one"
        book.snapshots.leave_row(hold, folded, folded_ub)
        assert hold.snapshots.keys() == ({at} if at else set())
        book.commit(hold, text)
        assert book.snapshots.resumable(hold, 259) == at
        book.close(hold)
        assert book.snapshots.num_used == (at > 0)
        book.forget()


def test_a_fork_is_a_copy_and_what_it_is_made_of_stays_until_then() -> None:
    book = PageBook(99, SIZE, num_slots=5, num_snapshots=2)
    text = range(40)
    leader = hold_of(book, text, 40)
    book.bind(leader, 39)
    book.commit(leader, text[:39])
    first, second = (hold_of(book, text, 41) for _ in range(2))
    free = book.num_available
    for hold in (first, second):
        assert hold.num_matched == 32
        book.bind(hold, 39)
        book.snapshots.fork(leader, hold)
    slot, page = leader.slot, leader.pages[2]
    assert len({slot, first.slot, second.slot}) == 3
    book.close(leader)
    assert (book.num_free_slots, book.num_available) == (1, free), "both are to be copied"
    book.close(first)
    assert book.num_free_slots == 2
    copies = Copies(((slot, second.slot),), ((page, second.pages[2]),))
    assert book.snapshots.drain() == copies
    book.launched(1)
    book.settled(1)
    assert book.num_free_slots == 3
    check_book(book, [second])
    book.close(second)
    book.forget()
    assert (book.num_free_slots, book.num_available) == (4, book.num_pages)


def prefilled(*, recurrent: bool, num_snapshots: int = 32) -> int:
    """Tokens that a prefill worker computes for its eight of sixteen agents, twenty turns each."""
    book = PageBook(
        4000, 64, num_slots=9 * recurrent, num_snapshots=num_snapshots * recurrent
    )  # what 64 rows have
    limits = PromptLimits(40_000, grain=GRID if recurrent else 1)
    engine = EngineConfig(max_num_reqs=8)
    scheduler = PrefillScheduler(book, engine, limits, Pace([], 1, 1, 2048, 2, 0.5))
    rng, total = random.Random(1), 0
    system = [rng.randrange(9_999) for _ in range(4096)]
    talks = [[*system, *(rng.randrange(9_999) for _ in range(90))] for _ in range(8)]
    for _ in range(20):
        for talk in rng.sample(talks, len(talks)):
            asked = Prefill(Xfer("x", 1, "d", "p"), tuple(talk), 0, 0.0, None, len(talk))
            req = scheduler.admit(asked)
            assert req is not None
            while (plan := scheduler.plan()) is not None:
                total += sum(len(chunk.tokens) for chunk in plan.chunks)
                scheduler.commit(scheduler.settle(plan.step, []))
            scheduler.drop(req)
            # A call of a tool, and what that has returned.
            more = rng.randint(40, 120) + rng.randint(100, 1500)
            talk += (rng.randrange(9_999) for _ in range(more))
    return total


def test_agents_cost_little_more_than_with_keys_alone() -> None:
    """Half of the trace of two prefill workers: an agent's turns are sent to the same one."""
    dense, recurrent = prefilled(recurrent=False), prefilled(recurrent=True)
    print(f"prefilled tokens: {dense:,} with keys alone, {recurrent:,} with states")
    assert recurrent <= 1.1 * dense
    assert prefilled(recurrent=True, num_snapshots=0) > 5 * dense
