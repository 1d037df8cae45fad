"""Messages between the ranks of one worker, and the leader's side of them.

The leader (rank 0) schedules. It sends each step to the other ranks just before it launches the
step itself, over one ordered link a rank; they launch in that order, so all ranks enter the same
collectives. No tokens come back: every rank draws the same itself. (With `engine.strict` each
reports a digest of them.)
"""

import zlib
from collections.abc import Callable, Sequence

import msgspec
import torch

from worker.api import AnyMessage, PeerId, RankMessage
from worker.forward.draws import Masks
from worker.peers.rank_group import RankGroup
from worker.plan import Drawn, Ended, Launch, Launched, LaunchTail, Plan
from worker.run.base import PaddedShape
from worker.run.flight import Step
from worker.transfer.ranked import RankAnswer, RankOrder

FromLeader = Launch | LaunchTail | Ended | RankOrder
FromRank = Launched | RankAnswer

_encode = msgspec.msgpack.Encoder().encode
from_leader = msgspec.msgpack.Decoder(FromLeader).decode
from_rank = msgspec.msgpack.Decoder(FromRank).decode


def wrapped(message: FromLeader | FromRank) -> RankMessage:
    """Wrap a message for the wire; `from_leader` and `from_rank` read its body."""
    return RankMessage(_encode(message))


class Ranks:
    """The ranks beside the leader, to which it sends every step.

    peers: of ranks 1, 2, …, in that order; send: the wire's; compared: they report what each step
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
