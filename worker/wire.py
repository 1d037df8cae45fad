"""The data plane: ZeroMQ sockets of one process, owned by one thread, with pings on every link.

A process listens on one ROUTER socket and connects a DEALER socket to each peer that it wants to
ask. Peers are addressed by `PeerId` whichever side connected.

Liveness. The connecting side pings; both count silence. Silence for `max_misses` intervals, a full
send queue, or a send to a vanished peer delivers `Lost` once. A process whose own loop has not
called `beat()` for `stall_s` answers no pings.

A link works or is lost, for both sides. Each connect() begins one, and its frames are numbered:
when ZeroMQ reconnects by itself, frames under way are gone, and the gap loses the peer. A closing
side says Bye: the other logs no loss. So does one that is asked on a link that it has lost: who
stood still learns at once that it was given up.

Strangers. With a `Keyring` links are encrypted, and a frame counts if it came over a connection of
its sender. Frames are bounded, and so are what is taken of one socket before others have their turn
and what a peer may send (`credit`): who sends more is lost, and unheard until it is quiet.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import zmq
from msgspec.structs import replace

from worker.api import AnyMessage, Bye, Lost, PeerId, Ping, Pong, WorkerStats, decode, encode
from worker.config import PingConfig
from worker.config.credit import FEW_WAITING, LONG_BYTES
from worker.keyring import (
    CLOSE_LINGER_MS,
    MAX_MESSAGE_BYTES,
    SEND_QUEUE_FRAMES,
    Keyring,
    Peer,
    Place,
    Refusals,
    bounded_socket,
    pack,
    unpack,
)
from worker.keyring import keyring as keyring  # routers see no other module of the wire
from worker.seldom import Seldom

log = logging.getLogger("kvlane.wire")

Event = tuple[PeerId, AnyMessage | Lost]
CONNECT_GRACE_S = 10.0
MAX_TURN_FRAMES = 256  # taken from one socket before others, and what we send, have their turn
SWITCH_INTERVAL_S = 1e-4  # of the interpreter: the I/O thread must not wait 5 ms for the engine


class Wire:
    """Sockets, framing and liveness of one process; every method may be called from any thread.

    The I/O thread calls `deliver` with what arrived, and `stats` for every Pong; neither may block.
    keyring: with the key of this process; None: frames are plain, and anybody's are taken.
    """

    def __init__(
        self,
        me: PeerId,
        ping: PingConfig,
        deliver: Callable[[Sequence[Event]], None],
        stats: Callable[[], WorkerStats | None] = lambda: None,
        keyring: Keyring | None = None,
    ) -> None:
        self.me = me
        self.key = "" if keyring is None else keyring.key  # for `Member.wire_key`
        self._ping, self._deliver, self._stats = ping, deliver, stats
        self._keyring = keyring
        self._links = _Links(me, ping, self._pong, keyring)
        self.refusals = self._links.refusals
        self._outbox: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_woken = False  # the I/O thread will look into the outbox: no need to wake it
        self._beat_at = time.monotonic()
        self._closing, self._ends_at = False, 0.0
        self._posting = threading.Lock()  # close() must not take the eventfd away under a post
        self._thread = threading.Thread(target=self._run, name="kvlane-wire", daemon=True)

    def start(self, host: str | None = None) -> str:
        """Start the I/O thread; with `host`, listen there on a free port. Returns the address.

        From then on this process's interpreter switches threads every SWITCH_INTERVAL_S.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        address = self._links.listen(host) if host is not None else ""
        self._links.poller.register(self._wake_fd, zmq.POLLIN)
        self._thread.start()
        return address

    def admit(self, keys: Mapping[PeerId, str]) -> None:
        """Let these peers connect, with these keys, and nobody else; without a keyring all may."""
        if self._keyring is not None:
            self._keyring.admit(keys)
            self._post(self._links.admitted)

    def connect(self, peer: PeerId, address: str, key: str = "") -> None:
        """Open a link to the owner of a key; a first Pong follows, or Lost if it does not work."""
        self._post(lambda: self._links.connect(peer, address, key))

    def disconnect(self, peer: PeerId) -> None:
        """Close the link to `peer` without a Lost event; unknown peers are fine."""
        self._post(lambda: self._links.part(peer))

    def lose(self, peer: PeerId, reason: str) -> None:
        """Close the link to `peer` with a Lost event, as if it were silent."""
        self._post(lambda: self._links.lose(peer, reason))

    def send(self, peer: PeerId, message: AnyMessage) -> None:
        """Queue one message. Never blocks; a failure arrives as `Lost` of that peer."""
        frame = encode(message)
        assert len(frame) <= MAX_MESSAGE_BYTES, type(message)
        self._post(lambda: self._links.send(peer, frame))

    def has_room(self, peer: PeerId, num_bytes: int) -> bool:
        """Whether one of about this length may leave now; few long ones wait for our own thread."""
        known = self._links.peers.get(peer)
        is_behind = num_bytes > LONG_BYTES and len(self._outbox) >= FEW_WAITING
        return not is_behind and (known is None or known.out.has_room(num_bytes))

    def beat(self) -> None:
        """The owner's loop is alive; to be called at least every `stall_s`."""
        self._beat_at = time.monotonic()

    @property
    def stalled_s(self) -> float:
        """For how long the owner's loop has not beaten, from `stall_s` on; 0: it is alive."""
        silent_s = time.monotonic() - self._beat_at
        return silent_s if silent_s >= self._ping.stall_s else 0.0

    def close(self) -> None:
        """Send what is queued (in half a second or so) and end; later calls do nothing."""
        with self._posting:
            if self._closing:
                return
            self._closing, self._ends_at = True, time.monotonic() + CLOSE_LINGER_MS / 1000
            os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._links.close()
        os.close(self._wake_fd)

    def _post(self, action: Callable[[], None]) -> None:
        with self._posting:
            if not self._closing:
                self._outbox.append(action)
                if not self._is_woken:
                    self._is_woken = True
                    os.eventfd_write(self._wake_fd, 1)

    def _pong(self) -> Pong | None:
        """The answer to a ping, or None while our own loop is stalled."""
        return None if self.stalled_s else Pong(self.me, self._stats())

    def _run(self) -> None:
        """The I/O thread. A bug in it ends the process: it must not live on and hear nothing."""
        try:
            self._serve()
        except BaseException:
            log.critical("the sockets of %s failed", self.me, exc_info=True)
            logging.shutdown()
            os._exit(1)

    def _serve(self) -> None:
        next_ping = 0.0
        while True:
            now = time.monotonic()
            if now >= next_ping:
                self._links.ping_all(now)
                next_ping = now + self._ping.interval_s
            if events := self._links.take_events():
                self._deliver(events)
            wait_ms = max(0.0, next_ping - time.monotonic()) * 1000
            for socket, _ in self._links.poller.poll(int(wait_ms) + 1):
                if socket == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    self._is_woken = False  # before it looks: what is posted later wakes it again
                else:
                    self._links.receive(socket)
            while self._outbox:
                self._outbox.popleft()()
            if self._closing and not self._outbox:
                held = any(peer.out.held for peer in self._links.peers.values())
                if not held or now > self._ends_at:
                    return


class _Links:
    """The sockets of one process and its peers; after `listen` for the I/O thread only."""

    def __init__(
        self, me: PeerId, ping: PingConfig, pong: Callable[[], Pong | None], keyring: Keyring | None
    ) -> None:
        self._me, self._ping, self._pong, self._keyring = me, ping, pong, keyring
        self.refusals = Refusals() if keyring is None else keyring.refusals
        self._log = Seldom()
        self._context = zmq.Context()
        self._listener: zmq.Socket[bytes] | None = None
        self._zap: zmq.Socket[bytes] | None = None
        self.peers: dict[PeerId, Peer] = {}
        self._events: list[Event] = []
        self._pinged_at = time.monotonic()
        self.poller = zmq.Poller()

    def listen(self, host: str) -> str:
        """Bind the ROUTER socket to a free port of `host`; its address."""
        self._listener = bounded_socket(self._context, zmq.ROUTER)
        self._listener.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.poller.register(self._listener, zmq.POLLIN)
        if self._keyring is not None:
            self._zap = self._keyring.guard(self._context, self._listener)
            self.poller.register(self._zap, zmq.POLLIN)
        return f"tcp://{host}:{self._listener.bind_to_random_port(f'tcp://{host}')}"

    def connect(self, peer: PeerId, address: str, key: str) -> None:
        """Open a DEALER to `peer` and ping it at once."""
        if peer in self.peers:
            return
        dealer = bounded_socket(self._context, zmq.DEALER)
        self.poller.register(dealer, zmq.POLLIN)
        self.peers[peer] = Peer(dealer, b"", time.monotonic_ns(), time.monotonic())
        try:
            if self._keyring is not None:
                self._keyring.show_key(dealer, key)
            dealer.connect(address)
        except zmq.ZMQError as error:
            self.lose(peer, f"cannot connect to {address}: {error}")
            return
        self._ping_one(peer)

    def send(
        self, peer_id: PeerId, frame: bytes, *, is_ping: bool = False, is_counted: bool = False
    ) -> None:
        """Send, hold or lose the peer; an unknown one was lost before."""
        if (peer := self.peers.get(peer_id)) is None:
            return
        if not (is_counted or peer.out.takes(frame, is_ping=is_ping)):
            if len(peer.out.held) > SEND_QUEUE_FRAMES:
                self.lose(peer_id, "its queue is full")
            return
        try:
            peer.send(self._listener, self._me, peer_id, frame)
        except zmq.Again:
            self.lose(peer_id, "its queue is full")
        except zmq.ZMQError as error:
            if not (is_ping and peer.dealer is None):  # a Pong: its last messages may be unread yet
                self.lose(peer_id, f"send failed: {error}")

    def receive(self, socket: zmq.Socket[bytes]) -> None:
        """Take what `socket` has, but not so much at once that others wait for long."""
        if socket is self._zap:
            assert self._keyring is not None
            self._keyring.answer()
            return
        for _ in range(MAX_TURN_FRAMES):
            try:
                *route, frame = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return  # nothing left, or closed since the poller named it
            try:
                if len(route) != (socket is self._listener):
                    raise ValueError("more parts than we send")
                sender, addressee, place, payload = unpack(frame.bytes)
                known = self.peers.get(sender)
                is_own = known is not None and known.dealer is socket
                if route:
                    is_own = self._keyring is None or self._keyring.vouches(sender, frame)
                if not is_own:
                    raise ValueError("not its sender's")
                if known is not None and place[0] < known.link:  # of a link that is over
                    continue
                begins, answers = place[1] == 1, not route
                if self.refusals.exceeds(sender, len(payload), begins=begins, answers=answers):
                    if known is not None:
                        self.lose(sender, "it sends too much", logging.DEBUG)
                    continue
                message = decode(payload)
            except (msgspec.MsgspecError, ValueError, RecursionError):  # lists in lists
                self.refusals.num_frames += 1
                continue
            if addressee == self._me:  # else it is for a process that had our address before
                self._heard(sender, place, message, route[0].bytes if route else None)

    def take_events(self) -> list[Event]:
        """Messages that arrived, and peers lost, since the last call."""
        events, self._events = self._events, []
        return events

    def ping_all(self, now: float) -> None:
        """Ping every peer we connected to; lose the silent ones on either side."""
        if self._keyring is not None:
            self._keyring.give_up()
        self.refusals.tell()
        late_s = max(0.0, now - self._pinged_at - self._ping.interval_s)
        self._pinged_at = now
        silence = self._ping.interval_s * self._ping.max_misses
        for peer_id, peer in list(self.peers.items()):
            peer.heard_at += late_s  # while we did not run, nobody could be heard
            limit = silence if peer.heard else max(silence, CONNECT_GRACE_S)
            if now - peer.heard_at > limit:
                self.lose(peer_id, f"silent for {now - peer.heard_at:.1f} s", is_silent=True)
            elif peer.dealer is not None:
                self._ping_one(peer_id)

    def part(self, peer_id: PeerId) -> None:
        """Close the link, if there is one; a side that connected says so."""
        peer = self.peers.get(peer_id)
        if peer is not None and peer.dealer is not None:
            with contextlib.suppress(zmq.ZMQError):  # then its silence tells
                peer.send(None, self._me, peer_id, encode(Bye()))
        self.forget(peer_id)

    def forget(self, peer_id: PeerId) -> None:
        """Close the link, if there is one."""
        peer = self.peers.pop(peer_id, None)
        if peer is not None and peer.dealer is not None:
            self.poller.unregister(peer.dealer)
            peer.dealer.close(CLOSE_LINGER_MS)

    def admitted(self) -> None:
        """After `Keyring.admit`: let in who waits for it, lose whoever may not speak any more."""
        assert self._keyring is not None
        self._keyring.answer()
        for peer_id, peer in list(self.peers.items()):
            if peer.dealer is None and not self._keyring.admits(peer_id):
                self.lose(peer_id, "it is no member any more", logging.DEBUG)  # most went in peace

    def close(self) -> None:
        """Close every link and socket."""
        for peer_id in list(self.peers):
            self.part(peer_id)
        self._context.destroy(linger=CLOSE_LINGER_MS)

    def _heard(
        self, sender: PeerId, place: Place, message: AnyMessage, route: bytes | None
    ) -> None:
        """Take a message; route: of the connection to our listener that it came over, if any."""
        link, number = place
        if route is not None and number == 1:
            self._meet(sender, link, route)
        peer = self.peers.get(sender)
        if peer is None or peer.link != link:  # of a link that is over
            if peer is None and route is not None and not isinstance(message, Bye):
                assert self._listener is not None
                bye = pack(self._me, sender, (link, 0), encode(Bye()))
                with contextlib.suppress(zmq.ZMQError):
                    self._listener.send_multipart([route, bye], zmq.NOBLOCK)
            return
        if isinstance(message, Bye):
            self.lose(sender, "it has closed the link", logging.DEBUG)
            return
        peer.num_received += 1
        if number != peer.num_received:
            self.lose(sender, f"frame {number} came instead of {peer.num_received}")
            return
        peer.heard_at, peer.heard, peer.route = time.monotonic(), True, route or b""
        if isinstance(message, Ping | Pong):
            for frame in peer.out.released(message.granted):
                self.send(sender, frame, is_counted=True)
        if not isinstance(message, Ping):
            self._events.append((sender, message))
        if isinstance(message, Ping) or self.refusals.owes(sender):
            self._ping_one(sender)

    def _ping_one(self, peer_id: PeerId) -> None:
        """Ping a peer, or answer one that has connected, unless our own loop is stalled."""
        peer, pong = self.peers.get(peer_id), self._pong()
        if peer is not None and pong is not None:
            message = pong if peer.dealer is None else Ping(self._me)
            granted = replace(message, granted=self.refusals.grant(peer_id))
            self.send(peer_id, encode(granted), is_ping=True)

    def _meet(self, sender: PeerId, link: int, route: bytes) -> None:
        """Register the sender, which connected to us; a newer link replaces the known one.

        Only its first frame begins a link, so what is left of one that is over does not.
        """
        peer = self.peers.get(sender)
        if peer is not None and link > peer.link:
            self.lose(sender, "it has connected anew")
        if sender not in self.peers:
            self.peers[sender] = Peer(None, route, link, 0.0, heard=True)

    def lose(
        self, peer_id: PeerId, reason: str, level: int = logging.WARNING, *, is_silent: bool = False
    ) -> None:
        """Close the link to a peer, and report it as lost; the log says so now and then."""
        if not self._log.news(peer_id, f"lost: {reason.partition(' ')[0]}"):
            level = logging.DEBUG
        log.log(level, "%s lost: %s", peer_id, reason)
        self.forget(peer_id)
        self._events.append((peer_id, Lost(reason, is_silent)))
