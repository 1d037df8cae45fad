"""CORS: the origins whose pages may read our answers in a browser."""

import ipaddress
import logging
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from router.config import RouterConfig

log = logging.getLogger("kvlane.router")

EXPOSED = ("X-Request-Id", "Server-Timing", "Retry-After", "X-Should-Retry")


def origins(config: RouterConfig, host: str) -> Sequence[str]:
    """The origins that `config` allows a router that listens on `host`."""
    if config.cors_origins != "auto":
        return config.cors_origins
    allowed = ("*",) if _is_loopback(host) and not config.api_key_file else ()
    why = f"it listens on {host}, {'with' if config.api_key_file else 'without'} keys"
    log.debug("router.cors_origins = %s (%s)", list(allowed), why)
    return allowed


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
