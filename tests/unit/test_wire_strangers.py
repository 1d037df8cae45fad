"""What a stranger can do to a wire with pyzmq, or with the bytes of ZMTP: next to nothing."""

import contextlib
import logging
import queue
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
import zmq

from tests.unit.test_wire import FAST, LIMIT_S, End, linked
from worker.api import Ack, Generate, Ping, Sampling, Stop, encode
from worker.config import credit
from worker.keyring import HANDSHAKE_MS, Keyring, pack
from worker.observe.metrics import WorkerMetrics, watch_wire
from worker.wire import MAX_TURN_FRAMES, _Links

ASKED = Generate("r", 1, (1, 2, 3), 3, Sampling(5), 10.0)


class Stranger:
    """A socket of pyzmq that says whatever it likes. own: its keys; plain: it has none."""

    def __init__(
        self, worker: End, own: Keyring | None = None, *, name: str = "", plain: bool = False
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 300)
        if name:
            self._socket.setsockopt(zmq.ROUTING_ID, name.encode())
        if not plain:
            (own or Keyring()).show_key(self._socket, worker.wire.key)
        self._socket.connect(worker.address)

    def say(self, sender: str, *messages: Any, link: int = 1, number: int = 1) -> None:
        for i, message in enumerate(messages):
            with contextlib.suppress(zmq.Again):  # who was refused already has nobody to say it to
                self._socket.send(pack(sender, "w/1", (link, number + i), encode(message)))

    def hears(self) -> bool:
        return bool(self._socket.poll(300))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def worker() -> Iterator[End]:
    """It listens, and nobody is a member yet."""
    worker = End("w/1")
    worker.address = worker.wire.start("127.0.0.1")
    yield worker
    worker.wire.close()


@pytest.fixture
def client() -> Iterator[End]:
    client = End("c/1")
    client.wire.start()
    yield client
    client.wire.close()


def admit(worker: End, *clients: End) -> None:
    worker.wire.admit({each.wire.me: each.wire.key for each in clients})


def greet(client: End, worker: End) -> None:
    admit(worker, client)
    client.wire.connect("w/1", worker.address, worker.wire.key)
    check_heard(client, worker)


def check_heard(client: End, worker: End) -> None:
    client.wire.send("w/1", Ack("r", 1))
    assert worker.next() == (client.wire.me, Ack("r", 1))


@pytest.mark.parametrize("plain", [True, False], ids=["without keys", "with keys of its own"])
@pytest.mark.parametrize("name", ["s/1", "c/1"], ids=["its own name", "a router's"])
def test_a_stranger_is_neither_heard_nor_answered_and_ends_nothing(
    worker: End, client: End, name: str, plain: bool
) -> None:
    greet(client, worker)
    stranger = Stranger(worker, name=name, plain=plain)
    stranger.say(name, Ping(name), ASKED, link=time.monotonic_ns() + 10**15)
    worker.wire.send("c/1", Stop("r", 1, 7))
    assert client.next() == ("w/1", Stop("r", 1, 7))
    assert not stranger.hears()
    stranger.close()
    check_heard(client, worker)


def test_a_member_speaks_in_its_own_name_only(worker: End, client: End) -> None:
    other = Keyring()
    greet(client, worker)
    worker.wire.admit({"c/1": client.wire.key, "d/1": other.key})
    rogue = Stranger(worker, other, name="c/1")
    rogue.say("c/1", Ping("c/1"), ASKED, link=time.monotonic_ns() + 10**15)
    rogue.say("d/1", Ping("d/1"), ASKED)
    assert worker.next() == ("d/1", ASKED)
    check_heard(client, worker)
    worker.wire.send("c/1", Stop("r", 1, 7))
    assert client.next() == ("w/1", Stop("r", 1, 7))
    rogue.close()


def test_a_key_ends_with_its_incarnation_and_no_loss_is_logged(
    worker: End, client: End, caplog: pytest.LogCaptureFixture
) -> None:
    """A drained router leaves the members before its Bye is read, on a busy machine."""
    greet(client, worker)
    worker.wire.admit({"c/2": Keyring().key})
    worker.lost("c/1")
    assert caplog.records == []
    client.wire.send("w/1", ASKED)
    worker.nothing(0.3)


def test_who_connects_before_it_is_announced_is_heard_once_it_is(worker: End, client: End) -> None:
    client.wire.connect("w/1", worker.address, worker.wire.key)
    client.wire.send("w/1", Ack("r", 1))
    worker.nothing(0.3)
    admit(worker, client)
    assert worker.next(HANDSHAKE_MS / 2000) == ("c/1", Ack("r", 1)), "it needed another try"


def test_nobody_but_the_owner_of_the_key_gets_a_frame(
    worker: End, client: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.wire.CONNECT_GRACE_S", 0.5)
    admit(worker, client)
    client.wire.connect("w/1", worker.address, Keyring().key)
    client.wire.send("w/1", ASKED)
    client.lost("w/1")
    worker.nothing(0.2)


def test_a_huge_link_number_locks_nobody_out() -> None:
    """Even where anybody may say it."""
    worker, client = linked(End("w/1", plain=True), End("c/1", plain=True))
    check_heard(client, worker)
    forger = Stranger(worker, plain=True)
    forger.say("c/1", Ping("c/1"), link=10**30)
    worker.lost("c/1")  # a link of its own that it never had
    client.lost("w/1")
    worker.lost("c/1")  # the forged one, which is silent
    client.wire.connect("w/1", worker.address)
    check_heard(client, worker)
    for each in (forger, client.wire, worker.wire):
        each.close()


def test_what_is_left_of_a_link_that_is_over_begins_no_link() -> None:
    worker = End("w/1", plain=True)
    worker.address = worker.wire.start("127.0.0.1")
    stranger = Stranger(worker, plain=True)
    for number in range(2, 50):
        stranger.say(f"c/{number}", ASKED, number=number)
    worker.nothing(0.3)
    assert not worker.wire._links.peers
    stranger.close()
    worker.wire.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01%s" + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
LONG, LONG_COMMAND = b"\x02", b"\x06"  # flags of a frame with a size of eight bytes


@pytest.mark.parametrize("plain", [False, True], ids=["curve", "none"])
def test_a_frame_that_is_too_large_is_refused_by_its_head(plain: bool) -> None:
    worker = End("w/1", plain=plain)
    port = int(worker.wire.start("127.0.0.1").rpartition(":")[2])
    mechanism, before = (b"NULL", READY + LONG) if plain else (b"CURVE", LONG_COMMAND)
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as raw:
        raw.sendall(GREETING % mechanism.ljust(20, b"\0"))
        raw.sendall(before + (8 << 30).to_bytes(8, "big"))
        while raw.recv(1 << 16):  # until it is closed
            pass
    worker.wire.close()


class Flood:
    """A socket that always has another frame of a peer."""

    def __init__(self, peer: str = "s/1") -> None:
        self.peer, self.link, self.num_taken = peer, 1, 0

    def recv_multipart(self, *_: Any, **__: Any) -> list[zmq.Frame]:
        self.num_taken += 1
        frame = pack(self.peer, "w/1", (self.link, self.num_taken), encode(Ack("r", 1)))
        return [zmq.Frame(b"route"), zmq.Frame(frame)]

    def heard(self, links: _Links) -> Counter[str]:
        """What comes of one turn: how many events of each kind."""
        links._listener = cast("Any", self)
        links.receive(cast("Any", self))
        links._listener = None
        return Counter(type(event).__name__ for _, event in links.take_events())


def test_a_flood_gives_others_their_turn() -> None:
    links, flood = _Links("w/1", FAST, lambda: None, None), Flood()
    flood.heard(links)
    assert flood.num_taken == MAX_TURN_FRAMES
    links.close()


def test_a_peer_that_floods_is_unheard_until_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over new links, too. Others are heard, and the log has few lines of it."""
    for name, value in (("UNITS_PER_S", 0), ("MAX_UNITS", 1000), ("LINK_UNITS", 500)):
        monkeypatch.setattr(credit, name, value)
    links, flood = _Links("w/1", FAST, lambda: None, None), Flood()
    found: Counter[str] = sum((flood.heard(links) for _ in range(4)), Counter())
    assert (found["Lost"], 490 < found["Ack"] < 500) == (1, True)  # bytes count, too
    for flood.link in (2, 3):
        flood.num_taken = 0
        assert not flood.heard(links)
    assert Flood("c/1").heard(links) == Counter(Ack=MAX_TURN_FRAMES)
    assert links.refusals.num_messages == 6 * MAX_TURN_FRAMES - found["Ack"]
    told = [each.getMessage() for each in caplog.records if "has to say" in each.getMessage()]
    assert [each.partition("say")[2] for each in told] == [
        "",
        *(f" ({n} times)" for n in (10, 100, 1000)),
    ]
    monkeypatch.setattr(credit, "UNITS_PER_S", 1 << 40)
    flood.link, flood.num_taken = 4, 0
    assert flood.heard(links) == Counter(Ack=MAX_TURN_FRAMES)
    links.close()


def test_refused_connections_and_strange_frames_are_counted(
    worker: End, client: End, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.keyring.HANDSHAKE_MS", 0)
    own = Keyring()
    caplog.set_level(logging.INFO, "kvlane.wire")
    worker.wire.admit({"c/1": client.wire.key, "d/1": own.key})
    rogue, stranger = Stranger(worker, own), Stranger(worker)
    rogue.say("c/1", *[ASKED] * 20)
    limit = time.monotonic() + LIMIT_S
    told = "dropped 20 frames", "with no member's key, from 127.0.0.1"
    while not all(word in caplog.text for word in told):
        assert time.monotonic() < limit
        with pytest.raises(queue.Empty):
            worker.next(0.05)
    page = WorkerMetrics(model="m", role="decode", worker="w")
    watch_wire(page.wire_refused, worker.wire.refusals)
    counts = {
        sample.labels["what"]: sample.value
        for family in page.registry.collect()
        for sample in family.samples
        if sample.name == "kvlane_wire_refused_total"
    }
    assert counts["frame"] == 20
    assert counts["connection"] >= 1
    rogue.close()
    stranger.close()
