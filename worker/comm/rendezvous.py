"""Where the ranks of a worker meet. Free of torch."""

from __future__ import annotations

import socket


def free_rendezvous(host: str) -> str:
    """A rendezvous, "tcp://host:port" of a port of this machine that was free a moment ago.

    Call it on the machine of rank 0, which listens there. Another process may take the port before
    rank 0 does: then rank 0 fails to bind it, and the worker starts again with another one.

    Args:
        host: address of this machine, by which the other ranks reach it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.bind((host, 0))
        port = found.getsockname()[1]
    return f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"
