"""Where the ranks of a worker meet, and by which address. Free of torch."""

import socket
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"


def free_rendezvous(host: str) -> str:
    """A rendezvous, "tcp://host:port" of a port of this machine that was free a moment ago.

    Call it on the machine of rank 0, which listens there: `host` is its address. Another process
    may take the port before rank 0 does, which fails then: the worker starts again with another.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"


def own_address(rendezvous: str) -> str:
    """Address of this machine on the way to a rendezvous; nothing is sent.

    A hostname, which libraries would look up, may mean the loopback, or a network that the other
    ranks are not in. A file as the rendezvous means the loopback.
    """
    parts = urlsplit(rendezvous)
    if parts.scheme != "tcp" or not parts.hostname:
        return LOOPBACK
    port = parts.port or 1
    family, _, _, _, remote = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(remote)
        return str(probe.getsockname()[0])
