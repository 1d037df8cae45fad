"""Who may ask: API keys for generation, tokens and operators' pages; CORS for other origins."""

import ipaddress
import logging
import math
import time
from collections.abc import Container, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import RouterConfig
from router.errors import ApiError
from router.http.admission import Admission
from router.http.allowance import TOLD_S, Keys
from router.http.exchange import Exchange
from router.http.starts import Starts
from router.http.table import ADMITTED, GENERATING, Guard, guard_of
from router.show.front import Front

log = logging.getLogger("kvlane.router")

BASIC_REALM = 'Basic realm="kvlane"'
MAX_TOLD = 1024  # addresses
SIBLING = "x-kvlane-sibling"  # header of routers that ask one another
EXPOSED = (
    "X-Request-Id", "Server-Timing", "Retry-After", "X-Should-Retry", "Idempotent-Replayed",
    "X-Kvlane-Unknown-Fields",
)  # fmt: skip


def shut_guards(config: RouterConfig, *, keys: bool) -> frozenset[Guard]:
    """The guards that ask for a key."""
    if not keys:
        return frozenset()
    is_open = {Guard.OPEN} if config.admin_access == "auto" else {Guard.OPEN, Guard.OPERATOR}
    return frozenset(Guard) - is_open


class Door:
    """Answers what is refused by a request's head alone; nothing else of it is read before.

    401 where a path is shut and there is no valid key, 403 for one that does not open it: the log
    says so once a minute and address. 429 or 503 where it would generate and may not begin.
    """

    def __init__(
        self, app: ASGIApp, front: Front, admission: Admission, shut: Container[Guard]
    ) -> None:
        self._app, self._shut = app, shut
        self._admission, self._keys = admission, admission.keys
        self._count = front.metrics.requests
        self._starts = Starts()
        self._told: dict[str, float] = {}  # when, by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, exchange, guard = scope["path"], Exchange.of(scope), Guard.OPEN
        exchange.source = self._admission.sources.of(scope.get("client"), scope["headers"])
        try:
            if self._keys is not None and (guard := guard_of(path)) in self._shut:
                self._open(guard, self._keys, scope)
            if scope["method"] == "POST" and path in ADMITTED:
                self._admission.enter(exchange, generates=path in GENERATING)
        except ApiError as error:
            self._count(error.code).inc()
            response = error.response_to(path)
            if error.status == 401:
                is_page = guard in (Guard.OPERATOR, Guard.ROUTER)  # a browser asks for a password
                response.headers["www-authenticate"] = BASIC_REALM if is_page else "Bearer"
            if error.status in (401, 403):
                self._tell((scope.get("client") or ("an unknown address", 0))[0], path, error)
            else:
                exchange.failure = error.code
            await response(scope, receive, send)
        else:
            try:
                await self._starts.turn(exchange.source)
                await self._app(scope, receive, send)
            finally:
                self._admission.leave(exchange)

    def _open(self, guard: Guard, keys: Keys, scope: Scope) -> None:
        """Raise an ApiError, 401 or 403, unless it brings what opens a path of this guard."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if guard in (Guard.OPERATOR, Guard.ROUTER):
            word = headers.get(SIBLING.encode(), b"").decode("latin-1")
            if word and keys.is_sibling_word(word, scope["path"]):
                return
        key = keys.key_of(headers)
        if guard is Guard.ROUTER:
            raise ApiError("permission_denied", "this is for other routers alone")
        if guard is Guard.OPERATOR and not keys.opens_pages(key):
            raise ApiError("permission_denied", "this API key opens no operators' pages: admin=yes")
        if guard is Guard.ADMIN and not key.admin:
            raise ApiError("permission_denied", "this API key gives no orders: admin=yes")
        if guard is Guard.KEYED:
            exchange = Exchange.of(scope)
            exchange.client, exchange.own_salt = key.name, key.own_salt
            if self._admission.sources.by_key:
                exchange.source = key.name

    def _tell(self, address: str, path: str, error: ApiError) -> None:
        now = time.monotonic()
        if now - self._told.get(address, -math.inf) < TOLD_S:
            return
        if len(self._told) >= MAX_TOLD:  # whoever has so many may fill the log
            self._told.clear()
        self._told[address] = now
        log.info("refused %s for %.100r: %s", address, path, error.message)


def origins(config: RouterConfig, host: str) -> Sequence[str]:
    """The origins that `config` allows a router that listens on `host`."""
    if config.cors_origins != "auto":
        return config.cors_origins
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    allowed = ("*",) if is_loopback and not config.api_key_file else ()
    why = f"it listens on {host}, {'with' if config.api_key_file else 'without'} keys"
    log.debug("router.cors_origins = %s (%s)", list(allowed), why)
    return allowed


def with_cors(app: ASGIApp, allowed: Sequence[str]) -> ASGIApp:
    """`app` with CORS for pages of these origins; without credentials, as a key is a header."""
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(allowed),
        allow_methods=["GET", "HEAD", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
    )
