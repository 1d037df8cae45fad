"""Agents' sessions before real schedulers, on a clock of its own: what is prefilled, and how late.

The router's choice (`Members`, a policy, `Sessions`) and each worker's pages and steps
(`DecodeQueues`, `DecodeScheduler`, `PageBook`) are the product's; a step takes as long as a line of
costs says. So the figures are the same on every machine, however busy.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from router.dispatch.members import Members
from router.dispatch.policy import policy
from router.dispatch.sessions import Sessions
from worker.api import Member, Sampling, WorkerStats
from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.plan import Drawn
from worker.schedule.decode import DecodeScheduler
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import Req

SIZE = 16  # tokens of a page
STEP_S, ROW_S, TOKEN_S = 0.004, 0.0002, 0.0002  # of a step, each row, each token of a prompt
PONG_S, AGAIN_S = 0.25, 0.2
# Lengths in tokens, those of tests.fault.conversations by 4; seconds.
SYSTEM, ASKED, ANSWER, RESULT = 1024, 24, (10, 30), (25, 375)
PAUSE_S, START_S = 2.0, 0.5
TOKENS = range(8, 1 << 20)


@dataclass(slots=True, eq=False)
class Turn:
    """A request, and when what happened to it."""

    session: str
    tokens: list[int]
    num_out: int
    at: float
    num_left: int  # turns of its session, itself included
    told_at: float = 0.0  # its first token


@dataclass(slots=True, eq=False)
class Worker:
    """One decode worker without a device: it prefills all by itself."""

    member: Member
    num_pages: int
    rows: int
    turns: dict[Req, Turn] = field(default_factory=dict[Req, Turn])
    num_prefilled: int = 0
    steps: bool = False  # one is under way
    lives: bool = True
    queues: DecodeQueues = field(init=False)
    scheduler: DecodeScheduler = field(init=False)

    def __post_init__(self) -> None:
        engine = EngineConfig(max_num_reqs=self.rows, max_prefill_tokens=512, penalty_rows=1)
        self.queues = DecodeQueues(PageBook(self.num_pages + 1, SIZE), engine)
        self.scheduler = DecodeScheduler(self.queues, frozenset())

    @property
    def stats(self) -> WorkerStats:
        running, book = len(self.queues.running), self.queues.book
        waiting = len(self.turns) - running
        queued = sum(len(req.tokens) - req.num_planned_tokens for req in self.queues.local)
        return WorkerStats(running, waiting, self.rows, book.num_available, book.num_pages, queued)


class Simulated:
    """One router, its workers, and sessions in a closed loop; `ended` are all turns in the end."""

    def __init__(
        self, num_workers: int, num_pages: int, rows: int, *, policy_name: str, seed: int = 0
    ) -> None:
        """num_pages, rows: of all workers together."""
        self.ended: list[Turn] = []
        self.num_moved = 0
        self._now, self._numbers = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._policy, self._sessions = policy(policy_name), Sessions(lambda: self._now)
        self._members, self._seed, self._own = Members(), seed, dict[str, random.Random]()
        members = [Member(f"decode-{i}", "decode", "1", "tcp://x:1") for i in range(num_workers)]
        part = num_pages // num_workers, rows // num_workers
        self.workers = {member.peer: Worker(member, *part) for member in members}
        for worker in self.workers.values():
            worker.queues.retention = type(worker.queues.retention)(
                worker.queues.book, lambda: self._now
            )
        self._members.update(members)
        self._pongs()

    def run(self, num_sessions: int, num_turns: int, *, kill_at: float | None = None) -> None:
        """Serve all; kill_at: when the first worker dies."""
        system = random.Random(self._seed).choices(TOKENS, k=SYSTEM)
        for i in range(num_sessions):
            name, own = f"owner/s{i}", random.Random(f"{self._seed} {i}")
            self._own[name] = own  # the same whatever the others do
            asked = [*system, *own.choices(TOKENS, k=ASKED)]
            self._later(i * START_S, partial(self._turn, name, asked, num_turns))
        if kill_at is not None:
            self._later(kill_at, lambda: self._kill(next(iter(self.workers))))
        while len(self.ended) < num_sessions * num_turns:
            self._now, _, event = heapq.heappop(self._events)
            event()

    @property
    def num_prefilled(self) -> int:
        """Tokens, of all workers."""
        return sum(worker.num_prefilled for worker in self.workers.values())

    def first_token_s(self, q: float) -> float:
        """A quantile of the time to the first token."""
        return float(np.quantile([turn.told_at - turn.at for turn in self.ended], q))

    def _later(self, after_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + after_s, next(self._numbers), event))

    def _pongs(self) -> None:
        for peer, worker in self.workers.items():
            if worker.lives:
                self._members.pong(peer, worker.stats)
        self._later(PONG_S, self._pongs)

    def _turn(self, name: str, tokens: list[int], num_left: int) -> None:
        num_out = self._own[name].randint(*ANSWER)
        turn = Turn(name, tokens, num_out, self._now, num_left)
        self._sessions.begin(name)
        self._place(turn)

    def _place(self, turn: Turn) -> None:
        """As `Queue.place`."""
        decode = self._members.open_decode(self._now)
        if not decode:
            self._later(AGAIN_S, lambda: self._place(turn))
            return
        if self._policy.follows_sessions:
            at = self._sessions.choose(turn.session, decode, len(turn.tokens))
            decode = decode if at is None else [at]
        route = self._policy.choose(turn.tokens, decode, [])
        peer = route.decode
        self.num_moved += self._sessions.sent(turn.session, peer) == "moved"
        worker = self.workers[peer]
        sampling = Sampling(turn.num_out, ignore_eos=True)
        name, num = str(next(self._numbers)), len(turn.tokens)
        keep_s = self._sessions.pause_s(turn.session)
        req = Req(
            name,
            1,
            "r",
            list(turn.tokens),
            num,
            sampling,
            float("inf"),
            session=turn.session,
            keep_s=keep_s,
        )
        if not worker.queues.admit(req):
            self._later(AGAIN_S, lambda: self._place(turn))
            return
        self._policy.found(route, req.num_computed_tokens)
        self._members.sent(peer, None, num, self._now)
        worker.turns[req] = turn
        worker.queues.prefill_locally(req)
        self._step(worker)

    def _step(self, worker: Worker) -> None:
        if worker.steps or not worker.lives:
            return
        for req in list(worker.queues.preempted):
            if worker.queues.admit(req):
                worker.queues.prefill_locally(req)
        plan = worker.scheduler.plan(self._now)
        if plan is None:
            return
        num = sum(len(chunk.tokens) for chunk in plan.chunks)
        worker.num_prefilled += num
        worker.steps = True
        sampled = worker.scheduler.launched[plan.step].sampled
        took_s = STEP_S + ROW_S * len(sampled) + TOKEN_S * num
        self._later(took_s, lambda: self._settle(worker, plan.step, sampled))

    def _settle(self, worker: Worker, step: int, sampled: Sequence[Req]) -> None:
        if not worker.lives:
            return
        worker.steps = False
        drawn = [Drawn((7,), len(req.tokens) + 1 >= req.max_len) for req in sampled]
        for req, _, _, reason in worker.scheduler.settle(step, drawn):
            turn = worker.turns[req]
            turn.told_at = turn.told_at or self._now
            if reason is not None:
                worker.queues.finish(req)
                del worker.turns[req]
                self._over(worker, req, turn)
        for one in self.workers.values():
            one.queues.retention.sweep()
        self._step(worker)

    def _over(self, worker: Worker, req: Req, turn: Turn) -> None:
        self._members.left(worker.member.peer, allows_one=True)
        self._sessions.end(turn.session)
        self.ended.append(turn)
        if turn.num_left > 1:
            own = self._own[turn.session]
            tokens = [*req.tokens, *own.choices(TOKENS, k=own.randint(*RESULT))]
            pause_s = own.expovariate(1 / PAUSE_S)
            self._later(pause_s, lambda: self._turn(turn.session, tokens, turn.num_left - 1))

    def _kill(self, peer: str) -> None:
        worker = self.workers[peer]
        worker.lives = False
        self._members.lost(peer)
        for turn in worker.turns.values():
            self._place(turn)
