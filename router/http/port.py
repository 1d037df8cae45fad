"""The port of a router, which it may share with other routers of its node (SO_REUSEPORT)."""

import socket
from collections.abc import Iterator

BACKLOG = 4096  # what Linux allows unless it is told otherwise (net.core.somaxconn)


def listen(host: str, port: int, *, shared: bool = False, joins: bool = False) -> socket.socket:
    """A listening socket; the kernel divides connections evenly among all that share a port.

    The first router binds its port without SO_REUSEPORT, and shares it only then. So a port that is
    in use is refused, shared or not; of two clusters that start at once one is. Port 0 takes a free
    one. `shared`: others of this user may join; `joins`: they listen already. Raises an OSError if
    it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=joins)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return listener


def accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections that wait for a listener; the kernel resets those that do when it closes."""
    while True:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:  # whoever waited has left
            continue
        except OSError:  # none waits, or we have no descriptor left
            return
        connection.setblocking(False)
        yield connection
