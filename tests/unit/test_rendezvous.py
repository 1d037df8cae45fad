"""Where ranks meet: a port that can be bound, an address that others reach."""

import socket

import pytest

from worker.peers.rendezvous import free_rendezvous, own_address


def test_a_free_rendezvous_can_be_bound() -> None:
    scheme, _, port = free_rendezvous("127.0.0.1").rpartition(":")
    assert scheme == "tcp://127.0.0.1"
    socket.create_server(("127.0.0.1", int(port))).close()


def test_two_of_them_differ() -> None:
    assert len({free_rendezvous("127.0.0.1") for _ in range(8)}) > 1


def test_a_host_that_is_not_this_machine_has_none() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_rendezvous("192.0.2.1")


@pytest.mark.parametrize(
    "rendezvous", ["tcp://127.0.0.1:5000", "tcp://localhost:5000", "file:///x"]
)
def test_the_address_of_this_machine_is_that_on_the_way_there(rendezvous: str) -> None:
    assert own_address(rendezvous) in ("127.0.0.1", "::1")
