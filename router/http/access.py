"""Who may ask: API keys for generation, tokens and operators' pages; CORS for other origins."""

import base64
import binascii
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import RouterConfig
from router.errors import ApiError
from router.http.allowance import TOLD_S, Keys
from router.http.exchange import Exchange
from router.http.keys import Key

log = logging.getLogger("kvlane.router")

GUARDED = ("/v1/", "/tokenize", "/detokenize")
PAGES = (  # for operators, and all below
    "/metrics",
    "/config",
    "/dashboard",
    "/load",
    "/reset_prefix_cache",
)  # for operators, and all below
ROUTERS_OWN = "/dashboard/responses/"  # where there are keys nobody but routers reads these
ORDERS = "/admin/"  # theirs; where there are no keys nobody may give any
BEARER, BASIC = b"bearer ", b"basic "
MAX_TOLD = 1024  # addresses
SIBLING = "x-kvlane-sibling"  # header of routers that ask one another
EXPOSED = (
    "X-Request-Id", "Server-Timing", "Retry-After", "X-Should-Retry", "Idempotent-Replayed",
    "X-Kvlane-Unknown-Fields",
)  # fmt: skip


class ApiKeys:
    """Answers 401 to requests for guarded paths that bring none of `keys`.

    A key comes as a bearer token, as `x-api-key` (Anthropic's clients), or, so that browsers can
    ask for it, as the password of Basic authentication. pages: operators' pages are guarded, too.
    refused: called for each request that gets a 401; the log says so once a minute and address.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, *, pages: bool, refused: Callable[[], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._pages = pages
        self._refused = refused
        self._told: dict[str, float] = {}  # when, by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        is_page = self._pages and any(path == each or path.startswith(f"{each}/") for each in PAGES)
        is_page = is_page or path.startswith(ROUTERS_OWN)
        is_order = path.startswith(ORDERS)
        if scope["type"] != "http" or not (is_page or is_order or path.startswith(GUARDED)):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            if is_page:
                self._check_page(headers, path)
            elif is_order:
                if not self._key(headers).admin:
                    raise ApiError("invalid_api_key", "this API key gives no orders: admin=yes")
            else:
                key, exchange = self._key(headers), Exchange.of(scope)
                exchange.client, exchange.own_salt = key.name, key.own_salt
        except ApiError as error:
            response = error.response_to(path)
            self._refused()
            self._tell((scope.get("client") or ("an unknown address", 0))[0], path, error)
        else:
            await self._app(scope, receive, send)
            return
        response.headers["www-authenticate"] = 'Basic realm="kvlane"' if is_page else "Bearer"
        await response(scope, receive, send)

    def _key(self, headers: Mapping[bytes, bytes]) -> Key:
        """Raises an ApiError, 401, if there is none that is valid."""
        key = self._keys.find(_token(headers).strip())
        if key is None:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError("invalid_api_key", message)
        return key

    def _check_page(self, headers: Mapping[bytes, bytes], path: str) -> None:
        """Raises an ApiError, 401, if neither a router nor an operator asks."""
        word = headers.get(SIBLING.encode(), b"").decode("latin-1")
        if word and self._keys.is_sibling_word(word, path):
            return
        if path.startswith(ROUTERS_OWN):
            raise ApiError("invalid_api_key", "this is for other routers alone")
        if not self._keys.opens_pages(self._key(headers)):
            raise ApiError("invalid_api_key", "this API key opens no operators' pages: admin=yes")

    def _tell(self, address: str, path: str, error: ApiError) -> None:
        now = time.monotonic()
        if now - self._told.get(address, -math.inf) < TOLD_S:
            return
        if len(self._told) >= MAX_TOLD:  # whoever has so many may fill the log
            self._told.clear()
        self._told[address] = now
        log.info("refused %s for %.100r: %s", address, path, error.message)


def with_key(headers: Mapping[bytes, bytes], keys: Keys) -> bool:
    """Whether a request brings a valid key."""
    try:
        return keys.find(_token(headers).strip()) is not None
    except ApiError:  # it has expired
        return False


def _token(headers: Mapping[bytes, bytes]) -> bytes:
    given = headers.get(b"authorization", b"")
    if given[: len(BEARER)].lower() == BEARER:
        return given[len(BEARER) :]
    if given[: len(BASIC)].lower() == BASIC:
        try:
            return base64.b64decode(given[len(BASIC) :], validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return headers.get(b"x-api-key", b"")


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
