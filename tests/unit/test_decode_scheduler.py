"""The decode scheduler under random load, against a device double and a one-request reference.

The double keeps what `worker.step.state.StepState` keeps and applies plans as
`worker.run.runner` does, at a random moment between launch and settle. A KV slot holds a hash of
every token up to its own, so any mix-up of pages changes what a later step reads; the drawn token
is a pure function of what was read, the seed and the position.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from tests.support import pairwise
from tests.support.any_width import AnyWidth
from tests.support.books import check_book
from worker.api import FinishReason, Sampling
from worker.cache.book import Hold, PageBook
from worker.config import EngineConfig
from worker.errors import OutOfPages
from worker.plan import Drawn, Plan, RowStart
from worker.schedule.decode import DecodeScheduler, finish_reason
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import Phase, Req

VOCAB = 40
EOS = frozenset({0, 1})
_MASK = (1 << 61) - 1


def mix(*words: int) -> int:
    """A hash that does not depend on the process."""
    h = 0x9E3779B97F4A7C15
    for word in words:
        h = ((h ^ (word + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
        h ^= h >> 29
    return h


def draw(prefix: int, seed: int, position: int, stops: frozenset[int], min_len: int) -> int:
    """The token at `position` after a text whose hash is `prefix`."""
    salt = 0
    while True:
        token = mix(prefix, seed, position, salt) % VOCAB
        if position >= min_len or token not in stops:
            return token
        salt += 1


@dataclass(frozen=True)
class Script:
    """One request of the load, and the only text it may have."""

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    remote: bool

    @property
    def max_len(self) -> int:
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def min_len(self) -> int:
        return self.num_prompt_tokens + self.sampling.min_tokens

    @property
    def stops(self) -> frozenset[int]:
        return stop_set(self.sampling)

    @cache  # noqa: B019 (scripts live as long as the test)
    def text(self) -> tuple[int, ...]:
        """Prompt + output when nothing else runs."""
        tokens = list(self.tokens)
        prefix = self.prefix(tokens)[-1]
        while True:
            token = draw(prefix, self.sampling.seed, len(tokens), self.stops, self.min_len)
            tokens.append(token)
            prefix = mix(prefix, token)
            if token in self.stops or len(tokens) >= self.max_len:
                return tuple(tokens)

    @cache  # noqa: B019
    def kv(self) -> tuple[int, ...]:
        """What slot i of its KV must hold, for every token of the text."""
        return tuple(self.prefix(list(self.text())))

    @property
    def reason(self) -> FinishReason:
        return FinishReason.STOP if self.text()[-1] in self.stops else FinishReason.LENGTH

    @staticmethod
    def prefix(tokens: list[int]) -> list[int]:
        hashes, h = [], 0
        for token in tokens:
            h = mix(h, token)
            hashes.append(h)
        return hashes


def stop_set(sampling: Sampling) -> frozenset[int]:
    return frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else EOS)


class Device:
    """Step state by row and the pages, as worker.step.state and worker.run.runner treat them."""

    def __init__(
        self, num_rows: int, num_pages: int, page_size: int, max_pages: int, span: int
    ) -> None:
        n, self.span = num_rows + 1, span
        self.page_size = page_size
        self.table = [[0] * max_pages for _ in range(n)]
        self.active = [False] * n
        self.seq_len = [0] * n
        self.last_token = [0] * n
        self.start: list[RowStart | None] = [None] * n
        self.memory = [0] * (num_pages * page_size)

    def slot(self, row: int, position: int) -> int:
        page = self.table[row][position // self.page_size]
        return page * self.page_size + position % self.page_size

    def read(self, row: int, first: int, length: int) -> list[int]:
        return [self.memory[self.slot(row, i)] for i in range(first, length)]

    def write(self, row: int, position: int, token: int) -> int:
        """The KV of `token`, from what its row reads; the slot's page."""
        before = self.memory[self.slot(row, position - 1)] if position else 0
        slot = self.slot(row, position)
        self.memory[slot] = mix(before, token)
        return slot // self.page_size

    def apply(self, plan: Plan) -> None:
        for row in plan.releases:
            self.active[row] = False
        for start in plan.starts:
            self.start[start.row] = start
            self.active[start.row] = start.active
            self.seq_len[start.row] = start.seq_len
            self.last_token[start.row] = start.last_token
        for each in plan.pages:
            assert each.row > 0
            assert 0 not in each.pages or self.span
            self.table[each.row][each.first : each.first + len(each.pages)] = each.pages

    def sample(self, row: int, position: int) -> Drawn:
        """Draw at `position` of an active row and move its state on."""
        start = self.start[row]
        stops = stop_set(start.sampling)
        prefix = self.memory[self.slot(row, position - 1)]
        token = draw(prefix, start.sampling.seed, position, stops, start.min_len)
        stop = token in stops and position >= start.min_len
        finished = stop or position + 1 >= start.max_len
        self.seq_len[row], self.last_token[row] = position, token
        self.active[row] = not finished
        return Drawn((token,), finished)


@dataclass
class Launched:
    plan: Plan
    owners: dict[int, tuple[Req, Script, frozenset[int]]]  # row -> what its hold owned at launch
    touched: frozenset[int]  # every page in the tables of its rows
    rows: frozenset[int]  # every row that a live request had at launch
    drawn: list[Drawn] | None = None


@dataclass
class Pull:
    """The KV of one request on its way; the test is the engine that writes it."""

    req: Req
    draws: bool  # its next token comes with it, and has not come yet
    num_stored: int  # tokens whose KV comes
    num_pages: int  # of the prompt, when complete
    num_fails_at: int  # pages after which the attempt fails; num_pages = never
    num_landed: int
    num_found: int  # pages that its hold had at first
    first: int  # page that will be read
    running: list[tuple[int, int]] = field(default_factory=list)  # (page of the prompt, page id)
    aborted: bool = False


@dataclass(frozen=True)
class Load:
    num_pages: int
    page_size: int
    rows: int
    chunk: int
    growth: int
    max_prompt: int
    max_output: int
    share: float = 0.5  # requests that begin with a common prefix
    remote: float = 0.5  # requests whose KV is pulled
    abort: float = 0.01
    cache: bool = True
    overlap: float = 0.9  # turns that launch before they settle
    arrive: float = 0.4
    widths: tuple[int, ...] = (1,)
    span: int = 0


class Simulation:
    """DecodeWorker's turn around a scheduler, with everything else played by the test."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.random = random.Random(seed)
        engine = EngineConfig(
            max_num_reqs=load.rows, max_prefill_tokens=load.chunk, growth_tokens=load.growth,
            penalty_rows=16,
        )  # fmt: skip
        self.book = PageBook(
            load.num_pages,
            load.page_size,
            prefix_cache=load.cache,
            span=load.span,
            step_tokens=load.chunk,
        )
        widths = AnyWidth(load.widths, self.random)
        self.queues = DecodeQueues(self.book, engine)
        self.scheduler = DecodeScheduler(self.queues, EOS, widths)
        self.queues.on_preempt = lambda _: self.counts.update(("preemptions",))
        longest = load.max_prompt + load.max_output + max(load.widths)
        max_pages = -(-longest // load.page_size) + 1
        self.device = Device(load.rows, load.num_pages, load.page_size, max_pages, load.span)
        self.stems = [self._tokens(load.max_prompt) for _ in range(3)]
        self.scripts: dict[Req, Script] = {}  # admitted and not over
        self.backlog: list[tuple[Req, Script]] = []
        self.pulls: list[Pull] = []
        self.in_flight: list[Launched] = []
        self.counts: Counter[str] = Counter()
        self.ids = 0
        self.arriving = True
        self.num_chunk_steps = 0
        self.num_stuck = 0  # turns in a row

    # The load.

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(VOCAB) for _ in range(count))

    def arrive(self) -> None:
        rnd, load = self.random, self.load
        length = rnd.randint(1, load.max_prompt)
        prompt = self._tokens(length)
        if rnd.random() < load.share:
            common = rnd.randint(0, length)
            prompt = rnd.choice(self.stems)[:common] + prompt[common:]
        max_tokens = rnd.randint(1, load.max_output)
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=rnd.choice((0.0, 1.0)),
            seed=rnd.randrange(1 << 40),
            ignore_eos=rnd.random() < 0.7,
            stop_ids=tuple(rnd.sample(range(VOCAB), rnd.choice((0, 0, 1)))),
            min_tokens=rnd.choice((0, 0, 3, max_tokens)),
        )
        script = Script(prompt, length, sampling, rnd.random() < load.remote)
        if rnd.random() < 0.1:  # sent again after its first decode worker died
            cut = rnd.randint(length, max(length, len(script.text()) - 1))
            resumed = Script(script.text()[:cut], length, sampling, script.remote)
            assert resumed.text() == script.text()
            script = resumed
        self.ids += 1
        req = Req(f"r{self.ids}", 1, "router", list(script.tokens), length, sampling, 0.0)
        self.backlog.append((req, script))

    def place(self, req: Req) -> None:
        """As worker.requests.admission.Admission.place."""
        if req.num_computed_tokens == len(req.tokens) - 1:
            self.counts["cached"] += 1
            self.queues.make_ready(req)
        elif not self.scripts[req].remote:
            self.counts["local"] += 1
            self.queues.prefill_locally(req)
        else:
            draws = self.random.random() < 0.5
            num_stored = len(req.tokens) - (not draws)
            num_pages = self.book.num_pages_for(num_stored)
            num_found = len(req.hold.pages)
            first = self.book.first_read(len(req.tokens) - 1)
            landed = max(num_found, first)
            fails = num_pages
            if self.random.random() < 0.15:
                fails = self.random.randint(landed, num_pages - 1)
            self.pulls.append(
                Pull(req, draws, num_stored, num_pages, fails, landed, num_found, first)
            )

    # One turn.

    def turn(self) -> None:
        rnd = self.random
        if self.arriving and rnd.random() < self.load.arrive and len(self.backlog) < 5:
            self.arrive()
        while self.backlog:
            req, script = self.backlog[0]
            before = self.book.num_reserved, self.book.num_holds, self.book.num_available
            if not self.queues.admit(req):
                after = self.book.num_reserved, self.book.num_holds, self.book.num_available
                assert (before, req.hold) == (after, None)
                break
            self.backlog.pop(0)
            self.scripts[req] = script
            self.place(req)
        self.maybe_end_early()
        self.move_pulls()
        for req in list(self.queues.preempted):
            if not self.queues.admit(req):
                break
            self.place(req)
        if self.in_flight and rnd.random() > self.load.overlap:
            self.settle()
        decodable = [req for req in self.queues.running.values() if self.may_decode(req)]
        had_work = self.queues.has_work
        plan = self.scheduler.plan()
        moves = plan is not None or bool(self.in_flight)
        assert had_work or plan is None, "a step without work"
        self.num_stuck = 0 if moves or not had_work else self.num_stuck + 1
        assert self.num_stuck <= 1, "work, and no step: a healthy worker would be killed"
        assert not any(req.num_in_flight for req in self.queues.preempted), "left too early"
        alternates = plan is None or not plan.chunks or not decodable
        self.num_chunk_steps = 0 if alternates else self.num_chunk_steps + 1
        assert self.num_chunk_steps <= 1, "rows stand still for two chunk steps in a row"
        if plan is not None:
            self.launch(plan)
        self.maybe_execute()
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            self.settle()
        self.check()

    def may_decode(self, req: Req) -> bool:
        leaving = req in self.queues.leaving
        return not leaving and len(req.tokens) + req.num_in_flight < req.max_len

    def maybe_end_early(self) -> None:
        rnd = self.random
        if not self.scripts or rnd.random() > self.load.abort:
            return
        req = rnd.choice(list(self.scripts))
        fetching = [pull for pull in self.pulls if pull.req is req]
        if fetching:
            assert req.phase is Phase.FETCHING
            fetching[0].aborted = True
            return
        self.counts[f"aborted {req.phase.name}"] += 1
        self.verify_text(req, final=False)
        if rnd.random() < 0.5:  # as DecodeLoop._stop
            at_position = rnd.randint(0, len(req.tokens))
            del req.tokens[max(at_position, req.num_prompt_tokens) :]
            req.num_computed_tokens = min(req.num_computed_tokens, len(req.tokens))
        self.end(req)

    def move_pulls(self) -> None:
        for pull in list(self.pulls):
            if pull.draws and not pull.aborted and self.random.random() < 0.2:
                self.tell_token(pull)
            if pull.running:
                if self.random.random() < 0.5:
                    self.write_pulled(pull)
                continue
            if pull.num_landed >= pull.num_pages and pull.draws and not pull.aborted:
                continue
            if pull.aborted or pull.num_landed >= pull.num_fails_at:
                self.pulls.remove(pull)
                self.leave_pull(pull)
            elif self.random.random() < 0.7:
                self.bind_pull(pull)

    def tell_token(self, pull: Pull) -> None:
        """As Fetch.announced and DecodeLoop._pass_on: it ends the text before its KV is here."""
        req, text = pull.req, self.scripts[pull.req].text()
        req.tokens.append(text[len(req.tokens)])
        pull.draws = False
        pull.aborted = finish_reason(req, EOS) is not None
        assert finish_reason(req, EOS) in (None, self.scripts[req].reason)
        self.counts["told the last" if pull.aborted else "told"] += 1
        self.verify_text(req, final=pull.aborted)

    def leave_pull(self, pull: Pull) -> None:
        """As Fetch.end and DecodeLoop._fetch_ended."""
        req = pull.req
        num_wanted = self.book.num_pages_for(len(req.tokens) - 1)
        if pull.num_landed < num_wanted and pull.first > pull.num_found:
            self.book.cut(req.hold, pull.num_found)
            pull.num_landed = pull.num_found
        req.num_computed_tokens = pull.num_landed * self.load.page_size
        req.num_computed_tokens = min(req.num_computed_tokens, len(req.tokens) - 1)
        self.book.trim(req.hold, req.num_computed_tokens)
        if pull.aborted:
            self.counts["aborted FETCHING"] += 1
            self.end(req)
        elif pull.num_landed >= num_wanted:
            self.counts["fetched"] += 1
            self.queues.make_ready(req)
        else:
            self.counts["fallback"] += 1
            self.queues.prefill_locally(req)

    def bind_pull(self, pull: Pull) -> None:
        hold = pull.req.hold
        end = self.random.randint(pull.num_landed + 1, pull.num_pages)
        before = list(hold.pages), set(hold.private), hold.num_reserved
        try:
            new = self.book.bind(hold, end * self.load.page_size, for_pull=True, first=pull.first)
        except OutOfPages:
            self.counts["pull waited for cooling"] += 1
            assert self.in_flight, "with no step in flight a reserved page can always be pulled to"
            assert before == (hold.pages, hold.private, hold.num_reserved)
            return
        touched = frozenset().union(*(step.touched for step in self.in_flight))
        assert not touched & set(new), "a pull into pages that a step in flight may touch"
        pull.running = list(enumerate(hold.pages))[pull.num_landed : end]
        self.random.shuffle(pull.running)

    def write_pulled(self, pull: Pull) -> None:
        kv, size = self.scripts[pull.req].kv(), self.load.page_size
        for _ in range(self.random.randint(1, len(pull.running))):
            index, page = pull.running.pop()
            for offset in range(size):
                position = index * size + offset
                # Beyond the prompt a pulled page holds the other worker's garbage.
                value = kv[position] if position < pull.num_stored else mix(position, page)
                self.device.memory[page * size + offset] = value
        if not pull.running:
            pull.num_landed = len(pull.req.hold.pages)

    # The device.

    def launch(self, plan: Plan) -> None:
        running = self.queues.running
        rows = plan.decode or tuple(chunk.row for chunk in plan.chunks)
        assert len(set(rows)) == len(rows) > 0
        assert not (plan.decode and plan.chunks)
        by_row = {req.row: req for req in self.scripts if req.row}
        owners: dict[int, tuple[Req, Script, frozenset[int]]] = {}
        writable: Counter[int] = Counter()
        for row in rows:
            req = by_row[row]
            owners[row] = req, self.scripts[req], frozenset(req.hold.private)
            if plan.decode:
                first = len(req.tokens) - 1
                certain = first + req.num_in_flight - 1
                assert certain + 1 < req.max_len, "its last token is in flight already"
                # Bound of the last slot that is written.
                last = min(first + req.num_slots_in_flight, req.max_len + plan.width - 1) - 1
            else:
                chunk = next(each for each in plan.chunks if each.row == row)
                first, last = chunk.start, chunk.start + len(chunk.tokens) - 1
                assert first <= last
            size = self.load.page_size
            pages = req.hold.pages[first // size : last // size + 1]
            assert len(pages) == last // size - first // size + 1, "launched without its slots"
            writable.update(pages)
            assert set(pages) <= req.hold.private, "would write a shared page"
        assert not writable or max(writable.values()) == 1, "a page is writable by two rows"
        assert sum(len(chunk.tokens) for chunk in plan.chunks) <= self.load.chunk
        touched = frozenset(page for req in by_row.values() if req.hold for page in req.hold.pages)
        self.counts["steps"] += 1
        self.counts["chunk steps" if plan.chunks else "decode steps"] += 1
        assert len(running) <= self.load.rows
        for each in (*plan.starts, *plan.pages):
            assert each.row in by_row, "says something about a row that is nobody's"
        starts = [start.row for start in plan.starts]
        assert len(set(starts)) == len(starts)
        self.in_flight.append(Launched(plan, owners, touched, frozenset(by_row)))
        assert len(self.in_flight) <= 2

    def maybe_execute(self) -> None:
        for step in self.in_flight:
            if step.drawn is None:
                if self.random.random() < 0.5:
                    return
                self.execute(step)

    def execute(self, step: Launched) -> None:
        device, plan = self.device, step.plan
        device.apply(plan)
        active = {row for row, is_active in enumerate(device.active) if is_active}
        assert active <= step.rows, "a row that is nobody's is active"
        pulling = {page for pull in self.pulls for _, page in pull.running}
        step.drawn = []
        for row in plan.decode:
            if not device.active[row]:
                device.write(0, 0, 0)
                step.drawn.append(Drawn((), False))
                continue
            step.drawn.append(self._verify(step, row, pulling))
        for chunk in plan.chunks:
            for offset, token in enumerate(chunk.tokens):
                self._write(step, chunk.row, chunk.start + offset, token, pulling)
            end = chunk.start + len(chunk.tokens)
            assert end <= plan.max_seq_len_ub
            self._attend(step, chunk.row, chunk.start, end)
            if chunk.sample:
                step.drawn.append(device.sample(chunk.row, end))

    def _verify(self, step: Launched, row: int, pulling: set[int]) -> Drawn:
        """A window of one row: its last token, and drafts of which some are right."""
        device, plan = self.device, step.plan
        first, text = device.seq_len[row], step.owners[row][1].text()
        assert first + plan.width <= plan.max_seq_len_ub
        drafts = [*text[first + 1 : first + plan.width]]
        drafts = [d if self.random.random() < 0.8 else (d + 1) % VOCAB for d in drafts]
        drafts += [-1] * (plan.width - 1 - len(drafts))
        for place, token in enumerate([device.last_token[row], *drafts]):
            self._write(step, row, first + place, max(token, 0), pulling, is_draft=place > 0)
        tokens: list[int] = []
        for draft in [*drafts, -1]:
            drawn = device.sample(row, first + len(tokens) + 1)
            tokens += drawn.tokens
            if drawn.finished or draft != tokens[-1]:
                break
        self.counts[f"kept {len(tokens)} of {plan.width}"] += 1
        self._attend(step, row, first, first + len(tokens))
        return Drawn(tuple(tokens), drawn.finished, (), tuple(drafts))

    def _write(
        self, step: Launched, row: int, position: int, token: int, pulling: set[int], *,
        is_draft: bool = False,
    ) -> None:  # fmt: skip
        page = self.device.write(row, position, token)
        _, script, owned = step.owners[row]
        assert is_draft or script.text()[position] == token
        assert page in owned, f"row {row} wrote page {page}, which it did not own at launch"
        assert page not in pulling, "a step wrote a page that a pull writes"

    def _attend(self, step: Launched, row: int, first: int, length: int) -> None:
        """What the tokens from `first` on read, in a text of `length` tokens."""
        oldest = max(0, first + 1 - self.load.span) if self.load.span else 0
        expected = list(step.owners[row][1].kv()[oldest:length])
        assert self.device.read(row, oldest, length) == expected, f"row {row} reads another's KV"

    def settle(self) -> None:
        step = self.in_flight.pop(0)
        if step.drawn is None:
            self.execute(step)
        seen: set[Req] = set()
        for req, drawn, _, reason in self.scheduler.settle(step.plan.step, step.drawn):
            assert req not in seen
            seen.add(req)
            assert tuple(req.tokens[-len(drawn.tokens) :]) == drawn.tokens
            self.verify_text(req, final=reason is not None)
            if reason is not None:
                assert reason == self.scripts[req].reason
                self.counts[reason.value] += 1
                self.end(req)

    def verify_text(self, req: Req, *, final: bool) -> None:
        text = self.scripts[req].text()
        assert tuple(req.tokens) == text[: len(req.tokens)], "text depends on what else runs"
        assert final == (len(req.tokens) == len(text)), "ended too early or too late"

    def end(self, req: Req) -> None:
        assert req.phase is not Phase.FINISHED
        self.queues.finish(req)
        self.queues.finish(req)  # a second call does nothing
        assert req.phase is Phase.FINISHED
        assert req.hold is None
        assert req.row == 0
        if self.random.random() < 0.1:  # the next turn of a chat: output becomes prompt
            stem = self.scripts[req].text()[: self.load.max_prompt]
            if len(stem) == self.load.max_prompt:
                self.stems[self.random.randrange(len(self.stems))] = stem
        del self.scripts[req]
        self.counts["finished"] += 1

    # Laws that hold between turns.

    def check(self) -> None:
        scheduler = self.scheduler
        check_book(self.book, [req.hold for req in self.scripts if req.hold is not None])
        where = Counter(held_by(scheduler))
        where.update(pull.req for pull in self.pulls)
        assert where == Counter(list(self.scripts)), "a request is in exactly one place"
        rows = [req.row for req in self.scripts if req.row]
        assert len(set(rows)) == len(rows)
        for req in self.scripts:
            assert (req.hold is None) == (req.phase is Phase.PREEMPTED)
            if req.hold is not None and self.load.span:
                self.check_window(req.hold)
            assert req.phase is not Phase.RUNNING or scheduler.queues.running[req.row] is req
        arrivals = [req.arrival for req in scheduler.queues.preempted]
        assert arrivals == sorted(arrivals)

    def check_window(self, hold: Hold) -> None:
        """Pages in use are flat in the length of a text."""
        load, num = self.load, self.book.num_pages_for
        held = len(hold.pages) - hold.pages.count(0)
        widest = 4 * max(load.widths)
        assert held <= max(num(load.span + 2 * load.chunk), num(load.span + widest)) + 4
        self.counts["trimmed"] += hold.num_trimmed > 0
        self.counts["matched through a gap"] += any(not node.page for node in hold.nodes)

    def drain(self, limit: int = 50_000) -> None:
        """No more arrivals: everything must end, and everything must be given back."""
        self.arriving = False
        for _ in range(limit):
            if not self.scripts and not self.backlog and not self.in_flight:
                break
            self.turn()
        else:
            left = [(req.key, req.phase, len(req.tokens), req.max_len) for req in self.scripts]
            raise AssertionError(f"starved: {left[:5]} {dict(self.counts)}")
        book = self.book
        assert self.counts["finished"] == self.ids
        assert (book.num_holds, book.num_reserved, book.num_private) == (0, 0, 0)
        assert book.num_available == book.num_pages
        assert not held_by(self.scheduler)


def held_by(scheduler: DecodeScheduler) -> list[Req]:
    return [
        *scheduler.queues.local,
        *scheduler.queues.ready,
        *scheduler.queues.running.values(),
        *scheduler.queues.preempted,
    ]


NUM_STEPS = 4_000 if pairwise.whole else 800
LOADS = {
    "tight": Load(24, 4, rows=6, chunk=16, growth=4, max_prompt=20, max_output=30),
    "one-token-growth": Load(20, 4, rows=5, chunk=7, growth=1, max_prompt=16, max_output=24),
    "page-of-one": Load(40, 1, rows=4, chunk=5, growth=2, max_prompt=12, max_output=12),
    "roomy": Load(200, 8, rows=8, chunk=32, growth=16, max_prompt=40, max_output=20, arrive=0.8),
    "no-cache": Load(24, 4, 6, 16, 4, max_prompt=20, max_output=30, cache=False),
    "shared": Load(24, 4, 6, 9, 3, max_prompt=24, max_output=20, share=1.0, abort=0.05),
    "one-row": Load(16, 4, rows=1, chunk=8, growth=2, max_prompt=12, max_output=16),
    "sync": Load(20, 4, 5, 8, 2, max_prompt=16, max_output=24, overlap=0.0),
    "windows": Load(48, 4, 6, 16, 4, max_prompt=20, max_output=30, widths=(1, 2, 4, 8)),
    "windows, tight": Load(24, 4, 5, 8, 2, max_prompt=16, max_output=24, widths=(1, 3, 16)),
    "windows, page-of-one": Load(40, 1, 4, 5, 2, max_prompt=12, max_output=12, widths=(2, 5)),
    "span": Load(15, 4, 8, 4, 1, max_prompt=60, max_output=30, share=0.8, span=9),
    "span, drafts": Load(16, 4, 6, 4, 1, max_prompt=40, max_output=30, widths=(1, 3, 8), span=6),
    "span, no-cache": Load(14, 4, 8, 4, 1, max_prompt=60, max_output=30, cache=False, span=9),
    "span, page-of-one": Load(20, 1, 6, 2, 2, max_prompt=40, max_output=20, abort=0.05, span=5),
}


@pytest.mark.parametrize("name", LOADS)
def test_text_is_that_of_a_lonely_request_whatever_happens_around_it(name: str) -> None:
    simulation = Simulation(LOADS[name], seed=sum(name.encode()) + 2)
    while simulation.counts["steps"] < NUM_STEPS:
        simulation.turn()
    simulation.drain()
    counts = simulation.counts
    least = {"local": 20, "fetched": 20, "fallback": 0, "told": 20, "told the last": 0}
    least |= {"stop": 10, "length": 10, "preemptions": -1 if name in ("roomy", "one-row") else 50}
    if LOADS[name].span:
        gaps = 20 if LOADS[name].cache else -1
        least |= {"trimmed": 50, "matched through a gap": gaps, "preemptions": 2}
    for each, num in least.items():
        assert counts[each] > (num if pairwise.whole else num // 4), (each, counts)


def test_loads_reach_every_corner() -> None:
    """The laws are not vacuous: preemption, pulls that wait, aborts at every phase."""
    total: Counter[str] = Counter()
    for name in ("shared", "one-row", "windows"):
        simulation = Simulation(replace(LOADS[name], abort=0.1), seed=3)
        while simulation.counts["steps"] < 1_000:
            simulation.turn()
        simulation.drain()
        total += simulation.counts
    reached = [f"aborted {name}" for name in ("FETCHING", "LOCAL", "READY", "RUNNING", "PREEMPTED")]
    reached += ["pull waited for cooling", "cached"]
    reached += [f"kept {num} of {width}" for width in (1, 2, 4, 8) for num in range(1, width + 1)]
    assert not [each for each in reached if not total[each]], total


def test_a_token_drawn_elsewhere_is_followed_by_one_drawn_here() -> None:
    """A prefill worker has drawn and then failed; pages for both were promised."""
    engine = EngineConfig(max_num_reqs=1, max_prefill_tokens=8, penalty_rows=1, growth_tokens=1)
    queues = DecodeQueues(PageBook(3, 4), engine)
    req = Req("r", 1, "r", [1, 2, 3], 3, Sampling(4, ignore_eos=True), 0.0)
    assert queues.admit(req)
    req.tokens.append(4)
    assert not queues.admit(Req("s", 1, "r", [1], 1, Sampling(4), 0.0)), "it would take them"
    queues.prefill_locally(req)
    assert len(queues.take_chunks(0.0)) == 1


@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (2, 2), (5, 5), (9, 3)])
def test_a_prompt_computed_here_gets_a_row_although_others_are_always_ready(
    rows: int, slots: int
) -> None:
    """Or a slot for its penalty, of which there may be fewer."""
    engine = EngineConfig(max_num_reqs=rows, max_prefill_tokens=8, penalty_rows=slots)
    queues = DecodeQueues(PageBook(400, 4), engine)
    scheduler, turns = DecodeScheduler(queues, EOS), list[int]()
    queues.on_row = lambda req, now: turns.append(req.arrival)

    def ask(*, here: bool) -> None:
        sampling = Sampling(4, ignore_eos=True, presence_penalty=0.1)
        req = Req("r", queues._arrivals, "r", [2, 3, 4], 3, sampling, 0.0)
        assert queues.admit(req)
        assert req.hold is not None
        queues.book.bind(req.hold, 3)
        (queues.prefill_locally if here else queues.make_ready)(req)

    for number in range(40 * rows):
        while len(queues.ready) <= rows:
            ask(here=False)
        if number % 8 == 0:
            ask(here=True)
        if (plan := scheduler.plan()) is not None:
            sampled = scheduler.launched[plan.step].sampled
            drawn = [Drawn((7,), len(req.tokens) + 1 == req.max_len) for req in sampled]
            for req, _, _, reason in scheduler.settle(plan.step, drawn):
                if reason is not None:
                    queues.finish(req)
    assert set(range(1, max(turns) - 2 * rows)) <= set(turns), "one waits for ever"
