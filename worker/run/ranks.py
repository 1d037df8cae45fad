"""Between the ranks of one worker: the leader's side, and how messages travel.

The leader (rank 0) schedules. It tells the other ranks each step just before it launches the step
itself, over one ordered link a rank; they launch what they are told, in that order, so all ranks
enter the same collectives. No tokens come back: every rank draws the same itself. (With
`engine.strict` it reports a digest of them.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import msgspec
import torch

from worker.api import AnyMessage, Between, PeerId
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


def between(message: FromLeader | FromRank) -> Between:
    """Wrap a message for the wire; `from_leader` and `from_rank` read its body."""
    return Between(_encode(message))


class Ranks:
    """The other ranks of a worker, as its leader tells them what to do.

    Args:
        peers: of ranks 1, 2, …, in that order.
        send: the wire's.
        compared: they report what each step drew, which has to equal what the leader drew.
    """

    def __init__(
        self,
        peers: Sequence[PeerId],
        send: Callable[[PeerId, AnyMessage], None],
        *,
        compared: bool,
    ) -> None:
        self.peers = tuple(peers)
        self._send = send
        self._compared = compared
        # By step: what the leader and ranks have reported, until all have.
        self._found: dict[int, list[Launched]] = {}

    def tell(self, message: FromLeader) -> None:
        """Send to all of them."""
        wrapped = between(message)
        for peer in self.peers:
            self._send(peer, wrapped)

    def launch(self, plan: Plan, shape: PaddedShape) -> None:
        """Have a step launched; the leader launches it next."""
        self.tell(Launch(plan, shape.num_tokens, shape.fixed, shape.refused))

    def launch_tail(self, masks: Masks) -> None:
        """Have the tail of the masked step launched."""
        words = masks.words.contiguous()
        self.tell(LaunchTail(len(words), words.numpy().tobytes(), tuple(masks.line.tolist())))

    def settled(self, step: Step, drawn: Sequence[Drawn]) -> None:
        """The leader's own step has ended."""
        if self._compared:
            self.found(launched(step, drawn))

    def found(self, what: Launched) -> None:
        """Take one rank's report of a step; asserts that it equals those of the others."""
        found = self._found.setdefault(what.step, [])
        found.append(what)
        assert found[0] == what, f"ranks differ: {found}"
        if len(found) > len(self.peers):
            del self._found[what.step]


def others(rank_group: RankGroup, name: str, incarnation: str) -> dict[PeerId, str]:
    """Where the ranks beside the leader listen, as they tell it; in their order.

    Raises:
        PeerLost: one of them is gone.
    """
    addresses = enumerate(rank_group.gather(b""))
    return {rank_peer(name, incarnation, i): told.decode() for i, told in addresses if i}


def rank_peer(name: str, incarnation: str, rank: int) -> PeerId:
    """The name under which the leader of a worker addresses a rank."""
    return f"{name}.{rank}/{incarnation}"


def launched(step: Step, drawn: Sequence[Drawn]) -> Launched:
    """Digest what a finished step drew, to compare it among ranks."""
    tokens = [(each.tokens, each.finished, each.drafts) for each in drawn]
    return Launched(step.plan.step, zlib.crc32(_encode(tokens)))


def masks_of(told: LaunchTail) -> Masks:
    """On the host, as the leader made them."""
    words = torch.frombuffer(bytearray(told.words), dtype=torch.int32)
    return Masks(words.view(told.num_masks, -1), torch.tensor(told.line, dtype=torch.int64))
