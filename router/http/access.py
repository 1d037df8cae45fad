"""Who may ask: API keys for generation and tokens, and CORS for pages of other origins."""

import ipaddress
import logging
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import RouterConfig
from router.errors import ApiError
from router.http.allowance import Keys
from router.http.exchange import Exchange
from router.http.keys import Key

log = logging.getLogger("kvlane.router")

GUARDED = ("/v1/", "/tokenize", "/detokenize")
BEARER = b"bearer "
EXPOSED = ("X-Request-Id", "Server-Timing", "Retry-After", "X-Should-Retry", "Idempotent-Replayed")


class ApiKeys:
    """Answers 401 to requests for guarded paths whose bearer token is none of `keys`.

    Anthropic's clients send theirs as `x-api-key`.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        try:
            key = self._key(scope)
        except ApiError as error:
            response = error.response
        else:
            exchange = Exchange.of(scope)
            exchange.client, exchange.own_salt = key.name, key.own_salt
            await self._app(scope, receive, send)
            return
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _key(self, scope: Scope) -> Key:
        """The key that came with it; raises an ApiError, 401, if there is none that is valid."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        token = headers.get(b"x-api-key", b"")
        if given[: len(BEARER)].lower() == BEARER:
            token = given[len(BEARER) :]
        key = self._keys.find(token.strip())
        if key is None:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError("invalid_api_key", message)
        return key


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
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
    )
