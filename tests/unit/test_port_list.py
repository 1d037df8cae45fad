"""What listens, whose it is and what speaks there; and the page that says who may reach it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import zmq
from prometheus_client import CollectorRegistry
from torch.distributed import TCPStore

from cluster.diagnose import greet
from cluster.diagnose.doors import DOORS, Asks
from cluster.diagnose.greet import Answer, Speech
from cluster.diagnose.ports import RayHere, Walk, has_unknown, shown
from cluster.diagnose.sockets import families, host_of, listeners, owners
from tests.support.patience import HANG_S
from tests.support.security_page import PAGE, page
from worker.keyring import Keyring
from worker.observe.page import Page

LOCAL = "127.0.0.1"
SESSION = "session_of_test_ports"
LISTENS = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def listening(*words: str, host: str = LOCAL) -> Iterator[tuple[int, int]]:
    """A process with these words in its command line; its pid and port."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, host, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate("", HANG_S)


@pytest.mark.parametrize(
    ("digits", "host"),
    [
        ("0100007F", LOCAL),
        ("00000000", "0.0.0.0"),
        ("0" * 32, "::"),
        ("0" * 24 + "01000000", "::1"),
        ("0" * 16 + "FFFF00000100007F", LOCAL),
        ("B80D01200000000067452301EFCDAB89", "2001:db8::123:4567:89ab:cdef"),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="as such a machine's kernel writes them")
def test_addresses_are_read_as_the_kernel_writes_them(digits: str, host: str) -> None:
    assert host_of(digits) == host


@pytest.mark.parametrize("host", [LOCAL, "0.0.0.0"])
def test_a_port_is_found_with_its_owner(host: str) -> None:
    with listening("some-word", host=host) as (pid, port):
        family = families(lambda _, line: "some-word" in line)
        assert list(family) == [pid]
        (found,) = [each for each in listeners() if each.port == port]
        assert (found.host, owners(family)[found.inode]) == (host, pid)
        assert found.address == f"{host}:{port}"
        assert found.place == (LOCAL, port)
        assert pid in families(lambda pid, _: pid == os.getpid()), "a child belongs, too"


@pytest.mark.whole  # each greeting is given its time
def test_a_port_that_nobody_knows_is_unknown() -> None:
    with listening(f"--session-name={SESSION}") as (pid, port):
        walk = Walk([], RayHere(SESSION, "", {}), set())
        (found,) = walk.ports()
    assert (found.pid, found.address, found.asks) == (pid, f"{LOCAL}:{port}", "unknown")
    assert has_unknown([found])
    assert "1 unknown" in shown([found], 0, as_json=False)


def test_processes_of_other_clusters_are_not_listed() -> None:
    with listening("--session-name=of_another"):
        assert not Walk([], RayHere(SESSION, "", {}), set()).ports()


@pytest.mark.parametrize("speech", [Speech.CURVE, Speech.PLAIN])
def test_a_wire_says_whether_it_asks_for_keys(speech: Speech) -> None:
    with zmq.Context() as context:
        listener = context.socket(zmq.ROUTER)
        zap = Keyring().guard(context, listener) if speech is Speech.CURVE else None
        port = listener.bind_to_random_port(f"tcp://{LOCAL}")
        assert greet.overheard((LOCAL, port)) == Answer(speech)
        for each in filter(None, (listener, zap)):
            each.close(0)


def test_a_page_a_store_and_grpc_are_told_apart() -> None:
    page = Page(LOCAL, 0, CollectorRegistry(), lambda: "")
    store = TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    server = grpc.server(None)
    rpc = server.add_insecure_port(f"{LOCAL}:0")
    server.start()
    try:
        assert greet.http((LOCAL, page.port), "/live") == Answer(Speech.HTTP, 200)
        assert greet.store((LOCAL, store.port)) == Answer(Speech.STORE)
        assert greet.overheard((LOCAL, rpc)) == Answer(Speech.GRPC)
        assert greet.overheard((LOCAL, store.port)) is None
    finally:
        server.stop(None).wait()
        page.close()


def test_who_says_nothing_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greet, "PATIENCE_S", 0.1)
    monkeypatch.setattr(greet, "SILENT_S", 0.1)
    with socket.create_server((LOCAL, 0)) as silent:
        place = (LOCAL, silent.getsockname()[1])
        assert not any((greet.overheard(place), greet.mooncake(place), greet.store(place)))
        assert greet.http(place, "/") is None
        assert greet.connects(place)
    assert greet.overheard(place) is None, "nobody listens any more"
    assert not greet.connects(place)


def test_the_page_has_the_table_of_the_doctor() -> None:
    assert PAGE.read_text() == page(), "python -m tests.support.security_page"
    for door in DOORS.values():
        assert bool(door.when) == (door.asks is not Asks.NOTHING)
