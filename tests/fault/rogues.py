"""Whoever misbehaves on the wire: members gone bad, each with a key of the cluster, and strangers.

A member gone bad keeps to the rules of links as far as it wants to: what it sends is taken by the
loop behind the socket, not dropped before it. Every socket of it belongs to one thread.
"""

import contextlib
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from tests.support.frames import Frame, Frames, seeds
from worker import api
from worker.keyring import CLOSE_LINGER_MS, Keyring

NUM_REMEMBERED = 400  # frames that were sent last, for whoever looks for the one that did it
SHOWN_BYTES = 4096
MUTE_S = 1.0
HIGH_WATER = 200  # frames that wait in a socket of ours
STATS = api.WorkerStats(draining=True)  # nobody is sent to us
BUSY = api.Error("busy", "no room")


class Sent(NamedTuple):
    """A frame that has left."""

    at: float
    door: str
    kind: str
    parts: tuple[bytes, ...]

    def shown(self) -> dict[str, object]:
        """For a file."""
        parts = [part[:SHOWN_BYTES].hex() for part in self.parts]
        sizes = [len(part) for part in self.parts]
        return {"at": self.at, "door": self.door, "kind": self.kind, "sizes": sizes, "hex": parts}


@dataclass
class Ledger:
    """What was sent: how much of each kind, and the last frames."""

    by_door: Counter[str] = field(default_factory=Counter[str])
    by_kind: Counter[str] = field(default_factory=Counter[str])
    last: deque[Sent] = field(default_factory=lambda: deque[Sent](maxlen=NUM_REMEMBERED))

    @property
    def num(self) -> int:
        """Frames of all doors."""
        return sum(self.by_door.values())

    def shown(self) -> list[dict[str, object]]:
        """The last frames, for a file."""
        return [each.shown() for each in self.last]

    def note(self, door: str, kind: str, *parts: bytes) -> None:
        """One has left."""
        self.by_door[door] += 1
        self.by_kind[kind] += 1
        self.last.append(Sent(time.time(), door, kind, parts))


def is_message(payload: bytes) -> bool:
    """Whether the other side reads it as a message, and so counts it."""
    try:
        api.decode(payload)
    except Exception:
        return False
    return True


@dataclass(eq=False)
class Door:
    """One link of a member gone bad, `me`. link: 0: none has begun."""

    name: str
    me: str
    peer: str
    frames: Frames
    ledger: Ledger
    rng: random.Random
    others: Sequence[str]  # names that are not its own
    is_ours: bool  # we have connected
    link: int = 0
    number: int = 0
    mute_until: float = 0.0  # the other side has given the link up, and will begin another

    def begun(self, link: int) -> None:
        """A link has begun; frame 1 is the next."""
        self.link, self.number, self.mute_until = link, 0, 0.0

    def over(self) -> None:
        """The other side has lost us, or will when it reads this."""
        self.link, self.mute_until = 0, 0.0 if self.is_ours else time.monotonic() + MUTE_S

    def head(self, place: tuple[object, object], sender: str = "", to: str = "") -> bytes:
        """What precedes a message in its part."""
        names = sender or self.me, to or self.peer
        return "\0".join((*names, *map(str, place), "")).encode("utf-8", "surrogatepass")

    def honest(self, payload: bytes) -> bytes:
        """A part at its right place."""
        self.number += 1
        return self.head((self.link, self.number)) + payload

    def next(self) -> tuple[str, list[bytes]]:
        """The parts of the next frame."""
        if self.is_ours and (not self.link or (self.number == 0 and self.rng.random() < 0.9)):
            self.begun(time.monotonic_ns())
            return "Ping", [self.honest(api.encode(api.Ping(self.me)))]
        frame = self.frames.next()
        if frame.lies:
            return f"{frame.kind}, a lie", [*frame.rest, self._lie(frame)]
        if is_message(frame.payload):
            part = self.honest(frame.payload)
            if frame.kind.startswith("Bye"):
                self.over()
        else:
            part = self.head((self.link, self.number + 1)) + frame.payload
        return frame.kind, [*frame.rest, part]

    def _lie(self, frame: Frame) -> bytes:
        rng, link, number = self.rng, self.link, self.number
        how = rng.choice((0, 1, 2, 3, 4, 5, 5, 6))
        if how == 0:
            return self.head((link, number + 1), sender=rng.choice(self.others)) + frame.payload
        if how == 1:
            return self.head((link, number + 1), to=rng.choice(self.others)) + frame.payload
        if how == 2:
            return rng.choice([b"", b"\0" * 4, b"\0" * 3, rng.randbytes(90)]) + frame.payload
        if how == 3:
            odd = rng.choice(["9" * 5000, "-1", " 7 ", "1_0", "\u0663", "", "x", 10**30])
            return self.head((link, odd)) + frame.payload
        if how == 4:
            return self.head((-link, rng.choice([1, 0, -1]))) + frame.payload
        self.over()  # these are believed
        if how == 5:  # a link that nothing can replace locks out whoever has begun it, until silent
            much = 10**30 if rng.random() < 0.02 else 1
            return self.head((link + much, 1)) + frame.payload
        return self.head((link, number + rng.choice([-1, 0, 2, 10**20]))) + frame.payload


class Rogue:
    """A member gone bad: it connects to every worker, and others connect to it if it is one."""

    def __init__(self, name: str, role: api.Role, rng: random.Random, ledger: Ledger) -> None:
        self._context = zmq.Context()
        self._keyring = Keyring()
        self._rng, self._ledger = rng, ledger
        self._leased: dict[api.Xfer, Door] = {}
        self._out: dict[Door, zmq.Socket[bytes]] = {}
        self._in: dict[str, tuple[Door, bytes]] = {}  # by who has connected: and its route
        address = ""
        if role != "router":
            self._listener = self._bounded(zmq.ROUTER)
            self._zap = self._keyring.guard(self._context, self._listener)
            port = self._listener.bind_to_random_port("tcp://127.0.0.1")
            address = f"tcp://127.0.0.1:{port}"
        incarnation = f"bad{rng.randrange(16**5):05x}"
        key = self._keyring.key
        self.member = api.Member(name, role, incarnation, address, layout_hash="none", wire_key=key)

    def meet(self, members: Sequence[api.Member]) -> None:
        """Connect to the workers among them, and let all of them connect."""
        self._keyring.admit({each.peer: each.wire_key for each in members})
        self._names = [each.peer for each in members]
        self._prefill = next(each.peer for each in members if each.role == "prefill")
        for each in members:
            if each.address.startswith("tcp://"):
                dealer = self._bounded(zmq.DEALER)
                self._keyring.show_key(dealer, each.wire_key)
                dealer.connect(each.address)
                self._out[self._door(each.peer, is_ours=True)] = dealer

    def send(self) -> None:
        """A frame to everybody who is there."""
        for door, dealer in self._out.items():
            self._say(door, dealer)
        for door, route in list(self._in.values()):
            self._say(door, self._listener, route)

    def hear(self) -> None:
        """Answer as far as it keeps others' links up, and drop the rest."""
        for door, dealer in self._out.items():
            for _, payload in self._heard(dealer):
                message = api.decode(payload)
                if isinstance(message, api.Bye):
                    door.over()
                elif isinstance(message, api.KVReady):
                    self._leased[message.xfer] = door
        if not self.member.address:
            return
        self._keyring.answer()
        for parts, payload in self._heard(self._listener):
            names = parts[-1].split(b"\0", 4)
            peer, link = names[0].decode(), int(names[2])
            door, _ = self._in.get(peer) or (self._door(peer, is_ours=False), b"")
            if door.link != link:
                door.begun(link)
            self._in[peer] = door, parts[0]
            with contextlib.suppress(Exception):
                self._answer(door, parts[0], payload)

    def release(self) -> None:
        """Give back what prefill workers hold for it, which else lasts as long as its leases."""
        for door in self._out:
            door.begun(time.monotonic_ns())
            messages: list[api.AnyMessage] = [api.Ping(self.member.peer)]
            messages += [api.Release(xfer) for xfer, to in self._leased.items() if to is door]
            for message in messages:
                self._out[door].send(door.honest(api.encode(message)))

    def close(self) -> None:
        """Its links end, as if its process had."""
        self._context.destroy(linger=CLOSE_LINGER_MS)

    def _answer(self, door: Door, route: bytes, payload: bytes) -> None:
        message = api.decode(payload)
        if isinstance(message, api.Ping):
            reply = api.encode(api.Pong(self.member.peer, STATS))
        elif isinstance(message, api.Generate):  # none of ours: a client waits for it
            reply = api.encode(api.Refused(message.req_id, message.dispatch, BUSY, 1.0))
        else:
            return
        self._listener.send_multipart([route, door.honest(reply)], zmq.NOBLOCK)

    def _say(self, door: Door, out: zmq.Socket[bytes], *route: bytes) -> None:
        if door.mute_until > time.monotonic():
            return
        link, number = door.link, door.number
        kind, parts = door.next()
        try:
            out.send_multipart([*route, *parts], zmq.NOBLOCK)
        except zmq.ZMQError:  # no room, or nobody there any more
            door.link, door.number = link, number
            return
        self._ledger.note(door.name, kind, *parts)

    def _heard(self, own: "zmq.Socket[bytes]") -> list[tuple[list[bytes], bytes]]:
        found = []
        with contextlib.suppress(zmq.Again):
            for _ in range(HIGH_WATER):
                parts = own.recv_multipart(zmq.NOBLOCK)
                found.append((parts, parts[-1].split(b"\0", 4)[4]))
        return found

    def _door(self, peer: str, *, is_ours: bool) -> Door:
        me = self.member.peer
        frames = Frames(self._rng, seeds(me, peer, self._prefill))
        name = f"{self.member.role} gone bad to {peer.partition('/')[0]}"
        return Door(
            f"{name}, {'a listener' if is_ours else 'which has connected'}", me, peer, frames,
            self._ledger, self._rng, self._names, is_ours,
        )  # fmt: skip

    def _bounded(self, kind: int) -> "zmq.Socket[bytes]":
        made: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in ((zmq.SNDHWM, HIGH_WATER), (zmq.LINGER, CLOSE_LINGER_MS)):
            made.setsockopt(option, value)
        return made


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01%s" + bytes(32)
DEAF, NOT_ZMTP = "stranger to a port that takes no connection", "stranger to ports without ZMTP"
BEGINNINGS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\n",
    b"\x16\x03\x01\x02\x00\x01",  # TLS
    b"",
)
COMMANDS = (b"\x05HELLO", b"\x08INITIATE", b"\x05READY", b"\x05ERROR", b"\x04PING", b"")


class Stranger:
    """Bytes of ZMTP from nobody, over one TCP connection after another, to one port."""

    def __init__(self, port: int, whose: str, frames: Frames, rng: random.Random, ledger: Ledger):
        self._port, self._frames, self._rng, self._ledger = port, frames, rng, ledger
        self._name = f"stranger to {whose}"

    def send(self) -> None:
        """A connection: a greeting, and what may follow one."""
        rng = self._rng
        mechanism = rng.choice([b"CURVE", b"CURVE", b"NULL", b"PLAIN"])
        greeting = bytearray(GREETING % mechanism.ljust(20, b"\0"))
        if rng.random() < 0.2:
            greeting[rng.randrange(64)] = rng.randrange(256)
        said = [self._frame() for _ in range(rng.randint(1, 12))]
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as raw:
                raw.setblocking(False)
                raw.send(greeting)
                for kind, data in said:
                    self._ledger.note(self._name, kind, data)
                    if raw.send(data) < len(data):
                        return
                if rng.random() < 0.5:
                    raw.settimeout(0.002)
                    raw.recv(4096)
        except OSError:  # it has closed it, as it should
            return

    def _frame(self) -> tuple[str, bytes]:
        rng = self._rng
        frame = self._frames.next()
        if rng.random() < 0.5:
            kind, body = "a command", b"".join(
                (rng.choice(COMMANDS), rng.randbytes(rng.choice([0, 8, 194, 194, 300])))
            )  # fmt: skip
            flags = 4
        else:
            kind, body, flags = "a message", frame.payload[:100_000], rng.choice([0, 1])
        if rng.random() < 0.1:
            flags = rng.randrange(256)
        size = len(body) if rng.random() < 0.9 else rng.choice([0, 255, 8 << 30, 2**63, 2**64 - 1])
        if size > 255 or rng.random() < 0.1:
            return kind, bytes([flags | 2]) + size.to_bytes(8, "big") + body
        return kind, bytes([flags & 0xFD, size]) + body


class Noise:
    """Bytes from nobody to a port at which no ZMTP is spoken, over one connection after another.

    is_deaf: it takes no connection, as ports of libraries that members have been let into.
    """

    def __init__(
        self, port: int, frames: Frames, rng: random.Random, ledger: Ledger, *, is_deaf: bool
    ) -> None:
        self._port, self._frames, self._rng, self._ledger = port, frames, rng, ledger
        self._name, self._wait_s = (DEAF, 0.01) if is_deaf else (NOT_ZMTP, 1.0)

    def send(self) -> None:
        """What a protocol begins with, and then something else."""
        rng = self._rng
        begin = rng.choice(BEGINNINGS)
        frame = rng.randbytes(rng.choice([0, 1, 4, 9, 40]))
        if begin.startswith(b"PRI"):  # frames of HTTP/2: length, type, flags, stream
            size = rng.choice([0, 8, 255, 2**24 - 1])
            kind, flags = rng.randrange(12).to_bytes(1, "big"), rng.randbytes(1)
            frame = size.to_bytes(3, "big") + kind + flags + rng.randbytes(4) + frame
        said = begin + frame + self._frames.next().payload[:4096]
        try:
            with socket.create_connection(("127.0.0.1", self._port), self._wait_s) as raw:
                raw.settimeout(0.002)
                raw.send(said)
                self._ledger.note(self._name, "Noise", said)
                raw.recv(4096)
        except OSError:  # it has closed it, or waits for more
            return


class Impostor:
    """A socket of pyzmq without a member's key: plain, or with a key of its own."""

    def __init__(
        self, member: api.Member, frames: Frames, rng: random.Random, ledger: Ledger, *, plain: bool
    ) -> None:
        self._member, self._plain = member, plain
        self._frames, self._rng, self._ledger = frames, rng, ledger
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._num = 0
        self._name = f"{'plain' if plain else 'unknown key'} to {member.name}"

    def send(self) -> None:
        """A frame; every so often over a new connection."""
        self._num += 1
        if self._dealer is None or self._num % 100 == 0:
            if self._dealer is not None:
                self._dealer.close(0)
            self._dealer = self._context.socket(zmq.DEALER)
            self._dealer.setsockopt(zmq.SNDHWM, HIGH_WATER)
            if not self._plain:
                Keyring().show_key(self._dealer, self._member.wire_key)
            self._dealer.connect(self._member.address)
        frame = self._frames.next()
        head = f"router-0/x\0{self._member.peer}\0{self._num}\x001\0".encode()
        with contextlib.suppress(zmq.Again):
            self._dealer.send_multipart([*frame.rest, head + frame.payload[:100_000]], zmq.NOBLOCK)
            self._ledger.note(self._name, frame.kind, head + frame.payload)

    def close(self) -> None:
        self._context.destroy(linger=0)
