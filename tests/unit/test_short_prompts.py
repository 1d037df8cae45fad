"""Short prompts beside long ones: real schedulers, and steps as long as on an H200 (Qwen3-8B)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.delay_mix import sections
from tests.support.lockstep import PREFILL, Ask, Lockstep
from worker.api import Prefill, Sampling, Xfer
from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.plan import Chunk, Drawn, Plan
from worker.prefill import PrefillLoop
from worker.requests import admission
from worker.requests.admission import to_ask
from worker.run.piecewise import chunk_buckets
from worker.schedule import prefill
from worker.schedule.asked import PromptLimits
from worker.schedule.order import in_order, note_passed, num_before
from worker.schedule.pace import Pace, StepTime, Stretch, num_pairs
from worker.schedule.prefill import SHORT_S, PrefillScheduler
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import PrefillReq, Req

SHORT, LONG, CHUNK = 512, 32_768, 2048
STEP_MS = {16: 4.3, 128: 5.4, 512: 13, 1024: 24, 2048: 46, 4096: 95}  # nothing before the chunk
PAIR_S = 4 * 36 * 32 * 128 / 6e14  # layers, heads, head_dim; FLOP/s
GREEDY = Sampling(5, temperature=0.0)


def step_s(chunks: Sequence[Stretch]) -> float:
    num_tokens = sum(size for size, _ in chunks)
    alone_ms = np.interp(num_tokens, list(STEP_MS), list(STEP_MS.values()))
    return float(alone_ms) / 1e3 + PAIR_S * num_pairs(chunks)


def of(plan: Plan) -> list[Stretch]:
    return [(len(chunk.tokens), chunk.start) for chunk in plan.chunks]


def pace(chunk: int = CHUNK) -> Pace:
    alone = ((size, step_s([(size, 0)])) for size in chunk_buckets(chunk))
    return Pace([StepTime(size, s, s) for size, s in alone], 4, 147_456, chunk, 36)


@dataclass
class Worker:
    """A prefill worker on a clock of its own; the next step is launched as one begins."""

    pace: Pace = field(default_factory=pace)
    now: float = 0.0
    first_s: dict[int, list[float]] = field(default_factory=lambda: {SHORT: [], LONG: []})
    plans: list[Plan] = field(default_factory=list[Plan])

    def __post_init__(self) -> None:
        engine = EngineConfig(max_num_reqs=64, max_prefill_tokens=self.pace.max_tokens)
        book = PageBook(40_000, 64)
        self.scheduler = PrefillScheduler(book, engine, PromptLimits(40_000), self.pace)
        self.asked: dict[PrefillReq, float] = {}
        self.flight: list[tuple[Plan, float]] = []  # with its end

    def ask(self, num_tokens: int, at: float) -> PrefillReq:
        tokens = (len(self.asked), *range(1, num_tokens))
        asked = Prefill(Xfer("x", 1, "d", "p"), tokens, 0, 0.0, GREEDY, num_tokens)
        req = self.scheduler.admit(asked)
        assert req is not None
        self.asked[req] = at
        return req

    def launch(self) -> None:
        free_at = max([self.now, *(end for _, end in self.flight)])
        if len(self.flight) < 2 and (plan := self.scheduler.plan(self.now)) is not None:
            self.flight.append((plan, free_at + step_s(of(plan))))
            self.plans.append(plan)

    def settle(self) -> None:
        plan, self.now = self.flight.pop(0)
        self.pace.took(of(plan), step_s(of(plan)))
        drawn = [Drawn((7,), True) for chunk in plan.chunks if chunk.sample]
        for req in self.scheduler.settle(plan.step, drawn):
            if req.token is not None:
                self.first_s[len(req.tokens)].append(self.now - self.asked[req])
                self.scheduler.drop(req)

    def run(self, arrivals: Sequence[tuple[float, int]] = ()) -> None:
        """Until all is computed."""
        left = sorted(arrivals, reverse=True)
        while left or self.flight or self.scheduler.waiting:
            self.launch()
            self.launch()
            ends_at = self.flight[0][1] if self.flight else float("inf")
            if left and left[-1][0] <= ends_at:
                self.now, num_tokens = left.pop()
                self.ask(num_tokens, self.now)
            else:
                self.settle()


def mix(seconds: float, shorts: float, longs: float, seed: int = 0) -> list[tuple[float, int]]:
    """Arrivals as of many clients, so many a second."""
    rnd, arrivals = random.Random(seed), list[tuple[float, int]]()
    for rate, num_tokens in ((shorts, SHORT), (longs, LONG)):
        at = rnd.expovariate(rate)
        while at < seconds:
            arrivals.append((at, num_tokens))
            at += rnd.expovariate(rate)
    return arrivals


def first_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "in_order", lambda waiting, **_: list(waiting))
    monkeypatch.setattr(prefill, "SHORT_S", 0.0)


def test_short_prompts_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those cost the long ones what they compute, and their chunks' shortness little."""
    arrivals = mix(40, shorts=8, longs=0.3)
    now = Worker()
    now.run(arrivals)
    first_come(monkeypatch)
    before = Worker()
    before.run(arrivals)
    short, short_before = (np.percentile(w.first_s[SHORT], 99) for w in (now, before))
    long, long_before = (np.mean(w.first_s[LONG]) for w in (now, before))
    assert short_before > 1.0
    assert short < 0.25
    assert long < 1.2 * long_before


def test_a_long_prompt_alone_is_computed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a while after short ones."""
    now = Worker()
    now.run([(0.0, SHORT), (SHORT_S + 0.1, LONG)])
    first_come(monkeypatch)
    before = Worker()
    before.run([(0.0, SHORT), (SHORT_S + 0.1, LONG)])
    assert now.first_s == before.first_s
    assert now.pace.pair_s == pytest.approx(PAIR_S, rel=0.01)


@pytest.mark.parametrize(("chunk", "shortest"), [(512, 512), (2048, 1536)])
def test_while_short_prompts_come_steps_far_into_a_long_one_are_shorter(
    chunk: int, shortest: int
) -> None:
    """But not so short that attention is slower, and never longer than is set."""
    worker = Worker(pace(chunk))
    worker.pace.pair_s = PAIR_S
    worker.run([(0.0, LONG), *((0.05 * number, SHORT) for number in range(40))])
    of_long = [of(plan) for plan in worker.plans if not plan.chunks[-1].sample]
    sizes = {sum(size for size, _ in chunks) for chunks in of_long}
    assert sizes == {shortest, chunk}
    for chunks in of_long:
        num_tokens = sum(size for size, _ in chunks)
        assert num_tokens == shortest or step_s(chunks) <= step_s([(chunk, 0)]) + 0.02


def test_what_a_tier_still_loads_does_not_count_in_a_step_s_time() -> None:
    worker = Worker()
    worker.pace.pair_s = PAIR_S
    worker.ask(LONG, 0.0).num_planned_tokens = LONG - 2 * CHUNK
    worker.ask(CHUNK, 0.0).loads = True
    worker.scheduler._short_at = 0.0
    worker.launch()
    assert of(worker.plans[0]) == [(1536, LONG - 2 * CHUNK)]


def test_what_comes_before_a_chunk_is_learnt_from_steps_that_are_noisy() -> None:
    rnd, known = random.Random(0), pace()
    for _ in range(200):
        chunks = [(CHUNK, rnd.randrange(LONG))]
        known.took(chunks, step_s(chunks) * rnd.uniform(0.98, 1.02))
    known.took([(CHUNK, 20_000)], 5.0)  # held up
    assert known.pair_s == pytest.approx(PAIR_S, rel=0.3)
    known.took([(9000, LONG)], 5.0)  # as long as none that was measured
    assert known.step_s([(9000, 0)]) == 0.0
    assert known.step_s([(1500, 8192)]) == pytest.approx(step_s([(1536, 8192)]), rel=0.1)


def test_nobody_waits_for_ever() -> None:
    """Short prompts fill the worker: a long one is passed by as many tokens as it is long."""
    worker = Worker()
    long = worker.ask(LONG, 0.0)
    num_later = 0
    while long in worker.scheduler.waiting:
        while worker.scheduler.num_queued_tokens < LONG + 4 * CHUNK:
            worker.ask(SHORT, worker.now)
        worker.launch()
        if len(worker.flight) == 2:
            worker.settle()
        num_later += sum(len(chunk.tokens) for chunk in worker.plans[-1].chunks if chunk.sample)
        assert len(worker.plans) < 100
    assert LONG <= num_later <= LONG + 2 * CHUNK


def test_a_decode_worker_computes_short_prompts_first_too() -> None:
    engine = EngineConfig(max_num_reqs=2, max_prefill_tokens=CHUNK, penalty_rows=1)
    queues = DecodeQueues(PageBook(4000, 64), engine)

    def ask(name: str, num_tokens: int) -> Req:
        tokens = list(range(num_tokens))
        req = Req(name, 1, "r", [len(name), *tokens[1:]], num_tokens, GREEDY, 1e9)
        assert queues.admit(req)
        queues.prefill_locally(req)
        return req

    long = ask("a long one", LONG)
    assert [req for req, _ in queues.take_chunks(0.0)] == [long]
    short = ask("short", SHORT)
    chunks = queues.take_chunks(0.0)
    assert [(req, len(chunk.tokens)) for req, chunk in chunks] == [
        (short, SHORT),
        (long, CHUNK - SHORT),
    ]
    assert long.num_passed_tokens == SHORT
    third = ask("third", SHORT)  # there is no row for it, and the long one goes on
    assert [req for req, _ in queues.take_chunks(0.0)] == [long]
    left = LONG - long.num_planned_tokens
    for size, before in ((SHORT - 1, 0), (SHORT, SHORT)):
        assert num_before(queues.local, size, False) == before
        assert num_before(queues.local, size, queues.rows.are_scarce) == before + left
    assert num_before(queues.local, left, False) == SHORT + left
    long.num_passed_tokens = LONG
    assert num_before(queues.local, 1, False) == left
    assert in_order([third, long], begun_first=False)[0] is long
    note_passed([long, third], {third: 3})
    assert (long.num_passed_tokens, third.num_passed_tokens) == (LONG + 3, 0)


def test_the_second_of_two_equal_prompts_waits_for_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of both is computed here, their last tokens too, which no pull would bring."""
    before, made = list[int](), Lockstep(sections("cpu", "never"), num_prefill=0)
    monkeypatch.setattr(
        admission,
        "to_ask",
        lambda inputs, *rest: before.append(inputs.num_queued_tokens) or to_ask(inputs, *rest),
    )
    made.serve([Ask(tuple(range(first, first + 50)), GREEDY) for first in (5, 6)])
    made.close()
    assert before == [0, 50]


def test_the_loop_learns_from_its_steps_and_expects_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a step is launched late once a short prompt has come."""
    monkeypatch.setattr("worker.schedule.pace.LONG_STEP_TOKENS", 1)
    made = Lockstep(sections("cpu", "always"))
    try:
        loop, prompt = made.loops[PREFILL], tuple(range(5, 105))
        assert isinstance(loop, PrefillLoop)
        arriving, launch_due = list[int](), loop.flight.launch_due
        monkeypatch.setattr(
            loop.flight, "launch_due", lambda num=0: arriving.append(num) or launch_due(num)
        )
        loop.scheduler._pace.times = [StepTime(23, 1e-9, 1e-9)]
        made.serve([Ask(prompt, GREEDY)])
        assert set(arriving) == {0}
        pair_s = loop.scheduler._pace.pair_s
        assert pair_s > 0
        chunk = Chunk(1, 40, tuple(range(20)))
        expected_s = made.engines[PREFILL].meter.chunks_s
        assert expected_s is not None
        assert expected_s(Plan(1, chunks=(chunk,))) == pytest.approx(0.95 * 800 * pair_s, rel=1e-3)
        made.serve([Ask(prompt[:9], GREEDY)])
        assert arriving[-1] == 1
    finally:
        made.close()
