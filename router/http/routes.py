"""The application: the table's routes, the layers around them, and the form of errors."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from operator import attrgetter

from fastapi import Request, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from router.adapters.store import ResponseStore
from router.errors import ApiError
from router.http.access import Door, shut_guards, with_cors
from router.http.admission import Admission
from router.http.api import Api
from router.http.exchange import CLIENT_GONE, Exchange, Exchanges
from router.http.openapi import document
from router.http.orders import Operator, OrderRoutes
from router.http.responses import ResponseRoutes
from router.http.stored import StoredResponses
from router.http.table import GENERATING, ROUTES, Guard
from router.show.front import Front
from router.show.pages import Pages
from router.show.status import StatusRoutes, version
from worker.errors import Busy, KvlaneError, LibraryError, UserError

Endpoint = Callable[[Request], Awaitable[Response]]
FORESEEN = KvlaneError, HTTPException, ClientDisconnect


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the table's endpoints are."""

    api: Api
    responses: ResponseRoutes
    stored: StoredResponses
    status: StatusRoutes
    pages: Pages
    orders: OrderRoutes


class Errors:
    """The answers to exceptions. front: counts those of requests that were to generate."""

    def __init__(self, front: Front) -> None:
        self._count = front.metrics.requests

    async def answer(self, request: Request, error: Exception) -> Response:
        """To any exception of a route, in OpenAI's format; unknown ones are also logged."""
        headers: dict[str, str] = {}
        match error:
            case ApiError():
                failure = error
            case UserError():
                failure = ApiError(error.code, str(error), param=error.param).answered(400)
            case KvlaneError():
                if isinstance(error, LibraryError):
                    error.log(Exchange.of(request.scope).unique_id)
                after_s = error.retry_after_s if isinstance(error, Busy) else None
                failure = ApiError(error.code, str(error), retry_after_s=after_s)
            case HTTPException():
                code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
                failure = ApiError(code, str(error.detail)).answered(error.status_code)
                headers = dict(error.headers or {})  # 405 says what is allowed
            case ClientDisconnect():
                return Response(status_code=CLIENT_GONE)
            case _:
                failure = ApiError("internal_error", "internal error")
        path = request.scope["path"]
        if isinstance(error, KvlaneError) and request.method == "POST" and path in GENERATING:
            self._count(failure.code).inc()
        Exchange.of(request.scope).failure = failure.code
        response = failure.response_to(path)
        response.headers.update(headers)
        return response


class Straight:
    """Endpoints that generate, past the layers of `app`, which cost a tenth of a request."""

    def __init__(self, app: ASGIApp, errors: Errors, endpoints: Mapping[str, Endpoint]) -> None:
        self._app, self._errors, self._endpoints = app, errors, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except Exception as error:
            await (await self._errors.answer(request, error))(scope, receive, send)
            if not isinstance(error, FORESEEN):
                raise
        else:
            await response(scope, receive, send)


def application(front: Front, admission: Admission, operator: Operator | None = None) -> ASGIApp:
    """The ASGI application over `front`. operator: carries out orders; None: nobody."""
    keys = admission.keys is not None
    shut = shut_guards(front.served.config, keys=keys)
    api, config = Api(front, admission), front.served.config
    most, most_of_one = config.stored_responses_mib << 20, config.stored_response_mib << 20
    store = ResponseStore(most, most_of_one, config.stored_response_ttl_s)
    stored = StoredResponses(front, store)
    front.hand_over = stored.hand_over
    endpoints = Endpoints(
        api=api,
        responses=ResponseRoutes(front, api, stored),
        stored=stored,
        status=StatusRoutes(front, guarded=Guard.OPERATOR in shut),
        pages=Pages(front),
        orders=OrderRoutes(operator, front.served.config, keys=keys),
    )
    # It brings Swagger UI along, so that /docs works where there is no internet.
    app = FastAPIOffline(None, None, title="kvlane", redirect_slashes=False)
    shown = document(version(), front.served.model, shut)
    app.openapi = lambda: shown
    straight, errors = dict[str, Endpoint](), Errors(front)
    for route in ROUTES:
        if route.endpoint:  # all read their bodies themselves
            endpoint = attrgetter(route.endpoint)(endpoints)
            app.add_route(route.path, endpoint, methods=[*route.methods])
            if route.path in GENERATING and "POST" in route.methods:
                straight[route.path] = endpoint
    for kind in (*FORESEEN, Exception):
        app.add_exception_handler(kind, errors.answer)
    layers: ASGIApp = Door(Straight(app, errors, straight), front, admission, shut)
    layers = with_cors(layers, front.cors_origins)  # outside: a preflight has no key
    level = logging.INFO if front.served.config.access_log else logging.DEBUG
    return Exchanges(layers, level, model=front.served.model, tracer=front.tracer)
