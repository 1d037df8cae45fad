"""Two wires over 127.0.0.1: framing, order, liveness, identity, and that nothing leaks."""

import gc
import os
import queue
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.support.pairwise import in_whole
from tests.support.patience import until
from worker import api
from worker.api import Lost, Pong, Stop, WorkerStats
from worker.config import PingConfig, credit
from worker.keyring import SEND_QUEUE_FRAMES, Keyring
from worker.wire import Event, Wire, _Links

FAST = PingConfig(interval_s=0.05, max_misses=16)  # not so fast that a loaded core is lost
LIMIT_S = 10.0

XFER = api.Xfer("r1:1:7", 2, "dec", "pre")
MESSAGES: list[api.AnyMessage] = [
    api.Generate(
        "r1", 2, (1, 2, 3), 2, api.Sampling(5, 0.5, 0.9, 3, 0.1, 2**63 - 1, True, (7, 8), 1),
        30.0, (api.Candidate("p/1", 10, 0.001, 16), api.Candidate("p/2")), salt="5a",
    ),
    Stop("r1", 2, 17),
    api.Claim("r1", 2, "key", 30.0),
    api.Claimed("r1", 2, True),
    api.Abort("r1", 2, True),
    api.ForgetPrefixes(),
    api.Ack("r1", 2),
    api.Refused("r1", 2, api.Error("busy", "no room: ü€\0"), 0.5),
    api.Chunks((
        api.TokenChunk("r1", 2, 5, (1, 2), window=api.Window(4, 4, (1, 9, -1), 1)),
        api.TokenChunk("r2", 1, 0, (), api.FinishReason.ERROR, api.Error("timeout", "")),
    )),
    api.Prefill(XFER, tuple(range(1000)), 16, salt="5a"),
    api.PrefillRefused(XFER, api.Error("busy", "")),
    api.RankMessage(b"body"),
    api.KVReady(XFER, 3, (9, 8, 7), 0, 4, True, 48),
    api.Renew(3, (XFER, XFER)),
    api.RenewAck(3, ()),
    api.Release(XFER),
]  # fmt: skip


class End:
    """A wire and what it was handed."""

    def __init__(self, name: str, ping: PingConfig = FAST, *, plain: bool = False) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.stats: WorkerStats | None = None
        own = None if plain else Keyring()
        self.wire = Wire(name, ping, self._deliver, lambda: self.stats, own)
        self.pongs: list[Pong] = []
        self.address = ""

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.put(event)

    def next(self, timeout_s: float = LIMIT_S) -> Event:
        """The next event that is no Pong."""
        limit = time.monotonic() + timeout_s
        while True:
            peer, event = self.events.get(timeout=max(0.001, limit - time.monotonic()))
            if not isinstance(event, Pong):
                return peer, event
            self.pongs.append(event)

    def lost(self, peer: str) -> Lost:
        found, event = self.next()
        assert found == peer
        assert isinstance(event, Lost)
        return event

    def nothing(self, for_s: float) -> None:
        with pytest.raises(queue.Empty):
            pytest.fail(f"got {self.next(for_s)}")


Make = Callable[..., End]


def linked(worker: End, client: End, to: str = "") -> tuple[End, End]:
    """A worker that listens, and a client that is connected to it, or looks for `to` there."""
    client.wire.start()
    worker.address = worker.wire.start("127.0.0.1")
    worker.wire.admit({client.wire.me: client.wire.key})
    client.wire.connect(to or worker.wire.me, worker.address, worker.wire.key)
    return worker, client


def greet(client: End, worker: End) -> None:
    """One message, so that the worker knows the client."""
    client.wire.send("w/1", MESSAGES[1])
    assert worker.next() == ("c/1", MESSAGES[1])


@pytest.fixture(params=["curve", *in_whole(("none",))])
def end(request: pytest.FixtureRequest) -> Iterator[Make]:
    ends: list[End] = []

    def make(name: str, ping: PingConfig = FAST) -> End:
        ends.append(End(name, ping, plain=request.param == "none"))
        return ends[-1]

    yield make
    for each in ends:
        each.wire.close()


@pytest.fixture
def pair(end: Make) -> tuple[End, End]:
    """A listening worker `w/1` and a client `c/1` that is connected to it."""
    return linked(end("w/1"), end("c/1"))


def test_every_message_arrives_as_it_was_sent_both_ways(pair: tuple[End, End]) -> None:
    worker, client = pair
    union = set(api.AnyMessage.__args__) - {api.Ping, Pong, api.Bye}
    assert {type(each) for each in MESSAGES} == union
    for message in MESSAGES:
        client.wire.send("w/1", message)
    for message in MESSAGES:
        assert worker.next() == ("c/1", message)
        worker.wire.send("c/1", message)
    for message in MESSAGES:
        assert client.next() == ("w/1", message)


def test_order_is_kept_with_several_senders(pair: tuple[End, End]) -> None:
    worker, client = pair
    threads = [
        threading.Thread(
            target=lambda t=t: [client.wire.send("w/1", Stop(f"t{t}", 1, i)) for i in range(500)]
        )
        for t in range(3)
    ]
    for thread in threads:
        thread.start()
    positions: dict[str, list[int]] = {}
    for _ in range(1_500):
        _, message = worker.next()
        positions.setdefault(message.req_id, []).append(message.at_position)
    for thread in threads:
        thread.join()
    assert positions == {f"t{t}": list(range(500)) for t in range(3)}


@pytest.mark.parametrize("asks", [True, False], ids=["asked", "answered"])
def test_an_honest_peer_is_never_one_that_says_too_much(
    end: Make, monkeypatch: pytest.MonkeyPatch, *, asks: bool
) -> None:
    """More than was granted waits at the sender, in order; all that was may come in one moment."""
    monkeypatch.setattr(credit, "MAX_UNITS", 1000)
    patient = PingConfig(interval_s=0.05, max_misses=1200)
    worker, client = linked(end("w/1", patient), end("c/1", patient))
    greet(client, worker)
    sender, reader = (client, worker) if asks else (worker, client)
    unit = credit.ASKED_UNIT_BYTES if asks else credit.ANSWER_UNIT_BYTES
    much = [api.PrefillRefused(XFER, api.Error(str(i), "x" * 40 * unit)) for i in range(40)]
    links, go = reader.wire._links, threading.Event()
    receive = links.receive
    monkeypatch.setattr(links, "receive", lambda socket: go.wait(LIMIT_S) and receive(socket))
    for message in much:
        sender.wire.send(reader.wire.me, message)
    until(lambda: not sender.wire.has_room(reader.wire.me, 0))
    go.set()
    assert [reader.next()[1] for _ in much] == much
    assert sender.wire.has_room(reader.wire.me, 0)
    assert reader.wire.refusals.num_messages == 0


def test_long_messages_leave_a_part_of_the_grant_to_short_ones() -> None:
    out, unit = credit.Outgoing(answers=False, granted=credit.MAX_UNITS), credit.ASKED_UNIT_BYTES
    long, num = 100 * unit, 0
    while out.has_room(long):
        assert out.takes(bytes(long))
        num += 1
    assert num == pytest.approx((1 - credit.SHORT_PART) * credit.MAX_UNITS / 100, rel=0.05)
    for _ in range(100):
        assert out.has_room(unit)
        assert out.takes(bytes(unit))
    whole = credit.Outgoing(answers=False, granted=credit.MAX_UNITS)
    assert whole.has_room(credit.MAX_UNITS * unit), "the longest goes when all is granted"


def test_pongs_carry_the_stats_of_the_moment(pair: tuple[End, End]) -> None:
    worker, client = pair
    for running in (1, 2):
        worker.stats = WorkerStats(num_running=running)
        while True:
            peer, event = client.events.get(timeout=LIMIT_S)
            assert peer == "w/1"
            assert isinstance(event, Pong)
            if event.stats == worker.stats:
                break
    worker.nothing(0.2)  # pings are the wire's own business


@pytest.mark.parametrize("closes", ["worker", "client"])
def test_a_peer_that_closes_is_lost_once(pair: tuple[End, End], closes: str) -> None:
    worker, client = pair
    greet(client, worker)
    gone, left = pair if closes == "worker" else pair[::-1]
    gone.wire.close()
    left.lost(gone.wire.me)
    left.wire.send(gone.wire.me, MESSAGES[1])
    left.nothing(0.6)


def test_a_client_that_disconnects_is_lost_at_once_and_no_loss_is_logged(end: Make, caplog) -> None:
    slow = PingConfig(interval_s=60.0)
    worker, client = linked(end("w/1", slow), end("c/1", slow))
    for _ in range(2):
        greet(client, worker)
        client.wire.disconnect("w/1")
        client.wire.send("w/1", MESSAGES[1])
        worker.lost("c/1")
        client.wire.connect("w/1", worker.address, worker.wire.key)
    client.wire.disconnect("unknown/1")
    client.nothing(0.3)
    assert caplog.records == []


def test_a_send_to_a_vanished_client_loses_it_at_once(end: Make, monkeypatch) -> None:
    monkeypatch.setattr(_Links, "part", _Links.forget)  # it says nothing, as if it was killed
    slow = PingConfig(interval_s=5.0)
    worker, client = linked(end("w/1", slow), end("c/1", slow))
    greet(client, worker)
    client.wire.close()
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        worker.wire.send("c/1", MESSAGES[1])
        with suppress(queue.Empty):
            lost = worker.next(0.05)[1]
            assert isinstance(lost, Lost)
            assert not lost.is_silent
            return
    pytest.fail("no Lost although nobody is there")


def test_a_worker_whose_loop_stalls_is_lost_and_one_that_beats_is_not(end: Make) -> None:
    # A loaded machine kept one that beats silent for 0.5 s. The first must beat for longer than
    # it takes to lose one that stalls: 0.5 s and 1.5 s.
    patient = PingConfig(interval_s=0.05, max_misses=30)
    stalling = PingConfig(interval_s=0.05, max_misses=30, stall_s=0.5)
    for beats in (True, False):
        worker, client = linked(end(f"w{beats}/1", stalling), end(f"c{beats}/1", patient))
        limit = time.monotonic() + (2.4 if beats else LIMIT_S)
        lost = []
        while time.monotonic() < limit and not lost:
            if beats or not client.pongs:  # whom nobody has heard yet has longer
                worker.wire.beat()
            with suppress(queue.Empty):
                lost.append(client.next(0.05))
        assert [(peer, type(event)) for peer, event in lost] == [("wFalse/1", Lost)] * (not beats)
        assert all(event.is_silent for _, event in lost)


def test_a_client_whose_loop_stalls_is_lost_too(end: Make) -> None:
    """To the others a hung loop and a dead process are the same, whichever side connected."""
    worker = end("w/1")
    client = end("c/1", PingConfig(interval_s=0.05, max_misses=4, stall_s=0.3))
    linked(worker, client)
    greet(client, worker)
    worker.lost("c/1")


def test_nobody_at_the_address_is_lost_after_the_grace(end: Make, monkeypatch) -> None:
    monkeypatch.setattr("worker.wire.CONNECT_GRACE_S", 0.4)
    client = end("c/1")
    client.wire.start()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        began = time.monotonic()
        client.wire.connect("w/1", f"tcp://127.0.0.1:{unused.getsockname()[1]}", client.wire.key)
        client.lost("w/1")
    assert time.monotonic() - began >= 0.4


def test_another_incarnation_gets_no_message_and_is_not_mistaken_for_the_peer(
    end: Make, monkeypatch
) -> None:
    """worker.api promises it; a restarted worker may get the address of the old one."""
    monkeypatch.setattr("worker.wire.CONNECT_GRACE_S", 0.4)
    successor, client = linked(end("w/2"), end("c/1"), "w/1")
    client.wire.send("w/1", MESSAGES[0])
    client.lost("w/1")
    assert not client.pongs
    successor.nothing(0.5)


def test_a_client_that_comes_back_starts_afresh(end: Make) -> None:
    """What its former self had asked for is lost, even if nobody had noticed that it went."""
    worker = end("w/1")
    address = worker.wire.start("127.0.0.1")
    for turn in range(3):
        client = end("c/1")
        client.wire.start()
        worker.wire.admit({"c/1": client.wire.key})
        client.wire.connect("w/1", address, worker.wire.key)
        client.wire.send("w/1", Stop("r", 1, turn))
        if turn:
            assert isinstance(worker.next()[1], Lost)
        assert worker.next() == ("c/1", Stop("r", 1, turn))
        worker.wire.send("c/1", api.Abort("r", turn))
        assert client.next() == ("w/1", api.Abort("r", turn))
        client.wire.close()


@pytest.mark.parametrize("first", ["worker", "client"])
def test_a_link_that_one_side_lost_is_lost_to_both(pair: tuple[End, End], first: str) -> None:
    """However it came to that: no side goes on waiting for what the other has given up."""
    worker, client = pair
    greet(client, worker)
    loser, other = pair if first == "worker" else pair[::-1]
    loser.wire.lose(other.wire.me, "a test")
    loser.lost(other.wire.me)
    other.lost(loser.wire.me)
    client.wire.send("w/1", MESSAGES[2])
    worker.nothing(0.3)
    client.wire.connect("w/1", worker.address, worker.wire.key)
    client.wire.send("w/1", MESSAGES[3])
    assert worker.next() == ("c/1", MESSAGES[3])


def test_whoever_uses_a_link_that_is_over_is_told_so(end: Make) -> None:
    """As does a process that stood still when it was given up; silence is minutes here."""
    slow = PingConfig(interval_s=60)
    worker, client = linked(end("w/1", slow), end("c/1", slow))
    greet(client, worker)
    worker.wire.lose("c/1", "a test")
    worker.lost("c/1")
    client.wire.send("w/1", MESSAGES[2])
    client.lost("w/1")
    worker.nothing(0.2)


def test_frames_lost_by_a_broken_connection_lose_the_peer(end: Make) -> None:
    """ZeroMQ connects again by itself and says nothing about what was under way."""
    worker, client = end("w/1"), end("c/1")
    port = int(worker.wire.start("127.0.0.1").rpartition(":")[2])
    with Relay(port) as relay:
        client.wire.start()
        worker.wire.admit({"c/1": client.wire.key})
        client.wire.connect("w/1", f"tcp://127.0.0.1:{relay.port}", worker.wire.key)
        greet(client, worker)
        client.nothing(0.3)
        relay.swallowing = True
        long = api.Prefill(XFER, tuple(range(10_000)), 16)
        client.wire.send("w/1", long)
        relay.swallow(len(api.encode(long)))
        relay.cut()
        worker.lost("c/1")
        client.lost("w/1")


class Relay(socketserver.ThreadingTCPServer):
    """Passes TCP connections on to a port of this host, or swallows what comes over them."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.port = self.server_address[1]
        self.swallowing = False
        self._target, self._swallowed = port, list[int]()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.cut()
        self.server_close()  # which joins the threads of connections

    def finish_request(self, request: Any, client_address: object) -> None:
        """Both ways, in a thread of this connection and in another one."""
        with socket.create_connection(("127.0.0.1", self._target)) as far:
            self._sockets += [request, far]
            back = threading.Thread(target=self._pass, args=(far, request))
            back.start()
            self._pass(request, far)
            back.join()

    def swallow(self, num_bytes: int) -> None:
        """Wait until so much was swallowed, then pass on what follows."""
        until(lambda: sum(self._swallowed) >= num_bytes)
        self.swallowing = False

    def cut(self) -> None:
        """End the connections that stand; new ones are accepted."""
        while self._sockets:
            with suppress(OSError):
                self._sockets.pop().shutdown(socket.SHUT_RDWR)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if self.swallowing:
                    self._swallowed.append(len(piece))
                else:
                    sink.sendall(piece)
            sink.shutdown(socket.SHUT_RDWR)


def test_a_full_queue_loses_the_peer_and_does_not_block(end: Make) -> None:
    client = end("c/1", PingConfig(interval_s=5.0))
    client.wire.start()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client.wire.connect("w/1", f"tcp://127.0.0.1:{deaf.getsockname()[1]}", client.wire.key)
        began = time.monotonic()
        for i in range(SEND_QUEUE_FRAMES + 100):
            client.wire.send("w/1", Stop("r", 1, i))
        took_s = time.monotonic() - began
        assert "full" in client.lost("w/1").reason
        client.nothing(0.1)
    assert took_s < LIMIT_S


def test_close_sends_what_is_queued(pair: tuple[End, End]) -> None:
    worker, client = pair
    for i in range(200):
        client.wire.send("w/1", Stop("r", 1, i))
    client.wire.close()
    assert [worker.next()[1] for _ in range(200)] == [Stop("r", 1, i) for i in range(200)]


def test_close_leaks_no_thread_and_no_descriptor() -> None:
    def once() -> None:
        worker, client = linked(End("w/1"), End("c/1"))
        client.wire.connect("gone/1", "tcp://127.0.0.1:9", worker.wire.key)
        client.wire.send("w/1", MESSAGES[0])
        worker.next()
        for each in (client, worker):
            each.wire.close()
            each.wire.close()
            each.wire.send("w/1", MESSAGES[0])  # does nothing
            each.wire.disconnect("w/1")

    once()
    before = open_here()
    for _ in range(5):
        once()
    after = open_here()
    assert all(a <= b for a, b in zip(after, before, strict=True)), (before, after)


def open_here() -> tuple[int, int, int]:
    """Descriptors, threads of Python and all threads of this process, libzmq's included.

    What tests before this have left is collected first; its threads may end a little later.
    """
    gc.collect()
    fds, tasks = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return fds, threading.active_count(), tasks


def test_close_while_others_send_raises_nowhere() -> None:
    errors: list[BaseException] = []
    for _ in range(20):
        client = End("c/1")
        client.wire.start()

        def hammer(client: End = client) -> None:
            try:
                for _ in range(400):
                    client.wire.send("w/1", MESSAGES[2])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=hammer) for _ in range(3)]
        for thread in threads:
            thread.start()
        client.wire.close()
        for thread in threads:
            thread.join()
    assert not errors
