"""The HTTP routes, the layers around them, and the form in which errors are answered."""

import asyncio
import logging
from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from router.adapters.message_body import MessageAnswer
from router.adapters.messages import MessagesBody, chat_of, count_tokens, model_card
from router.dispatch.claims import give_keys
from router.dispatch.queue import counted
from router.errors import ApiError, invalid
from router.http.access import GUARDED, ORDERS, PAGES, ROUTERS_OWN, ApiKeys, with_cors
from router.http.allowance import Keys
from router.http.answer import Answer
from router.http.exchange import CLIENT_GONE, Exchange, Exchanges
from router.http.openapi import document
from router.http.orders import Operator, OrderRoutes
from router.http.request_body import read_body
from router.http.responses import ResponseRoutes
from router.http.room import Room
from router.openai.body import Prepared
from router.openai.prepare import Preparer
from router.openai.reading import read
from router.openai.reply import ModelList
from router.openai.tokens import detokenize, tokenize
from router.show.front import Front
from router.show.pages import Pages
from router.show.status import StatusRoutes, version
from router.text.grammar import Validator
from worker.errors import Busy, KvlaneError, LibraryError, UserError, contained

ANTHROPIC_SIGN = "anthropic-version"  # a header that its clients send
MAX_KEY_CHARS = 255  # of an idempotency key
THREAD_BODY_BYTES = 4 << 10  # a larger body is parsed and tokenized off the loop: 2 ms, and more
# Fields that may take long to prepare, and the escape with which JSON may spell their names.
SLOW_WORDS = (
    b"response_format", b"guided_", b"structured_outputs", b"json_schema", b"regex", b"ebnf",
    b"tool", b"output_", b"json_object", b"\\u",
)  # fmt: skip
NOT_SERVED = (
    "/v1/embeddings", "/v1/audio/{rest:path}", "/v1/images/{rest:path}", "/v1/moderations",
    "/v1/conversations",
)  # fmt: skip

Result = TypeVar("Result")


def is_slow(raw: bytes) -> bool:
    """Whether preparing a body could hold the loop up for other requests."""
    return len(raw) > THREAD_BODY_BYTES or any(word in raw for word in SLOW_WORDS)


class Routes:
    """Generation, models and tokenization."""

    def __init__(self, front: Front, keys: Keys | None) -> None:
        self._front, self._served, self._keys = front, front.served, keys
        text = front.served.text
        self._preparer = Preparer(front.served, Validator(text.directory, text.vocab_size))
        self.responses = ResponseRoutes(
            front.served, front.siblings, self._preparer, self._generate
        )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, self._preparer.chat)

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        return await self._generate(request, self._of_message)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        own_salt = Exchange.of(request.scope).own_salt
        body = await self._run(request, partial(count_tokens, self._served, own_salt))
        return Response(body, media_type="application/json")

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, self._preparer.completion)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        card = self._served.card
        if ANTHROPIC_SIGN in request.headers:
            ends = {"first_id": card.id, "last_id": card.id, "has_more": False}
            return _json({"data": [model_card(card)], **ends})
        return _json(ModelList([card]))

    async def one_model(self, name: str, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._served.check_model(name)
        card = self._served.card
        return _json(model_card(card) if ANTHROPIC_SIGN in request.headers else card)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        own_salt = Exchange.of(request.scope).own_salt
        return _json(await self._run(request, partial(tokenize, self._served, own_salt)))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        return _json(await self._run(request, partial(detokenize, self._served)))

    async def not_served(self, request: Request) -> Response:
        """Endpoints of OpenAI's API that this server does not have."""
        message = f"{request.url.path} is not served: this server generates text only"
        raise ApiError("unsupported", message, status=404)

    def _of_message(self, raw: bytes, own_salt: str) -> Prepared:
        chat = chat_of(read(MessagesBody, raw), self._served.text.template_source)
        return replace(self._preparer.of_chat(chat, own_salt), form=MessageAnswer)

    async def _run(self, request: Request, work: Callable[[bytes], Result]) -> Result:
        """What `work` makes of the body, in a thread if it may take long; raises a KvlaneError."""
        raw = await self._body(request)

        def run() -> Result:
            with contained("the preparation of a request"):
                return work(raw)

        return await asyncio.to_thread(run) if is_slow(raw) else run()

    async def _generate(
        self, request: Request, prepare: Callable[[bytes, str], Prepared]
    ) -> Answer:
        front, exchange = self._front, Exchange.of(request.scope)
        given = request.headers.get("idempotency-key", "")

        def work(raw: bytes) -> Prepared:
            prepared = prepare(raw, exchange.own_salt)
            if given:
                give_keys(prepared.reqs, exchange.client, given, raw, seeded=prepared.is_seeded)
            return prepared

        try:
            if front.draining:
                raise ApiError("draining", "the router is draining", retry_after_s=1)
            if len(given) > MAX_KEY_CHARS:
                raise invalid(f"Idempotency-Key: at most {MAX_KEY_CHARS} characters")
            prepared = await self._run(request, work)
            exchange.unheeded = prepared.unheeded
            front.dispatcher.check_room(len(prepared.reqs), exchange.client)
            if self._keys is not None:
                self._keys.begin(exchange.client, counted(prepared.reqs)[0])
        except KvlaneError as error:
            front.metrics.requests(error.code).inc()
            raise
        front.num_open += 1

        def closed() -> None:
            front.closed()
            if self._keys is not None:
                self._keys.end(exchange.client, counted(prepared.reqs)[1])

        return Answer(prepared, front, exchange, closed)

    async def _body(self, request: Request) -> bytes:
        config = self._served.config
        body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
        return body.removeprefix(BOM_UTF8)


def _json(body: Struct | dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    """Every exception a route may raise, in OpenAI's format; unknown ones are also logged."""
    match error:
        case ApiError():
            failure, headers = error, {}
        case UserError():
            failure, headers = ApiError(error.code, str(error), param=error.param, status=400), {}
        case KvlaneError():
            if isinstance(error, LibraryError):
                error.log(Exchange.of(request.scope).unique_id)
            after_s = error.retry_after_s if isinstance(error, Busy) else None
            failure, headers = ApiError(error.code, str(error), retry_after_s=after_s), {}
        case HTTPException():
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            failure = ApiError(code, str(error.detail), status=error.status_code)
            headers = dict(error.headers or {})  # 405 says what is allowed
        case ClientDisconnect():
            return Response(status_code=CLIENT_GONE)
        case _:
            failure, headers = ApiError("internal_error", "internal error"), {}
    Exchange.of(request.scope).failure = failure.code
    response = failure.response_to(request.url.path)
    response.headers.update(headers)
    if response.headers.get("allow") == "GET":
        response.headers["allow"] = "GET, HEAD"
    return response


def _add_apis(app: FastAPI, routes: Routes) -> None:
    """What clients ask for; the rest is for operators and machines."""
    responses, one = routes.responses, "/v1/responses/{name}"
    for path, endpoint in (
        ("/v1/chat/completions", routes.chat),
        ("/v1/completions", routes.completions),
        ("/v1/messages", routes.messages),
        ("/v1/messages/count_tokens", routes.count_tokens),
        ("/v1/responses", responses.create),
        ("/tokenize", routes.tokenize),
        ("/detokenize", routes.detokenize),
    ):
        app.add_route(path, endpoint, methods=["POST"])  # they read their bodies themselves
    for path, endpoint, method in (
        ("/v1/models", routes.models, "GET"),
        ("/v1/models/{name:path}", routes.one_model, "GET"),
        (one, responses.get, "GET"),
        (f"{ROUTERS_OWN}{{name}}", responses.own, "GET"),
        (f"{one}/input_items", responses.inputs, "GET"),
        (one, responses.delete, "DELETE"),
        (f"{one}/cancel", responses.cancel, "POST"),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)


def application(
    front: Front, keys: Keys | None = None, operator: Operator | None = None
) -> ASGIApp:
    """The ASGI application over `front`.

    keys: a request needs one; None: none is needed. operator: carries out orders; None: nobody.
    """
    pages_too = front.served.config.admin_access == "auto"
    routes, pages = Routes(front, keys), Pages(front)
    status = StatusRoutes(front, guarded=keys is not None and pages_too)
    # It brings Swagger UI along, so that /docs works where there is no internet.
    app = FastAPIOffline(None, None, title="kvlane", redirect_slashes=False)
    guarded = () if keys is None else (*GUARDED, ORDERS, *PAGES * pages_too)
    shown = document(version(), front.served.model, guarded=guarded)
    app.openapi = lambda: shown
    _add_apis(app, routes)
    post = partial(app.add_route, methods=["POST"])
    orders = OrderRoutes(operator, front.served.config, keys=keys is not None)
    post(f"{ORDERS}drain", orders.drain)
    post(f"{ORDERS}role", orders.role)
    for path, endpoint in (
        ("/ping", status.health), ("/reset_prefix_cache", status.reset_prefix_cache),
    ):  # fmt: skip
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    for path, endpoint in (
        ("/", pages.index),
        ("/docs", pages.docs),
        ("/health", status.health),
        ("/ping", status.health),
        ("/version", status.version),
        ("/load", status.load),
        ("/live", status.live),
        ("/ready", status.ready),
        ("/metrics", status.metrics),
        ("/metrics/targets", status.targets),
        ("/config", status.config),
        ("/dashboard", pages.dashboard),
        ("/dashboard/playground", pages.playground),
        ("/dashboard/data", pages.data),
        ("/dashboard/own", pages.own),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    for path in ("/dashboard/static", "/docs/static"):  # the second is for all
        app.mount(path, pages.files)
    for path in NOT_SERVED:
        app.add_api_route(path, routes.not_served, methods=["GET", "POST"], response_model=None)
    for kind in (KvlaneError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    layers: ASGIApp = Room(app, front, keys)
    if keys is not None:
        refused = front.metrics.requests("invalid_api_key").inc
        layers = ApiKeys(layers, keys, pages=pages_too, refused=refused)
    layers = with_cors(layers, front.cors_origins)  # outside: a preflight has no key
    level = logging.INFO if front.served.config.access_log else logging.DEBUG
    return Exchanges(layers, level, model=front.served.model, tracer=front.tracer)
