"""What `benchmarks.exposed` looks into two workers with: the product's parts, and what they saw."""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from worker.api import (
    Ack,
    AnyMessage,
    Candidate,
    Chunks,
    Generate,
    KVReady,
    Lost,
    Member,
    PeerId,
    Refused,
    Sampling,
    Stages,
)
from worker.cache.pool import KVPool
from worker.config import PingConfig
from worker.decode import DecodeLoop
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.plan import Plan
from worker.transfer.fetch import Fetch
from worker.wire import Event, Wire
from worker.worker import Worker

HANG_S = 120.0
# A busy machine is not a dead peer.
PATIENT: dict[str, float] = {"max_misses": 30, "stall_s": 3600.0}


def digest(pool: KVPool, pages: Sequence[int], num_tokens: int) -> str:
    """Of the keys and values of the first `num_tokens` slots of `pages`."""
    hashed, index = hashlib.sha256(), torch.tensor(pages, device=pool.device)
    for layer_id in range(pool.region().num_layers):
        for cache in pool.layer(layer_id):
            rows = cache.index_select(0, index).transpose(1, 2).flatten(0, 1)[:num_tokens]
            hashed.update(rows.contiguous().view(torch.uint8).cpu().numpy().data)
    return hashed.hexdigest()


class AnnouncedPages:
    """Which pages of a prefill worker hold its last prompt: of what it announces, the newest.

    `last_at` is when the last of a prompt was announced; monotonic seconds.
    """

    def __init__(self, worker: Worker) -> None:
        outbound: Any = worker.loop._outbound  # pyright: ignore
        self._pool, self._page = worker.engine.pool, dict[int, int]()
        self._num = worker.engine.book.num_pages_for
        self.last_at, self._last = 0.0, None
        send = outbound._send

        def heard(peer: PeerId, message: AnyMessage) -> None:
            if isinstance(message, KVReady):
                self._page.update(enumerate(message.pages, message.first_page))
                if message.last and message.xfer != self._last:  # a renewal says it again
                    self.last_at, self._last = time.monotonic(), message.xfer
            send(peer, message)

        outbound._send = heard

    def digest(self, num_tokens: int) -> str:
        """Of so many tokens, which nothing has overwritten since; "" for 0."""
        pages = [self._page[number] for number in range(self._num(num_tokens))]
        return digest(self._pool, pages, num_tokens) if num_tokens else ""


class Landed(NamedTuple):
    """A prompt whose KV is here."""

    at: float  # when it was committed; monotonic seconds
    digest: str  # of its KV; "" if nobody asked


class Settled(NamedTuple):
    """A step that was waited for, by this process."""

    at: float  # right after the wait; monotonic seconds
    num_tokens: int  # of prompts


class StampingMeter(StepMeter):
    """Also keeps the steps that ended."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        super().__init__(metrics)
        self._steps: list[Settled] = []

    def settled(self, plan: Plan, path: str) -> None:
        """See StepMeter.settled."""
        at = time.monotonic()
        super().settled(plan, path)
        num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        self._steps.append(Settled(at, num_tokens))

    def take(self, num_tokens: int) -> list[Settled]:
        """The steps since the last call, once they have computed so many tokens.

        A prompt's last step may end after decode has answered.
        """
        limit = time.monotonic() + HANG_S
        while sum(step.num_tokens for step in self._steps) < num_tokens:
            assert time.monotonic() < limit, "a step does not end"
            time.sleep(1e-3)
        steps, self._steps = self._steps, []
        return steps


class LandingLoop(DecodeLoop):
    """Also keeps when the KV of each request was committed, and, on demand, what it is."""

    landed: ClassVar[list[Landed]] = []
    digests: ClassVar[bool] = False

    def _fetch_ended(self, fetch: Fetch) -> None:
        super()._fetch_ended(fetch)
        req, found = fetch.req, ""
        if self.digests:
            assert req.hold is not None
            found = digest(self._engine.pool, req.hold.pages, len(req.tokens) - 1)
        self.landed.append(Landed(req.timeline.landed_at, found))


class Router:
    """A router reduced to its wire: asks one decode worker for one token at a time."""

    def __init__(self, decode: Member, prefill: PeerId) -> None:
        self._events: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self._wire = Wire("bench/1", PingConfig.model_validate(PATIENT), self._events.put)
        self._wire.start()
        self._wire.connect(decode.peer, decode.address)
        self._decode, self._prefill = decode.peer, prefill
        self._num_asked = 0

    def ask(self, tokens: Sequence[int]) -> Stages:
        """Where the time to the first token of a prompt went; its KV came from the prefill worker.

        Raises:
            RuntimeError: no answer, or one without that.
        """
        self._num_asked += 1
        req_id = str(self._num_asked)
        sampling = Sampling(1, ignore_eos=True, temperature=0.0)
        candidates = (Candidate(self._prefill),)
        message = Generate(req_id, 1, tuple(tokens), len(tokens), sampling, HANG_S, candidates)
        self._wire.send(self._decode, message)
        while True:
            for _, event in self._events.get(timeout=HANG_S):
                if isinstance(event, Lost | Refused):
                    raise RuntimeError(f"no answer: {event}")
                for chunk in event.chunks if isinstance(event, Chunks) else ():
                    if chunk.req_id != req_id or chunk.finish_reason is None:
                        continue  # a final chunk that was sent again
                    self._wire.send(self._decode, Ack(req_id, chunk.dispatch))
                    if chunk.stages is None or chunk.stages.prefilled_by != self._prefill:
                        raise RuntimeError(f"not a pulled prompt: {chunk}")
                    return chunk.stages

    def close(self) -> None:
        """Close the sockets."""
        self._wire.close()
