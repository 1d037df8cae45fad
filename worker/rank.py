"""A rank of a worker beside its leader: runs the steps that it is told, pulls its own KV.

It has a model shard, a KV pool, a step state and graphs of its own, and no scheduler: page ids,
rows and the order of steps are the leader's. A turn takes what has arrived, launches it, and looks
whether steps and pulls have ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from worker.api import Between, Lost, PeerId, WorkerStats
from worker.comm.meeting import Meeting
from worker.config import WorkerConfig
from worker.engine.engine import Engine, build_engine
from worker.engine.ranks import (
    FromLeader,
    FromRank,
    between,
    from_leader,
    launched,
    masks_of,
    rank_peer,
)
from worker.errors import PeerLost
from worker.graph.base import PaddedShape
from worker.loop import MAX_IDLE_S, EngineThread, Incoming
from worker.metrics import Progress, untold
from worker.plan import Ended, Launch, LaunchTail
from worker.pull.rank import RankPulls
from worker.pull.ranked import PullPages, RankOrder

if TYPE_CHECKING:
    from worker.engine.runner import Step

log = logging.getLogger("kvlane.rank")

STEP_POLL_S = 1e-3  # how often to look whether a step has ended, when nothing else happens
MAX_STEPS = 2  # launched and not ended: as many as the leader has, whose buffers take turns


class RankLoop:
    """All that the engine thread of a rank does."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread
        self._leader: PeerId = ""  # once it has told something
        self._steps: deque[Step] = deque()  # launched and not ended, in order
        self._masked: Step | None = None  # its tail is not launched yet
        self._pulls = RankPulls(engine.local_rank(), self._answer)
        self._num_steps = 0  # ended
        # What the leader has told of pulls, from the first on that has to wait for steps to end.
        self._orders: deque[RankOrder] = deque()
        self._over = False  # the leader has said so

    def turn(self, events: list[Incoming]) -> float:
        """See EngineThread."""
        for peer, event in events:
            match event:
                case Between():
                    self._leader = peer
                    self._handle(from_leader(event.body))
                case Lost() if not self._over:
                    raise PeerLost(f"the leader of this rank is lost: {event.reason}")
                case _:
                    pass
        while self._steps and self._steps[0].done():
            self._end_step()
        while self._orders and _due_after(self._orders[0]) <= self._num_steps:
            self._pulls.on(self._orders.popleft())
        self._pulls.poll()
        has_work = bool(self._steps)
        self._thread.stats = WorkerStats(num_steps=self._num_steps, has_work=has_work)
        idle_s = STEP_POLL_S if has_work else MAX_IDLE_S
        return min(idle_s, self._pulls.poll_after_s(time.monotonic()))

    def close(self) -> None:
        """Close the links to prefill workers."""
        self._pulls.close()

    def _handle(self, message: FromLeader) -> None:
        match message:
            case Launch():
                self._launch(message)
            case LaunchTail():
                step, self._masked = self._masked, None
                assert step is not None, "a tail without a step"
                self._engine.runner.launch_tail(step, masks_of(message))
                self._steps.append(step)
            case Ended():
                self._over = True
            case _:
                self._orders.append(message)

    def _launch(self, message: Launch) -> None:
        while len(self._steps) >= MAX_STEPS:
            self._end_step()
        shape = PaddedShape(message.padded_tokens, message.fixed, message.refused)
        step = self._engine.runner.launch(message.plan, shape=shape)
        if message.plan.masked:
            assert self._masked is None, "a step before the tail of the one before"
            self._masked = step
        else:
            self._steps.append(step)

    def _end_step(self) -> None:
        step = self._steps.popleft()
        drawn = step.wait()
        self._engine.runner.loaded.model.collective.check()
        self._num_steps += 1
        if self._engine.config.engine.strict:
            self._answer(launched(step, drawn))

    def _answer(self, message: FromRank) -> None:
        self._thread.send(self._leader, between(message))


def _due_after(order: RankOrder) -> int:
    """How many steps of this rank have to end before."""
    return order.after_steps if isinstance(order, PullPages) else 0


class Rank:
    """A rank of a worker but its leader; the control plane's threads call its methods.

    Raises:
        UserError: as Worker.
        PeerLost: the other ranks did not come to `rendezvous`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        rank: int,
        name: str,
        incarnation: str,
        host: str,
        rendezvous: str,
        progress: Progress = untold,
    ) -> None:
        assert 0 < rank < config.tp
        self._host = host
        self._meeting = Meeting(rank, config.tp, rendezvous)
        self._engine = build_engine(
            config, name=name, host=host, meeting=self._meeting, progress=progress
        )
        me = rank_peer(name, incarnation, rank)
        self._thread = EngineThread(me, self._engine.config.ping)
        self._loop = RankLoop(self._engine, self._thread)

    def start(self) -> None:
        """Begin to serve the leader; returns once it knows this rank."""
        address = self._thread.start(self._host, self._loop.turn)
        self._meeting.tell(self._engine.endpoint())
        self._meeting.tell(address.encode())

    def stop(self) -> None:
        """End the loop and free everything."""
        self._thread.stop()
        self._loop.close()
        self._engine.close()

    def join(self) -> None:
        """Wait until the loop has ended."""
        self._thread.join()
