"""Workers of one process and a client that speaks the router's side of the wire to them."""

import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.meeting import LISTENERS, MET, introduce
from tests.support.patience import until
from worker import api
from worker.api import FinishReason, Member, Sampling
from worker.config import PingConfig, WorkerConfig
from worker.keyring import Keyring
from worker.peers.rendezvous import free_rendezvous
from worker.rank import Rank
from worker.start.build import Place
from worker.wire import Wire
from worker.worker import Worker

# A busy machine is not a dead peer, and a client that waits for its test is not a hung one.
PATIENT = {"max_misses": 30, "stall_s": 3600.0}
LATE_ACK = {"final_resend_s": 60.0}  # nor is an acknowledgement lost that comes late
Sections = dict[str, dict[str, Any]]  # of a configuration


def value(metric: Any) -> float:
    """Of a counter or gauge of `prometheus_client`, its labels chosen."""
    (family,) = metric.collect()
    return family.samples[0].value


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: api.Error | None = None
    num_cached_tokens: int = 0
    num_finals: int = 0
    logprobs: list[api.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[api.TokenLogprob] = field(default_factory=list)
    stages: list[api.Stages] = field(default_factory=list)
    windows: list[api.Window] = field(default_factory=list)
    sent_at: float = 0.0
    first_at: float = 0.0
    end_at: float = 0.0

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self, chunk: api.TokenChunk) -> None:
        self.tokens.extend(chunk.tokens)
        self.logprobs.extend(chunk.logprobs)
        self.prompt_logprobs.extend(chunk.prompt_logprobs)
        self.stages += [chunk.stages] if chunk.stages else []
        self.windows += [chunk.window] if chunk.window else []
        self.num_cached_tokens = chunk.num_cached_tokens
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.error = chunk.error or self.error


class Client:
    """A router reduced to its wire: sends Generate, checks the order of chunks, acknowledges."""

    def __init__(self, members: Sequence[Member], peer: str = "client/1") -> None:
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._name = peer
        own = Keyring() if any(member.wire_key for member in members) else None
        self._wire = Wire(peer, PingConfig(**PATIENT), self._events.put, keyring=own)
        self._wire.start()
        name, incarnation = peer.split("/")
        introduce(Member(name, "router", incarnation, "", wire_key=self._wire.key))
        self.decodes = [member.peer for member in members if member.role == "decode"]
        self.prefills = [member.peer for member in members if member.role == "prefill"]
        for member in members:
            if member.role == "decode":
                self._wire.connect(member.peer, member.address, member.wire_key)
        self._ids = itertools.count()
        self.answers: dict[str, Answer] = {}
        self.num_refused = 0
        self._requests: dict[str, tuple[str, api.Generate, float]] = {}

    def submit(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        decode: str | None = None,
        prefills: Sequence[str] | None = None,
        after: str = "",
        num_prompt_tokens: int | None = None,
        trace: str = "",
    ) -> str:
        """Send one request; its id. `tokens` beyond `num_prompt_tokens` were drawn elsewhere."""
        number = next(self._ids)
        req_id = f"{self._name}-{number}"
        wanted = self.prefills if prefills is None else prefills
        wanted = [*wanted[number % max(1, len(wanted)) :], *wanted[: number % max(1, len(wanted))]]
        message = api.Generate(
            req_id, 1, tuple(tokens), num_prompt_tokens or len(tokens), sampling, 100.0,
            tuple(api.Candidate(peer) for peer in wanted), after, trace,
        )  # fmt: skip
        peer = decode or self.decodes[number % len(self.decodes)]
        self.answers[req_id] = Answer(num_prompt_tokens=len(tokens), sent_at=time.monotonic())
        self._requests[req_id] = peer, message, 0.0
        self._wire.send(peer, message)
        return req_id

    def repeat(self, req_id: str) -> None:
        peer, message, _ = self._requests[req_id]
        self._wire.send(peer, message)

    def abort(self, req_id: str) -> None:
        """The client is gone."""
        peer, message, _ = self._requests[req_id]
        self._wire.send(peer, api.Abort(message.req_id, message.dispatch))

    def pump(self, timeout_s: float = 0.05) -> None:
        """Handle what has arrived; refused requests are sent again."""
        try:
            events = list(self._events.get(timeout=timeout_s))
        except queue.Empty:
            return
        for peer, event in events:
            if isinstance(event, api.Chunks):
                for chunk in event.chunks:
                    self._take(peer, chunk)
            elif isinstance(event, api.Refused):
                self.num_refused += 1
                if event.retry_after_s:
                    time.sleep(0.01)
                    self._wire.send(peer, self._requests[event.req_id][1])
                else:
                    self.answers[event.req_id].error = event.error
            elif isinstance(event, api.Lost):
                for req_id, (owner, _, _) in self._requests.items():
                    if owner == peer and not self.answers[req_id].done:
                        self.answers[req_id].error = api.Error("worker_lost", event.reason)

    def wait(self, req_ids: Sequence[str]) -> list[Answer]:
        until(lambda: all(self.answers[each].done for each in req_ids), act=self.pump)
        return [self.answers[each] for each in req_ids]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], **where
    ) -> list[Answer]:
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        ids = [self.submit(p, s, **where) for p, s in zip(prompts, each, strict=True)]
        return self.wait(ids)

    def close(self) -> None:
        self._wire.close()

    def _take(self, peer: str, chunk: api.TokenChunk) -> None:
        answer = self.answers[chunk.req_id]
        if chunk.finish_reason is not None:
            self._wire.send(peer, api.Ack(chunk.req_id, chunk.dispatch))
            answer.num_finals += 1
        expected = answer.num_prompt_tokens + len(answer.tokens)
        if chunk.tokens and chunk.position < expected:
            return  # a final chunk that was sent again
        if chunk.tokens:
            assert chunk.position == expected, "gap"
        if chunk.tokens or chunk.finish_reason is not None:
            answer.end_at = time.monotonic()
            answer.first_at = answer.first_at or answer.end_at
        answer.take(chunk)


@dataclass(eq=False)
class Running:
    workers: dict[str, Worker]
    members: list[Member]
    client: Client

    def __post_init__(self) -> None:
        LISTENERS.add(self)
        self.meet()

    def meet(self) -> None:
        """As `meeting.Listener`."""
        for worker in self.workers.values():
            worker.update_members([*self.members, *MET.values()])

    def answers(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> list[Answer]:
        """To all prompts at once, none of which fails; nothing is held for them any more."""
        found = self.client.generate(prompts, sampling)
        assert not [each.error for each in found if each.error]
        self.wait_idle()
        return found

    def counters(self) -> dict[str, dict[str, int]]:
        return {name: worker.counters() for name, worker in self.workers.items()}

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        limit = time.monotonic() + timeout_s
        while not all(worker.idle() for worker in self.workers.values()):
            assert time.monotonic() < limit, self.counters()
            self.client.pump()


def worker_config(role: str, sections: Sections, extra: Sections | None = None) -> WorkerConfig:
    """A WorkerConfig from plain sections, in which those of `extra` differ, for tests."""
    patient: dict[str, Any] = {"role": role, "ping": PATIENT, "lease": LATE_ACK}
    changed = {name: sections.get(name, {}) | of for name, of in (extra or {}).items()}
    return WorkerConfig.model_validate(patient | sections | changed)


@contextmanager
def running(
    sections: Sections,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    decode_sections: Sections | None = None,
    client: str = "client/1",
) -> Iterator[Running]:
    """Serve with workers of this process, and threads of it for the other ranks of each; all peers
    are connected when the block begins, and nothing is held for a request when it ends."""
    workers: dict[str, Worker] = {}
    members: list[Member] = []
    ranks: list[Rank] = []
    of_decode = "decode", num_decode, decode_tp, decode_sections
    for role, count, tp, extra in (("prefill", num_prefill, prefill_tp, None), of_decode):
        config = worker_config(role, sections, extra).model_copy(update={"tp": tp})
        for index in range(count):
            name = f"{role}-{index}"
            worker, member, others = started(config, name, f"i{index}")
            workers[name] = worker
            members.append(member)
            ranks += others
    asking = Client(members, client)
    for worker in workers.values():
        worker.update_members([*members, *MET.values()])
    try:
        decodes = [worker for name, worker in workers.items() if name.startswith("decode")]
        until(
            lambda: all(worker.loop.peers.num_connected == num_prefill for worker in decodes),
            "no link",
        )
        made = Running(workers, members, asking)
        yield made
        made.wait_idle()
    finally:
        asking.close()
        # Who connected goes first: a goodbye to somebody who is gone waits for half a second.
        # Engines of mooncake take one to end, so all workers of a role end at once.
        for role in ("decode", "prefill"):
            ending = [worker for name, worker in workers.items() if name.startswith(role)]
            with ThreadPoolExecutor() as threads:
                list(threads.map(Worker.stop, ending))
        for rank in ranks:
            rank.stop()


def started(config: WorkerConfig, name: str, incarnation: str) -> tuple[Worker, Member, list[Rank]]:
    """A worker that serves, and its other ranks, which come up in threads of their own."""
    rendezvous = free_rendezvous("127.0.0.1") if config.tp > 1 else ""
    place = Place(name, incarnation, "127.0.0.1", rendezvous)

    def rank(number: int) -> Rank:
        made = Rank(config, place, number)
        made.start()
        return made

    with ThreadPoolExecutor(config.tp) as threads:
        others = [threads.submit(rank, number) for number in range(1, config.tp)]
        worker = Worker(config, place)
        member = worker.start()
        return worker, member, [each.result() for each in others]
