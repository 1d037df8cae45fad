"""Who may read KV over sockets, and by which way memory comes to them."""

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.patience import HANG_S, until
from worker.cache.layout import MemoryRegion
from worker.errors import Unreachable
from worker.peers.deaf import deafen
from worker.peers.rendezvous import free_rendezvous
from worker.transfer import doors
from worker.transfer.base import Endpoint, Run, describe
from worker.transfer.doors import (
    COUNT,
    GREETING,
    MAC_BYTES,
    MAX_PIECES,
    MAX_STRANGERS,
    NONCE_BYTES,
    PIECE,
    KVDoor,
    proof,
    received,
)
from worker.transfer.memory import PORTION_BYTES, DirectLane, Lane, Piece, StagedLane
from worker.transfer.mooncake_gate import ASK, TOLD, Gate
from worker.transfer.sockets import dial, portions

SECRET, HOST = b"s" * 32, "127.0.0.1"
NUM_BYTES = 6 << 20


@pytest.fixture
def memory() -> ctypes.Array:
    return (ctypes.c_uint8 * NUM_BYTES).from_buffer(bytearray(os.urandom(NUM_BYTES)))


def region_of(memory: ctypes.Array) -> MemoryRegion:
    return MemoryRegion("target", ctypes.addressof(memory), len(memory), 0)


@pytest.fixture
def endpoint(memory: ctypes.Array) -> Iterator[Endpoint]:
    regions = [region_of(memory)]
    door = KVDoor(HOST, SECRET, regions)
    yield describe("sockets", "tcp", f"{HOST}:{door.port}", regions, SECRET)
    door.close()


def dialed(endpoint: Endpoint, seconds: float = HANG_S) -> socket.socket:
    return dial(endpoint.name, endpoint.secret, time.monotonic() + seconds)


def strangers(endpoint: Endpoint) -> socket.socket:
    port = int(endpoint.name.rpartition(":")[2])
    return socket.create_connection((HOST, port), timeout=HANG_S)


def greeted(connection: socket.socket) -> bytes:
    """Its challenge."""
    return received(connection, len(GREETING) + 16).removeprefix(GREETING)


def is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_stranger_gets_nothing(endpoint: Endpoint, memory: ctypes.Array) -> None:
    for secret in (b"", b"x" * 32):
        with strangers(endpoint) as connection:
            nonces = greeted(connection) + b"n" * 16
            connection.sendall(b"n" * 16 + proof(secret, b"reads", nonces))
            connection.sendall(COUNT.pack(1) + PIECE.pack(0, 0, 64))
            assert is_over(connection)
    with dialed(endpoint) as member:
        member.sendall(COUNT.pack(1) + PIECE.pack(0, 5, 64))
        assert received(member, 64) == bytes(memory[5:69])


def test_an_endpoint_does_not_show_its_secret(endpoint: Endpoint) -> None:
    assert repr(SECRET)[2:-1] not in repr(endpoint)


def test_one_side_s_proof_is_not_the_other_s(endpoint: Endpoint) -> None:
    """So nobody gets in by what another connection has shown."""
    nonces = b"n" * 32
    assert proof(SECRET, b"reads", nonces) != proof(SECRET, b"serves", nonces)


def test_who_does_not_know_the_secret_serves_nobody(endpoint: Endpoint) -> None:
    with socket.create_server((HOST, 0)) as impostor:
        port = impostor.getsockname()[1]
        other = describe("sockets", "tcp", f"{HOST}:{port}", endpoint.regions, SECRET)

        def serve() -> None:
            connection = impostor.accept()[0]
            with connection:
                connection.sendall(GREETING + b"c" * 16)
                received(connection, 48)
                connection.sendall(b"m" * 32)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Unreachable, match="another process answers there"):
            dialed(other)
        thread.join()


def test_a_slow_stranger_is_cut_in_time(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one who sends a byte now and then."""
    monkeypatch.setattr(doors, "GREETING_S", 0.2)
    with strangers(endpoint) as connection:
        greeted(connection)
        connection.settimeout(0.05)
        for _ in range(NONCE_BYTES + MAC_BYTES - 1):
            with contextlib.suppress(TimeoutError):
                connection.sendall(b"n")
                assert is_over(connection)
                break
        else:
            pytest.fail("it was listened to for as long as it sent")


@pytest.mark.parametrize(
    "asked",
    [
        COUNT.pack(0),
        COUNT.pack(MAX_PIECES + 1),
        COUNT.pack(1) + PIECE.pack(1, 0, 1),
        COUNT.pack(1) + PIECE.pack(0, 0, 0),
        COUNT.pack(1) + PIECE.pack(0, NUM_BYTES - 1, 2),
        COUNT.pack(1) + PIECE.pack(0, 2**64 - 1, 2),
        COUNT.pack(2) + 2 * PIECE.pack(0, 0, PORTION_BYTES),
    ],
    ids=["none", "many", "region", "empty", "end", "wraps", "large"],
)
def test_what_is_not_there_ends_the_connection(asked: bytes, endpoint: Endpoint) -> None:
    with dialed(endpoint) as member:
        member.sendall(asked)
        assert is_over(member)


def test_strangers_who_say_nothing_keep_nobody_out(endpoint: Endpoint) -> None:
    silent = [strangers(endpoint) for _ in range(3 * MAX_STRANGERS)]
    with dialed(endpoint) as member:
        member.sendall(COUNT.pack(1) + PIECE.pack(0, 0, 1))
        received(member, 1)
    greeted(silent[0])
    assert is_over(silent[0]), "the oldest"
    for each in silent:
        each.close()


def test_one_address_cannot_hold_all_connections(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "MAX_OF_ADDRESS", 4)
    held = [dialed(endpoint) for _ in range(4)]
    with strangers(endpoint) as refused:
        assert is_over(refused)
    port = int(endpoint.name.rpartition(":")[2])
    with socket.create_connection((HOST, port), HANG_S, ("127.0.0.2", 0)) as other:
        assert greeted(other)
    for each in held:
        each.close()

    def is_open() -> bool:  # what was held is given back
        with strangers(endpoint) as again:
            return not is_over(again)

    until(is_open)


@pytest.mark.parametrize("staged", [False, True])
def test_both_ways_move_the_same_bytes(staged: bool, memory: ctypes.Array) -> None:
    other = (ctypes.c_uint8 * NUM_BYTES)()
    regions = [[region_of(each)] for each in (memory, other)]
    lanes: list[Lane] = [DirectLane(each) for each in regions]
    if staged:
        lanes = [StagedLane(each, torch.device("cpu")) for each in regions]
    there = [Piece(0, 100, 50), Piece(0, 3 << 20, 1 << 20)]
    here = [Piece(0, 7, 50), Piece(0, 1 << 20, 1 << 20)]
    data = b"".join(lanes[0].outgoing(there))
    held = bytes(memory)
    assert data == held[100:150] + held[3 << 20 : 4 << 20]
    at = 0
    for buffer in lanes[1].incoming(here):
        buffer[:] = data[at : at + len(buffer)]
        at += len(buffer)
    lanes[1].landed(here)
    found = bytes(other)
    assert found[7:57] + found[1 << 20 : 2 << 20] == data
    assert found.count(0) - data.count(0) == NUM_BYTES - len(data)


def test_batches_hold_every_byte_once() -> None:
    runs = [Run(0, 0, 9, 3 * PORTION_BYTES + 1), *(Run(1, i, 2 * i, 1) for i in range(1000))]
    made = list(portions(runs))
    assert all(len(each.here) <= MAX_PIECES for each in made)
    assert all(sum(p.num_bytes for p in each.there) <= PORTION_BYTES for each in made)
    moved = [(a, b) for each in made for a, b in zip(each.here, each.there, strict=True)]
    assert [a.num_bytes for a, _ in moved] == [b.num_bytes for _, b in moved]
    assert sum(a.num_bytes for a, _ in moved) == 3 * PORTION_BYTES + 1 + 1000
    assert all(a.region == b.region for a, b in moved)
    assert {b.offset - a.offset for a, b in moved if a.region == 0} == {9}


@pytest.mark.parametrize(("host", "to"), [("0.0.0.0", HOST), ("::", HOST), ("::", "::1")])
def test_a_deaf_listener_hears_whom_it_is_to_hear(host: str, to: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(
        (host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6
    ) as listener:
        port = listener.getsockname()[1]

        def hears(come_from: int = 0) -> bool:
            try:
                with socket.create_connection((to, port), 0.3, (to, come_from)) as connection:
                    connection.sendall(b"!")
                    with listener.accept()[0] as heard:
                        deafen(listener.fileno())  # what stands goes on
                        return heard.recv(1) == b"!"
            except TimeoutError:
                return False

        free = int(free_rendezvous("127.0.0.1").rpartition(":")[2])
        for but, come_from, is_heard in (
            ([], 0, False),
            ([(to, free)], free, True),
            ([(to, free)], 0, False),
            ([("10.1.2.3", free), ("fe80::1", free)], free, False),
            ([("10.1.2.3", 0), (to, 0), ("fe80::1", 5)], 0, True),
            ([(to, n) for n in range(1, 9999)], 0, False),
        ):
            deafen(listener.fileno(), but)
            assert hears(come_from) == is_heard, (but[:3], come_from)


def test_a_gate_lets_in_whom_a_member_announces_for_as_long_as_it_does() -> None:
    with socket.create_server(("0.0.0.0", 0)) as engine, socket.socket() as member:
        deafen(engine.fileno())
        gate = Gate(HOST, SECRET, [engine.fileno()])
        known = describe("mooncake", "tcp", f"{HOST}:{gate.port}", (), SECRET)
        here = HOST, engine.getsockname()[1]
        member.bind((HOST, 0))
        with dialed(known) as said:
            said.sendall(ASK.pack(here[1], member.getsockname()[1]))
            assert TOLD.unpack(received(said, TOLD.size)) == (here[1], 0)
            member.connect(here)
            with pytest.raises(TimeoutError):
                socket.create_connection(here, 0.3)
        until(lambda: not gate._heard)
        with engine.accept()[0] as heard:
            member.sendall(b"hello")
            assert received(heard, 5) == b"hello"
        with socket.socket() as late:
            late.settimeout(0.3)
            late.bind((HOST, 0))
            with dialed(known) as said:
                said.sendall(ASK.pack(1, late.getsockname()[1]))  # no listener of the engine's
                assert received(said, TOLD.size)
                with pytest.raises(TimeoutError):
                    late.connect(here)
        gate.close()
