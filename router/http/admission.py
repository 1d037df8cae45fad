"""The router's door: whether a request may begin.

    head ─▶ refuses ─▶ check ─▶ body, prepared ─▶ begin ─▶ dispatched ─▶ end
              │ 429      │ 429, 503                 │ 429
    full, and no key     its key is at a limit      its choices are too many

A request is asked twice: by its head, before a task, a scope or a body is made of it, and when its
choices are known. What has begun only waits for its turn; then the queue asks for time, not for a
place.
"""

from collections.abc import Sequence

from router.dispatch.queue import Req, counted
from router.errors import ApiError
from router.http.allowance import Keys
from router.http.connection import LimitedProtocol
from router.http.exchange import REQUEST_ID, SERVER_TIMING, Exchange
from router.http.raw import CLOSE, answer, rest_of
from router.http.table import GENERATING
from router.show.front import Front

PATHS = {path.encode(): path for path in GENERATING}
AT_ONCE = (SERVER_TIMING, b"total;dur=0.0")


class Admission:
    """Owns the limits of a router and of its API keys. Loop thread only.

    keys: None: nobody needs one.
    """

    def __init__(self, front: Front, keys: Keys | None = None) -> None:
        self.keys = keys
        self._front, self._dispatcher = front, front.dispatcher
        config = front.served.config
        self._max_choices = config.max_inflight
        # A line in the log or a trace needs more than a head: `check` refuses then.
        self._is_first = not config.access_log and front.tracer is None
        self._count = front.metrics.requests("busy").inc
        self._rests: dict[bytes, bytes] = {}  # of answers, by path

    def refuses(self, connection: LimitedProtocol) -> bool:
        """Whether a full router has answered a request now, whose head is here, without ASGI.

        That takes a third of what `check` costs, which gets those whose answers have other bytes:
        pages of other origins, and keys that are not valid.
        """
        method, url = connection.parser.get_method(), connection.url
        if not self._is_first or method != b"POST" or url not in PATHS:
            return False
        try:
            self._check_places(1, "")
        except ApiError as error:
            given = dict(connection.headers)
            if b"origin" in given or not (self.keys is None or self.keys.admits(given)):
                return False
            self._count()
            if url not in self._rests:
                self._rests[url] = rest_of(error.response_to(PATHS[url]), [AT_ONCE])
            name = Exchange.begin(given.get(REQUEST_ID, b"")).request_id.encode()
            headers = [*connection.server_state.default_headers, (REQUEST_ID, name)]
            connection.transport.write(answer(error.status, headers, self._rests[url]))
            if CLOSE in headers or not connection.parser.should_keep_alive():
                connection.transport.close()
            return True
        return False

    def check(self, client: str) -> None:
        """Raise an ApiError, 429 or 503, if no request of this client may come, by its head."""
        self._check_places(1, client)
        if self.keys is not None:
            self.keys.check(client)
        if self._front.draining:
            raise ApiError("draining", "the router is draining")

    def begin(self, client: str, reqs: Sequence[Req]) -> None:
        """A request with these choices begins; raises an ApiError, 429, if they are too many."""
        self._check_places(len(reqs), client)
        if self.keys is not None:
            self.keys.begin(client, counted(reqs)[0])
        self._front.num_open += 1

    def end(self, client: str, reqs: Sequence[Req]) -> None:
        """A request that has begun has ended."""
        self._front.closed()
        if self.keys is not None:
            self.keys.end(client, counted(reqs)[1])

    def _check_places(self, num_choices: int, client: str) -> None:
        """Raise an ApiError, 429, if so many more choices would exceed `router.max_inflight`."""
        # No API key gets all of it: the last eighth is for those that have less than a sixteenth.
        most, dispatcher = self._max_choices, self._dispatcher
        if client and dispatcher.num_of(client) + num_choices > max(1, most // 16):
            most -= most // 8
        if dispatcher.num_choices + num_choices > most:
            raise ApiError("busy", "this router is at its limit of requests")
