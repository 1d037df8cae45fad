"""The ranks of a worker: what the leader (rank 0) sends to the others, and what they do with it.

The leader schedules. It sends a step to the other ranks just before it launches the step itself,
over one ordered link a rank; they launch in that order, so all ranks enter the same collectives. No
tokens come back: every rank draws the same itself. (With `engine.strict` they report a digest.)

A rank beside the leader has a model shard, a KV pool, a step state and graphs of its own, pulls its
own KV, and has no scheduler: page ids, rows and the order of steps are the leader's. A turn takes
what has arrived, launches it, and looks whether steps and pulls have ended.
"""

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch

from worker.api import AnyMessage, Lost, PeerId, RankMessage, WorkerStats
from worker.config import WorkerConfig
from worker.errors import PeerLost
from worker.forward.draws import Masks
from worker.keyring import keyring
from worker.loop import MAX_IDLE_S, EngineThread, Incoming
from worker.peers.rank_group import RankGroup
from worker.plan import Drawn, Ended, Launch, Launched, LaunchTail, PaddedShape, Plan
from worker.run.flight import MaskedStep, Step
from worker.start.build import Place, build_engine
from worker.start.engine import Engine
from worker.transfer.ranked import OwnDialled, PullPages, RankAnswer, RankOrder, RankPulls
from worker.transfer.tier.ranks import Cancel, Forget, Keep, Loaded, LoadPages, RankTier, TierOrder

log = logging.getLogger("kvlane.rank")

STEP_POLL_S = 1e-3  # how often to look whether a step has ended, where nothing waits for it
LEADER_S = 4.0  # for the leader to say that it stops; then it is gone
MAX_STEPS = 2  # launched and not ended: as many as the leader has, whose buffers take turns

FromLeader = Launch | LaunchTail | Ended | RankOrder | TierOrder
FromRank = Launched | RankAnswer | Loaded

_encode = msgspec.msgpack.Encoder().encode
from_leader = msgspec.msgpack.Decoder(FromLeader).decode
from_rank = msgspec.msgpack.Decoder(FromRank).decode


def wrapped(message: FromLeader | FromRank) -> RankMessage:
    """Wrap a message for the wire; `from_leader` and `from_rank` read its body."""
    return RankMessage(_encode(message))


class Ranks:
    """The ranks beside the leader, to which it sends every step.

    peers: of ranks 1, 2, …, in that order; send: the wire's; compared: they report what a step
    drew, which has to equal what the leader drew.
    """

    def __init__(
        self, peers: Sequence[PeerId], send: Callable[[PeerId, AnyMessage], None], *, compared: bool
    ) -> None:
        self.peers = tuple(peers)
        self._send = send
        self._compared = compared
        self._reports: dict[int, list[Launched]] = {}  # by step, until all ranks have reported

    def tell(self, message: FromLeader) -> None:
        """Send to all of them."""
        body = wrapped(message)
        for peer in self.peers:
            self._send(peer, body)

    def launch(self, plan: Plan, shape: PaddedShape) -> None:
        """Have a step launched; the leader launches it next."""
        self.tell(Launch(plan, shape))

    def launch_tail(self, masks: Masks) -> None:
        """Have the tail of the masked step launched."""
        words = masks.words.contiguous()
        self.tell(LaunchTail(len(words), words.numpy().tobytes(), tuple(masks.line.tolist())))

    def settled(self, step: Step, drawn: Sequence[Drawn]) -> None:
        """The leader's own step has ended."""
        if self._compared:
            self.reported(launched(step, drawn))

    def reported(self, report: Launched) -> None:
        """Take one rank's report of a step; asserts that it equals those of the other ranks."""
        reports = self._reports.setdefault(report.step, [])
        reports.append(report)
        assert reports[0] == report, f"ranks differ: {reports}"
        if len(reports) > len(self.peers):
            del self._reports[report.step]


def rank_listeners(
    rank_group: RankGroup, name: str, incarnation: str, key: str
) -> dict[PeerId, tuple[str, str]]:
    """Addresses and wire keys of the ranks beside the leader, in their order; `key` is its own.

    Raises PeerLost if one is gone.
    """
    said = [msgspec.msgpack.decode(text) for text in rank_group.gather(_encode(("", key)))]
    return {rank_peer(name, incarnation, i): (said[i][0], said[i][1]) for i in range(1, len(said))}


def leader_key(rank_group: RankGroup, address: str, key: str) -> str:
    """The leader's wire key, for a rank that listens at `address` with `key`."""
    return str(msgspec.msgpack.decode(rank_group.gather(_encode((address, key)))[0])[1])


def rank_peer(name: str, incarnation: str, rank: int) -> PeerId:
    """The name under which the leader of a worker addresses a rank."""
    return f"{name}.{rank}/{incarnation}"


def launched(step: Step, drawn: Sequence[Drawn]) -> Launched:
    """Digest what a finished step drew, to compare it among ranks."""
    tokens = [(row.tokens, row.finished, row.drafts) for row in drawn]
    return Launched(step.plan.step, zlib.crc32(_encode(tokens)))


def masks_of(message: LaunchTail) -> Masks:
    """The masks that the leader made, on the host."""
    words = torch.frombuffer(bytearray(message.words), dtype=torch.int32)
    return Masks(words.view(message.num_masks, -1), torch.tensor(message.line, dtype=torch.int64))


class RankLoop:
    """All that the engine thread of a rank does."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread
        self._leader: PeerId = ""  # known from its first message on
        self._pending: deque[FromLeader] = deque()  # not done yet, in order
        self._steps: deque[Step] = deque()  # launched and not ended, in order
        self._masked: MaskedStep | None = None  # its tail is not launched yet
        self._num_steps = 0  # ended
        self._pulls = RankPulls(engine.local_rank(), self._answer, thread.post)
        self._tier = RankTier(engine.rank_group.rank, engine.rows, self._answer, thread.wake)
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
        self._tier.poll()
        has_work = bool(self._steps)
        self._thread.stats = WorkerStats(num_steps=self._num_steps, has_work=has_work)
        if self._pending:  # waits for the end of a step, as the leader's has ended
            return 0.0
        idle_s = STEP_POLL_S if has_work else MAX_IDLE_S
        return min(idle_s, self._pulls.poll_after_s(time.monotonic()))

    def close(self) -> None:
        """Close the links to prefill workers, and the tier."""
        self._pulls.close()
        self._tier.close()

    def _due(self, message: FromLeader) -> bool:
        """Whether it may be done now, or has to wait for a step's end."""
        if isinstance(message, Launch):
            return len(self._steps) < MAX_STEPS
        is_held = isinstance(message, PullPages | Keep | LoadPages)
        return not is_held or self._num_steps >= message.after_steps

    def _do(self, message: FromLeader) -> None:
        match message:
            case Launch():
                self._tier.launches(message.plan)
                step = self._engine.runner.launch(message.plan, shape=message.shape)
                if isinstance(step, MaskedStep):
                    assert self._masked is None, "a step before the tail of the one before"
                    self._masked = step
                else:
                    self._steps.append(step)
            case LaunchTail():
                step, self._masked = self._masked, None
                assert step is not None, "a tail without a step"
                self._steps.append(self._engine.runner.launch_tail(step, masks_of(message)))
            case Ended():
                pass
            case Keep() | LoadPages() | Cancel() | Forget():
                self._tier.on(message)
            case _:
                if isinstance(message, PullPages):
                    self._tier.written(page for page, _ in message.pairs)
                self._pulls.on(message)

    def _end_steps(self) -> None:
        """Take the steps that have ended."""
        while self._steps and self._steps[0].done():
            step = self._steps.popleft()
            drawn = step.wait().drawn
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
        self._engine.rank_group.part()

    def stop(self) -> None:
        """End the loop and free everything, once the leader has said that nothing follows."""
        self._loop.over.wait(LEADER_S)
        self._thread.stop()
        self._loop.close()
        self._engine.close()
