"""The router's door: whether a request may begin.

    head ─▶ refuses ─▶ enter ─▶ body, prepared ─▶ begin ─▶ dispatched ─▶ end ─▶ leave
              │ 429      │ 429, 503    │ 429        │ 429
            full         its key is    bodies are   its choices are too many
                         at a limit    too much

A request is asked twice: by its head, before a task, a scope or a body is made of it, and when its
choices are known. What has begun only waits for its turn; then the queue asks for time, not for a
place.
"""

from collections import Counter

from router.dispatch.queue import counted
from router.errors import ApiError
from router.http.allowance import Keys
from router.http.arrivals import Arrivals
from router.http.connection import LimitedProtocol
from router.http.exchange import REQUEST_ID, SERVER_TIMING, Exchange
from router.http.raw import CLOSE, answer, rest_of
from router.http.source import Sources
from router.http.table import GENERATING
from router.openai.body import Prepared
from router.show.front import Front

PATHS = {path.encode(): path for path in GENERATING}
AT_ONCE = (SERVER_TIMING, b"total;dur=0.0")
BACKGROUND_PART = 64  # of `router.max_inflight`: responses in the background, of one client


class Admission:
    """Owns the limits of a router and of its API keys. Loop thread only.

    keys: None: nobody needs one.
    """

    def __init__(self, front: Front, keys: Keys | None = None) -> None:
        self.keys = keys
        self._front, self._dispatcher = front, front.dispatcher
        config = front.served.config
        self._max_choices = config.max_inflight
        self.sources, self._arrivals = Sources(config), Arrivals(config)
        self._background = Counter[str]()  # by source
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
            is_known = self.keys is None or not self.sources.by_key  # without looking at its key
            peer = connection.client
            source = self.sources.of(peer, connection.headers) if is_known else ""
            self._check_places(1, source)
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

    def enter(self, exchange: Exchange, *, generates: bool) -> None:
        """Raise an ApiError, 429 or 503, if this request may not come, by its head; else count it
        until it leaves.
        """
        self._check_places(1, exchange.source)
        if generates and self._front.draining:
            raise ApiError("draining", "the router is draining")
        if self.keys is not None:
            self.keys.enter(exchange.client)
        exchange.arrival = self._arrivals.begin(exchange.source)

    def leave(self, exchange: Exchange) -> None:
        """The HTTP request that has entered is over."""
        if exchange.arrival is not None:
            exchange.arrival.over()
            if self.keys is not None:
                self.keys.opens(exchange.client, -1)

    def told(self, exchange: Exchange) -> None:
        """A request for which nothing is generated begins; raises an ApiError, 429."""
        if self.keys is not None:
            self.keys.begin(exchange.client, 0)

    def begin(self, exchange: Exchange, prepared: Prepared) -> None:
        """A request with these choices begins; raises an ApiError, 429, if they are too many."""
        source = exchange.source
        if exchange.arrival is not None:
            exchange.arrival.over()
        self._check_places(len(prepared.reqs), source)
        most = max(1, self._max_choices // BACKGROUND_PART)
        if prepared.is_background and self._background[source] >= most:
            message = f"a client may have {most} responses in the background at a time"
            raise ApiError("busy", f"{message} (router.max_inflight / 64)", retry_after_s=5)
        if self.keys is not None:
            computed = [len(req.prompt) for req in prepared.reqs if req.computes_prompt]
            self.keys.begin(exchange.client, sum(computed))
        self._goes_on(exchange, prepared, 1)
        self._front.num_open += 1

    def end(self, exchange: Exchange, prepared: Prepared) -> None:
        """A request that has begun has ended."""
        self._front.closed()
        self._goes_on(exchange, prepared, -1)
        if self.keys is not None:
            self.keys.end(exchange.client, counted(prepared.reqs)[1])

    def _goes_on(self, exchange: Exchange, prepared: Prepared, change: int) -> None:
        """One in the background is there beside its HTTP request, and after it."""
        if prepared.is_background:
            self._background += Counter({exchange.source: change})  # keeps what is above 0
            if self.keys is not None:
                self.keys.opens(exchange.client, change)

    def _check_places(self, num_choices: int, source: str) -> None:
        """Raise an ApiError, 429, if so many more choices would exceed `router.max_inflight`."""
        # No source gets all of it: the last eighth is for those that have less than a sixteenth.
        most, dispatcher, arrivals = self._max_choices, self._dispatcher, self._arrivals
        num = dispatcher.num_choices + arrivals.num + num_choices
        if num <= most - most // 8:
            return
        own = dispatcher.num_of(source) + arrivals.num_of(source) + num_choices
        if num > most or (source and own > max(1, most // 16)):
            raise ApiError("busy", "this router is at its limit of requests")
