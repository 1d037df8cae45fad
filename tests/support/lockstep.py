"""A decode and a prefill worker whose loops take their turns in the test's own thread.

Engines, loops and transport are the real ones; threads and sockets are left out. So a schedule is
repeated exactly or drawn from a seed, and an error of a loop is the test's. The only clock of a
schedule is the *round*: each loop takes a turn, the router hears and answers.
"""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tests.support.engines import Answer, Sections, worker_config
from tests.support.patience import HANG_S
from worker import api
from worker.api import FinishReason, PeerId, Sampling
from worker.decode import DecodeLoop
from worker.keyring import Refusals
from worker.loop import LOCAL, MembersChanged
from worker.plan import Drawn
from worker.prefill import PrefillLoop
from worker.schedule.decode import DecodeScheduler, Settled
from worker.start.build import Place, build_engine
from worker.start.engine import Addresses, Engine

ROUTER, DECODE, PREFILL = "router/1", "decode-0/i", "prefill-0/i"
LINK_POLL_S = 1e-3
LATE = 0.3  # probability that a loop misses a round, in a drawn schedule


@dataclass(frozen=True)
class Ask:
    """One request, and what its client does."""

    prompt: tuple[int, ...]
    sampling: Sampling
    at: int = 0  # round in which it is sent
    after: int | None = None  # index of the request that it is another choice of
    local: bool = False  # no prefill worker is proposed
    cut: int | None = None  # output tokens after which the router has found a stop string
    abort: int | None = None  # rounds after which the client is gone
    abort_in_chunk: bool = False  # it leaves while a chunk of its prompt is in flight

    def but(self, **sampling: Any) -> "Ask":
        """The same request with other sampling parameters."""
        return replace(self, sampling=msgspec.structs.replace(self.sampling, **sampling))


@dataclass(frozen=True)
class Window:
    """What one decode step did for one request: a line of its accept trace."""

    position: int  # of its first token: tokens whose KV was there
    width: int
    drafts: tuple[int, ...]
    num: int  # tokens that counted
    # Of its stay in a row; a request that was preempted has another.
    hold: object = field(default=None, repr=False)


class Post:
    """EngineThread of one loop: what it sends lies in the receiver's box, in order."""

    def __init__(self, me: PeerId, boxes: "Boxes") -> None:
        self.me = me
        self.stats, self.refusals = api.WorkerStats(), Refusals()
        self._boxes = boxes

    def send(self, peer: PeerId, message: api.AnyMessage) -> None:
        self._boxes[peer][self.me].append(message)

    def post(self, event: object) -> None:
        self._boxes[self.me][LOCAL].append(event)

    def wake(self) -> None:
        pass  # its loop takes a turn in every round

    def connect(self, peer: PeerId, address: str, key: str) -> None:
        self._boxes[self.me][peer].append(api.Pong(peer))  # it answers at once

    def disconnect(self, peer: PeerId) -> None:
        pass


Boxes = dict[PeerId, dict[PeerId, deque]]  # by receiver, then by sender


class Here(Executor):
    """Does what it is given at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Lockstep:
    """Both workers, or the decode worker alone, and the router's side of all requests.

    schedule: seed of a drawn schedule: who takes a turn when, and hears how much; None: all.
    """

    def __init__(
        self,
        sections: Sections,
        *,
        num_prefill: int = 1,
        decode_sections: Sections | None = None,
        schedule: int | None = None,
    ) -> None:
        self._rng = random.Random(schedule) if schedule is not None else None
        self._boxes: Boxes = defaultdict(lambda: defaultdict(deque))
        self.engines: dict[PeerId, Engine] = {}
        self.loops: dict[PeerId, DecodeLoop | PrefillLoop] = {}
        engine = self._engine(DECODE, sections, decode_sections)
        self.decode = DecodeLoop(engine, self._post(DECODE), "i")
        self.loops[DECODE] = self.decode
        grammars = self.decode.requests.admission.grammars
        grammars._compiler = Here()  # else arrivals depend on how long another thread takes
        self.answers: list[Answer] = []
        self._asked: list[Ask] = []
        self._sent: list[api.Generate] = []
        self._round = 0
        if num_prefill:
            engine = self._engine(PREFILL, sections)
            self.loops[PREFILL] = PrefillLoop(engine, self._post(PREFILL), "i")
            member = engine.member("prefill-0", "i", Addresses("", "", ""), (engine.endpoint(),))
            self._post(DECODE).post(MembersChanged((member,)))
        for loop in self.loops.values():
            loop.flight.waits = False
        self.windows: dict[int, list[Window]] = defaultdict(list)  # by number of the request
        self._trace(self.decode.scheduler)

    def one_at_a_time(self) -> None:
        """No step is launched before the one before it has settled."""
        for loop in self.loops.values():
            loop.flight.overlap = False

    def _trace(self, scheduler: DecodeScheduler) -> None:
        settle = scheduler.settle

        def traced(step: int, drawn: list[Drawn]) -> list[Settled]:
            sampled, of_chunks, width = scheduler.launched[step]
            holds = {req.req_id: req.hold for req in sampled}  # settling may preempt one
            settled = settle(step, drawn)
            for req, each, num, _ in settled if not of_chunks else ():
                at = len(req.tokens) - num - 1
                hold = holds[req.req_id]
                self.windows[int(req.req_id)].append(Window(at, width, each.drafts, num, hold))
            return settled

        scheduler.settle = traced

    def serve(self, asked: "Sequence[Ask]") -> list[Answer]:
        """Serve all of `asked` until nothing is held for anybody."""
        limit = time.monotonic() + HANG_S
        while self.decode.peers.num_connected < len(self.loops) - 1:
            self._turns(whole=True)
            time.sleep(LINK_POLL_S)  # other threads make it
            assert time.monotonic() < limit, "no link"
        self._asked = list(asked)
        self.answers = [Answer(num_prompt_tokens=len(ask.prompt)) for ask in asked]
        self._sent = [self._message(number) for number in range(len(asked))]
        self._round = 0
        while not all(each.done for each in self.answers) or self._held():
            self._send_due()
            self._turns(whole=False)
            self._hear()
            self._round += 1
            assert time.monotonic() < limit, "hangs"
        return self.answers

    def close(self) -> None:
        self.decode.close()
        for engine in self.engines.values():
            engine.close()

    def _engine(self, peer: PeerId, sections: Sections, extra: Sections | None = None) -> Engine:
        config = worker_config(peer.partition("-")[0], sections, extra)
        self.engines[peer] = build_engine(config, Place(peer, "1", "127.0.0.1"))
        return self.engines[peer]

    def _post(self, me: PeerId) -> Any:  # as an EngineThread
        return Post(me, self._boxes)

    def _held(self) -> int:
        books = [engine.book for engine in self.engines.values()]
        for each in books:
            promised = each.snapshots.num_used - len(each.snapshots.nodes)
            assert each.num_holds or not each.num_reserved + promised, "lost: nobody gives it back"
        held = sum(each.num_holds for each in books)
        return held + sum(sum(loop.counters().values()) for loop in self.loops.values())

    def _message(self, number: int) -> api.Generate:
        ask = self._asked[number]
        after = "" if ask.after is None else str(ask.after)
        candidates = () if ask.local or PREFILL not in self.loops else (api.Candidate(PREFILL),)
        prompt = tuple(ask.prompt)
        return api.Generate(
            str(number), 1, prompt, len(prompt), ask.sampling, HANG_S, candidates, after,
            leads=any(other.after == number for other in self._asked),
        )  # fmt: skip

    def _turns(self, *, whole: bool) -> None:
        """A turn of each loop, with what it hears by then."""
        for peer, loop in self.loops.items():
            if whole or self._rng is None or self._rng.random() > LATE:
                loop.turn(self._heard_by(peer, whole=whole))

    def _heard_by(self, peer: PeerId, *, whole: bool) -> list:
        """The next events of each sender, in their order."""
        events: list = []
        for sender in list(self._boxes[peer]):
            box = self._boxes[peer][sender]
            late = self._rng is not None and not whole and sender != LOCAL
            num = self._rng.randint(0, len(box)) if late and self._rng else len(box)
            events += [(sender, box.popleft()) for _ in range(num)]
        return events

    def _send_due(self) -> None:
        router = self._post(ROUTER)
        for number, ask in enumerate(self._asked):
            if ask.at == self._round:
                router.send(DECODE, self._sent[number])
            answer = self.answers[number]
            gone = ask.abort is not None and self._round == ask.at + ask.abort
            gone = gone or (ask.abort_in_chunk and self._in_chunk(number))
            if gone and not answer.done:
                answer.finish_reason = FinishReason.ABORT
                router.send(DECODE, api.Abort(str(number), 1))

    def _in_chunk(self, number: int) -> bool:
        step, req = self.decode.flight.running, self.decode.requests.reqs.get((str(number), 1))
        if step is None or req is None:
            return False
        return any(chunk.row == req.row for chunk in step.plan.chunks)

    def _hear(self) -> None:
        for _, event in self._heard_by(ROUTER, whole=False):
            if isinstance(event, api.Chunks):
                for chunk in event.chunks:
                    self._take(chunk)
            elif isinstance(event, api.Refused) and event.retry_after_s:
                self._asked[int(event.req_id)] = replace(
                    self._asked[int(event.req_id)], at=self._round + 1
                )
            else:
                raise AssertionError(event)

    def _take(self, chunk: api.TokenChunk) -> None:
        number = int(chunk.req_id)
        answer, ask = self.answers[number], self._asked[number]
        if chunk.finish_reason is not None:
            self._post(ROUTER).send(DECODE, api.Ack(chunk.req_id, chunk.dispatch))
        if answer.done:
            return
        assert chunk.error is None, chunk.error
        assert chunk.position == len(ask.prompt) + len(answer.tokens), "gap"
        answer.take(chunk)
        if ask.cut is not None and len(answer.tokens) >= ask.cut and not answer.done:
            answer.finish_reason = FinishReason.STOP
            del answer.tokens[ask.cut :], answer.logprobs[ask.cut :]
            at = len(ask.prompt) + ask.cut
            self._post(ROUTER).send(DECODE, api.Stop(chunk.req_id, 1, at))
