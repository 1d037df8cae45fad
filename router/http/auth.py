"""API keys: who may generate and tokenize."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import ApiError

GUARDED = ("/v1/", "/tokenize", "/detokenize")
BEARER = b"bearer "


class ApiKeys:
    """Answers 401 to requests for guarded paths whose bearer token is none of `keys`."""

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GUARDED) and not self._knows(scope):
            message = "a valid API key is needed: Authorization: Bearer KEY"
            response = ApiError("invalid_api_key", message).response
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given: bytes = dict(scope["headers"]).get(b"authorization", b"")
        if given[: len(BEARER)].lower() != BEARER:
            return False
        token = given[len(BEARER) :].strip()
        # Every key is compared, so that the time taken does not tell which one was close.
        return any([hmac.compare_digest(token, key) for key in self._keys])
