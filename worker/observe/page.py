"""The page of a worker: /metrics and /live, with bounds on the resources of those who ask.

A few connections at a time: a new one closes the oldest. So half requests, however many and slow,
hold few threads and keep nobody out.
"""

import json
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

MAX_CONNECTIONS = 16
IDLE_S = 5.0  # between two reads or writes of a connection


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S  # socketserver sets it on the connection

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes come every few seconds."""


class _Server(ThreadingWSGIServer):
    """Closes its oldest connection where another one would be too many."""

    request_queue_size = 128  # beyond it a client waits seconds until it tries again

    def __init__(self, *args: Any, **named: Any) -> None:
        self._lock, self._open = Lock(), deque[socket.socket]()
        super().__init__(*args, **named)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: its connection was closed, by its client or because it was the oldest."""

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.append(request)
            oldest = self._open.popleft() if len(self._open) > MAX_CONNECTIONS else None
        if oldest is not None:
            self._cut(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def _cut(self, connection: socket.socket) -> None:
        """Its thread reads an end, and closes it."""
        with suppress(OSError):  # it has ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)


class Page:
    """Serves a registry in threads of its own until it is closed; raises an OSError if it cannot.

    stalled: why the worker is not live, "" if it is.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, stalled: Callable[[], str]
    ) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = type("_Server", (_Server,), {"address_family": family})
        app = with_live(make_wsgi_app(registry), stalled)
        self._server: WSGIServer = make_server(host, port, app, server, _Handler)
        self.port: int = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.socket.shutdown(socket.SHUT_RDWR)  # or its thread looks up in half a second
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def with_live(metrics: "WSGIApplication", stalled: Callable[[], str]) -> "WSGIApplication":
    """`metrics`, and GET /live: 200 while `stalled` says "", else 503 with its text."""

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/live":
            return metrics(environ, start_response)
        reason = stalled()
        body = {"status": "not live", "reason": reason} if reason else {"status": "live"}
        status = "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return app
