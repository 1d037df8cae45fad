"""Who may speak on the wire, and how much at once: keys, and bounds of every socket.

Every frame is encrypted and authenticated by CURVE, which ZeroMQ brings. A process makes its key
pair anew at its start and never shows the secret half; the public half is in its `Member` record,
which the control plane alone hands out. Who connects knows the key of whom it connects to, and who
listens accepts keys of members only, a key for frames of its member's name.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import zmq
from zmq.utils import z85

from worker.api import PeerId
from worker.config.credit import UNLIMITED, Budgets, Outgoing
from worker.seldom import Seldom

log = logging.getLogger("kvlane.wire")

ZAP_ADDRESS = "inproc://zeromq.zap.01"  # ZeroMQ's own: its I/O threads ask there who may connect
ZAP_DOMAIN = b"kvlane"

SEND_QUEUE_FRAMES = 10_000
RECEIVE_QUEUE_FRAMES = 256  # of a peer that we have not read; then its own queue fills
CLOSE_LINGER_MS = 500
# The largest message that we send are the masks of one step, to the ranks of a worker: of 256 rows
# of 16 drafts over 152 k tokens 78 MB. A socket refuses what is larger before it takes any memory.
MAX_MESSAGE_BYTES = 128 << 20
MAX_HEAD_BYTES = 4096  # names and numbers before a message, and what CURVE adds
HANDSHAKE_MS = 5000  # for whoever has connected to say who it is
MAX_TURN_ANSWERS = 64  # to connections, before the frames of others have their turn
MAX_ASKED = 256  # connections that wait to be announced
MAX_TOLD_ADDRESSES = 8  # in a line of the log
BACKLOG = 128  # connections that wait to be accepted
Place = tuple[int, int]  # of a frame: its link, and its number on that link from 1 on
RECONNECT_MS, MAX_RECONNECT_MS = 20, 200  # until a connection that failed is tried again


def bounded_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket whose queues, frames and handshakes are bounded."""
    socket = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM, SEND_QUEUE_FRAMES),
        (zmq.RCVHWM, RECEIVE_QUEUE_FRAMES),
        (zmq.LINGER, CLOSE_LINGER_MS),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + MAX_HEAD_BYTES),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.BACKLOG, BACKLOG),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS),
    ):
        socket.setsockopt(option, value)
    return socket


def keyring(authentication: Literal["curve", "none"]) -> "Keyring | None":
    """A new key pair; None: whoever reaches a port may speak there, in any name."""
    if authentication == "curve":
        return Keyring()
    log.warning("transport.authentication is none: whoever reaches our ports may speak as anyone")
    return None


@dataclass(slots=True)
class Refusals:
    """What a process has refused. The thread of its sockets counts; others may read.

    Messages are counted by the thread that handles them, too.
    """

    num_frames: int = 0  # not ours, or not of who has sent them
    num_connections: int = 0  # with keys of no member
    num_messages: int = 0  # of members, about requests and leases of others, or too many
    is_limited: bool = True  # whether they may be too many
    _told: tuple[int, int] = 0, 0
    _addresses: set[str] = field(default_factory=set[str])  # of the latter, since they were told
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of num_messages
    _log: Seldom = field(default_factory=Seldom)
    budgets: Budgets = field(default_factory=Budgets)

    def connection(self, address: str) -> None:
        """One more, from there."""
        self.num_connections += 1
        if len(self._addresses) < MAX_TOLD_ADDRESSES:
            self._addresses.add(address)

    def foreign(self, peer: PeerId, message: object) -> None:
        """A member has sent one more message about what is another's."""
        self._message(peer, f"has sent a {type(message).__name__} for what is another's")

    def unexpected(self, peer: PeerId, message: object) -> None:
        """A member has sent one more message that no honest one sends to us."""
        self._message(peer, f"has sent a {type(message).__name__} that makes no sense here")

    def exceeds(self, peer: PeerId, num_bytes: int, *, begins: bool, answers: bool) -> bool:
        """Whether a peer sends more than was granted; then this message is dropped.

        Who goes on stays unheard, also over new links. begins: it is the first message of a link,
        and nothing is to come of the one before; answers: of a link that we have begun.
        """
        if not self.is_limited:
            return False
        fits = self.budgets.of(peer).takes(num_bytes, begins=begins, answers=answers)
        if not fits:
            self._message(peer, "sends more than a member has to say")
        return not fits

    def grant(self, peer: PeerId) -> int:
        """How many units a peer may send on its link, in all; to be told to it."""
        return self.budgets.of(peer).grant() if self.is_limited else UNLIMITED

    def owes(self, peer: PeerId) -> bool:
        """Whether to grant more at once, as half of what was granted is used."""
        return self.is_limited and self.budgets.of(peer).is_low

    def _message(self, peer: PeerId, what: str) -> None:
        with self._lock:
            self.num_messages += 1
        if num := self._log.news(peer, what):
            log.warning("%s %s%s", peer, what, f" ({num} times)" if num > 1 else "")

    def tell(self) -> None:
        """Log what has come since the last call."""
        told, self._told = self._told, (self.num_frames, self.num_connections)
        if num := self.num_frames - told[0]:
            log.warning("dropped %d frames that are not ours, or of no member", num)
        if num := self.num_connections - told[1]:
            where = ", ".join(sorted(self._addresses))
            log.info("refused %d connections with no member's key, from %s", num, where)
            self._addresses.clear()


class Keyring:
    """`admit` may be called from any thread; the other methods are for the thread of the sockets.

    Attributes:
        key: our public key, for others.
        refusals: of our sockets.
    """

    def __init__(self) -> None:
        public, self._secret = zmq.curve_keypair()
        self.key = public.decode()
        self.refusals = Refusals()
        self._zap: zmq.Socket[bytes] | None = None
        # Of ZeroMQ and not answered: when it came, the head of its answer, the key, from where.
        self._asked = deque[tuple[float, list[bytes], bytes, bytes]](maxlen=MAX_ASKED)
        self._peers: dict[bytes, PeerId] = {}  # by key: who may connect
        self._names: frozenset[PeerId] = frozenset()  # of the same

    def admit(self, keys: Mapping[PeerId, str]) -> None:
        """Let these connect, and nobody else any more."""
        peers = {z85.decode(key): peer for peer, key in keys.items() if key}
        self._names = frozenset(peers.values())  # first: who is let in is heard from then on
        self._peers = peers

    def admits(self, peer: PeerId) -> bool:
        """Whether it may connect now."""
        return peer in self._names

    def vouches(self, sender: PeerId, frame: zmq.Frame) -> bool:
        """Whether a frame came to a listener over a connection of its sender, who is a member."""
        return frame.get("User-Id") == sender and self.admits(sender)

    def guard(
        self, context: zmq.Context[zmq.Socket[bytes]], listener: zmq.Socket[bytes]
    ) -> zmq.Socket[bytes]:
        """Have a socket that will be bound accept members only; the socket to `answer` on."""
        zap = self._zap = context.socket(zmq.ROUTER)
        zap.bind(ZAP_ADDRESS)
        listener.curve_server = True
        listener.curve_secretkey = self._secret
        listener.zap_domain = ZAP_DOMAIN
        listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is let in unanswered
        return zap

    def show_key(self, dealer: zmq.Socket[bytes], to: str) -> None:
        """Have a socket that will be connected show our key to the owner of key `to` alone."""
        dealer.curve_publickey = self.key.encode()
        dealer.curve_secretkey = self._secret
        dealer.curve_serverkey = to.encode()

    def answer(self) -> None:
        """Say whose the connections are that ZeroMQ asks about.

        Those with keys of no member wait: they may have come before we have heard of them. ZeroMQ
        closes them after HANDSHAKE_MS, and members then try again.
        """
        zap = self._zap
        if zap is None:  # nobody listens
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_TURN_ANSWERS):
                *head, _, address, _, _, key = zap.recv_multipart(zmq.NOBLOCK)
                if len(self._asked) == MAX_ASKED:  # the oldest goes
                    self.refusals.connection(self._asked[0][3].decode())
                self._asked.append((time.monotonic(), head, key, address))
        for question in list(self._asked):
            _, head, key, _ = question
            if (peer := self._peers.get(key)) is not None:
                self._asked.remove(question)
                zap.send_multipart([*head, b"200", b"OK", peer.encode(), b""], zmq.NOBLOCK)

    def give_up(self) -> None:
        """Count the connections that have waited in vain; to be called now and then."""
        before = time.monotonic() - HANDSHAKE_MS / 1000
        while self._asked and self._asked[0][0] < before:
            self.refusals.connection(self._asked.popleft()[3].decode())


@dataclass(slots=True)
class Peer:
    """A link. `dealer` is our socket to the peer if we connected, None if it connected to us."""

    dealer: zmq.Socket[bytes] | None
    route: bytes  # the listener's name for the connection that it was last heard on
    link: int  # chosen by the side that connected; ascends
    heard_at: float
    heard: bool = False
    num_sent: int = 0  # frames on this link
    num_received: int = 0
    out: Outgoing = field(init=False)

    def __post_init__(self) -> None:
        """Who listens answers."""
        self.out = Outgoing(answers=self.dealer is None)

    def send(
        self, listener: zmq.Socket[bytes] | None, me: PeerId, peer: PeerId, frame: bytes
    ) -> None:
        """Send the next frame at once; raises a ZMQError if that fails."""
        self.num_sent += 1
        packed = pack(me, peer, (self.link, self.num_sent), frame)
        if self.dealer is not None:
            self.dealer.send(packed, zmq.NOBLOCK)
        else:
            assert listener is not None
            listener.send_multipart([self.route, packed], zmq.NOBLOCK)


def pack(sender: PeerId, addressee: PeerId, place: Place, frame: bytes) -> bytes:
    """Sender, addressee, link, number and message in one zmq part, with NULs between them."""
    return "\0".join((sender, addressee, *map(str, place), "")).encode() + frame


def unpack(frame: bytes) -> tuple[PeerId, PeerId, Place, bytes]:
    """The same apart again; raises a ValueError if it is something else."""
    sender, addressee, link, number, payload = frame.split(b"\0", 4)
    return sender.decode(), addressee.decode(), (int(link), int(number)), payload
