"""A rank of a worker beside its leader: runs the steps that the leader sends, pulls its own KV.

It has a model shard, a KV pool, a step state and graphs of its own, and no scheduler: page ids,
rows and the order of steps are the leader's. A turn takes what has arrived, launches it, and looks
whether steps and pulls have ended.
"""

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from worker.api import Lost, PeerId, RankMessage, WorkerStats
from worker.config import WorkerConfig
from worker.errors import PeerLost
from worker.keyring import keyring
from worker.loop import MAX_IDLE_S, EngineThread, Incoming
from worker.plan import Ended, Launch, LaunchTail
from worker.run.engine import Engine
from worker.run.ranks import (
    FromLeader,
    FromRank,
    from_leader,
    launched,
    leader_key,
    masks_of,
    rank_peer,
    wrapped,
)
from worker.start.build import Place, build_engine
from worker.transfer.ranked import OwnDialled, PullPages, RankPulls

if TYPE_CHECKING:
    from worker.run.flight import Step

log = logging.getLogger("kvlane.rank")

STEP_POLL_S = 1e-3  # how often to look whether a step has ended, where nothing waits for it
LEADER_S = 4.0  # for the leader to say that it stops; then it is gone
MAX_STEPS = 2  # launched and not ended: as many as the leader has, whose buffers take turns


class RankLoop:
    """All that the engine thread of a rank does."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread
        self._leader: PeerId = ""  # known from its first message on
        self._pending: deque[FromLeader] = deque()  # not done yet, in order
        self._steps: deque[Step] = deque()  # launched and not ended, in order
        self._masked: Step | None = None  # its tail is not launched yet
        self._num_steps = 0  # ended
        self._pulls = RankPulls(engine.local_rank(), self._answer, thread.post)
        self.over = threading.Event()  # the leader has said that nothing follows

    def turn(self, events: list[Incoming]) -> float:
        """Take and do what has arrived; returns how long it can idle, s."""
        for peer, event in events:
            match event:
                case RankMessage():
                    self._leader = peer
                    self._pending.append(message := from_leader(event.body))
                    if isinstance(message, Ended):  # the leader's Bye may be among these events
                        self.over.set()
                case OwnDialled():
                    self._pulls.on(event)
                case Lost() if not self.over.is_set():
                    raise PeerLost(f"the leader of this rank is lost: {event.reason}")
                case _:
                    pass
        self._end_steps()
        while self._pending and self._due(self._pending[0]):
            self._do(self._pending.popleft())
        self._pulls.poll()
        has_work = bool(self._steps)
        self._thread.stats = WorkerStats(num_steps=self._num_steps, has_work=has_work)
        if self._pending:  # waits for the end of a step, as the leader's has ended
            return 0.0
        idle_s = STEP_POLL_S if has_work else MAX_IDLE_S
        return min(idle_s, self._pulls.poll_after_s(time.monotonic()))

    def close(self) -> None:
        """Close the links to prefill workers."""
        self._pulls.close()

    def _due(self, message: FromLeader) -> bool:
        """Whether it may be done now, or has to wait for a step's end."""
        if isinstance(message, Launch):
            return len(self._steps) < MAX_STEPS
        return not isinstance(message, PullPages) or self._num_steps >= message.after_steps

    def _do(self, message: FromLeader) -> None:
        match message:
            case Launch():
                step = self._engine.runner.launch(message.plan, shape=message.shape)
                if message.plan.masked:
                    assert self._masked is None, "a step before the tail of the one before"
                    self._masked = step
                else:
                    self._steps.append(step)
            case LaunchTail():
                step, self._masked = self._masked, None
                assert step is not None, "a tail without a step"
                self._engine.runner.launch_tail(step, masks_of(message))
                self._steps.append(step)
            case Ended():
                pass
            case _:
                self._pulls.on(message)

    def _end_steps(self) -> None:
        """Take the steps that have ended."""
        while self._steps and self._steps[0].done():
            step = self._steps.popleft()
            drawn = step.wait()
            self._engine.runner.check_ranks()
            self._num_steps += 1
            if self._engine.config.engine.strict:
                self._answer(launched(step, drawn))

    def _answer(self, message: FromRank) -> None:
        self._thread.send(self._leader, wrapped(message))


class Rank:
    """A rank of a worker but its leader; the control plane's threads call its methods.

    The constructor raises as `build_engine`.
    """

    def __init__(self, config: WorkerConfig, place: Place, rank: int) -> None:
        assert 0 < rank < config.tp
        self._host = place.host
        self._engine = build_engine(config, place, rank)
        me = rank_peer(place.name, place.incarnation, rank)
        self._leader = place.peer
        authentication = self._engine.config.transport.authentication
        self._thread = EngineThread(me, self._engine.config.ping, keyring(authentication))
        self._thread.refusals.is_limited = False  # its leader is the same worker
        self._loop = RankLoop(self._engine, self._thread)
        self.join = self._thread.join

    def start(self) -> None:
        """Begin to serve the leader; returns once it knows this rank."""
        address = self._thread.start(self._host, self._loop.turn)
        self._engine.rank_group.gather(self._engine.endpoint())
        key = leader_key(self._engine.rank_group, address, self._thread.key)
        self._thread.admit({self._leader: key})

    def stop(self) -> None:
        """End the loop and free everything, once the leader has said that nothing follows."""
        self._loop.over.wait(LEADER_S)
        self._thread.stop()
        self._loop.close()
        self._engine.close()
