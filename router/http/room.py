"""Requests for which there is no room are refused by their heads."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.errors import ApiError
from router.http.access import with_key
from router.http.allowance import Keys
from router.http.connection import LimitedProtocol
from router.http.exchange import GENERATING, REQUEST_ID, SERVER_TIMING, Exchange
from router.show.front import Front

PATHS = {path.encode(): path for path in GENERATING}


class Room:
    """Refuses requests for which there is no room before anything of them is read.

    The router's room, and that of the client's key.
    """

    def __init__(self, app: ASGIApp, front: Front, keys: Keys | None) -> None:
        self._app, self._front, self._keys = app, front, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] in GENERATING:
            try:
                client = Exchange.of(scope).client
                self._front.dispatcher.check_room(1, client)
                if self._keys is not None:
                    self._keys.check(client)
            except ApiError as error:
                self._front.metrics.requests(error.code).inc()
                Exchange.of(scope).failure = error.code
                await error.response_to(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Gate:
    """The router's room without ASGI, at a third of the cost, for nearly all of them.

    What needs more than a head and the same bytes each time is left to `Room`: a page of another
    origin, a key that is not valid, a line in the log, a trace.
    """

    def __init__(self, front: Front, keys: Keys | None, *, is_logged: bool) -> None:
        """is_logged: each request has its line in the access log."""
        self._check_room, self._keys = front.dispatcher.check_room, keys
        self._is_idle = is_logged or front.tracer is not None
        self._count = front.metrics.requests("busy").inc
        self._answers: dict[bytes, bytes] = {}  # by path

    def refuses(self, connection: LimitedProtocol) -> bool:
        """Whether a request is answered now, whose head is here."""
        method, url = connection.parser.get_method(), connection.url
        if self._is_idle or method != b"POST" or url not in PATHS:
            return False
        try:
            self._check_room(1)
        except ApiError as error:
            given = dict(connection.headers)
            if b"origin" in given or (self._keys is not None and not with_key(given, self._keys)):
                return False
            self._count()
            rest = self._answers.get(url) or self._answer(url, error)
            name = Exchange.begin(given.get(REQUEST_ID, b"")).request_id.encode()
            lines = _lines(connection.server_state.default_headers)
            head = b"%b%b%b: %b\r\n" % (STATUS_LINE[error.status], lines, REQUEST_ID, name)
            connection.transport.write(head + rest)
            if not connection.parser.should_keep_alive() or b"connection: close" in lines:
                connection.transport.close()
            return True
        return False

    def _answer(self, url: bytes, error: ApiError) -> bytes:
        response = error.response_to(PATHS[url])
        headers = [(SERVER_TIMING, b"total;dur=0.0"), *response.raw_headers]
        self._answers[url] = made = b"%b\r\n%b" % (_lines(headers), response.body)
        return made


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)
