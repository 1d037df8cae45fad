"""The OpenAI surface: its routes, every check that can end in a 4xx, the form of errors."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import chat, completions
from router.errors import ApiError, invalid
from router.schema import ChatBody, CompletionBody, GenerationBody, parse
from router.sse import Answer, Prepared, PreparedChoice, Shape, error_response
from router.status import Front, StatusRoutes, version
from worker.errors import UserError

THREAD_BODY_BYTES = 64 << 10  # a larger body is parsed and tokenized off the loop
REQUEST_ID = b"x-request-id"

Prepare = Callable[[bytes], Prepared]


class Routes:
    """Generation and models."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, self._prepare_chat)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, self._prepare_completion)

    async def models(self) -> Response:
        """GET /v1/models: the one that is served."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        self._check_model(name)
        return JSONResponse(self._model())

    async def _generate(self, request: Request, prepare: Prepare) -> Response:
        front = self._front
        try:
            if front.draining:
                raise ApiError.of("draining", "the router is draining", retry_after_s=1)
            raw = await self._body(request)
            if len(raw) > THREAD_BODY_BYTES:
                prepared = await asyncio.to_thread(prepare, raw)
            else:
                prepared = prepare(raw)
            front.dispatcher.check_room(len(prepared.choices))
        except (ApiError, UserError) as error:
            front.metrics.ended(error.code)
            raise
        front.num_open += 1
        return Answer(prepared, front.dispatcher, front.config.sse_ping_s, self._closed)

    def _closed(self) -> None:
        self._front.num_open -= 1

    async def _body(self, request: Request) -> bytes:
        limit = self._front.config.max_body_bytes
        error = ApiError(413, "body_too_large", f"the body is larger than {limit} bytes")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise error
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise error
        return bytes(body)

    def _prepare_chat(self, raw: bytes) -> Prepared:
        body = parse(ChatBody, raw)
        self._check_model(body.model)
        return self._prepared(body, chat.prompts(body, self._front.text), chat.ChatShape())

    def _prepare_completion(self, raw: bytes) -> Prepared:
        body = parse(CompletionBody, raw)
        self._check_model(body.model)
        prompts = completions.prompts(body, self._front.text)
        return self._prepared(body, prompts, completions.TextShape())

    def _check_model(self, name: str) -> None:
        if name and name != self._front.model:
            message = f"the model {name!r} does not exist; {self._front.model!r} is served here"
            raise ApiError(404, "model_not_found", message, param="model")

    def _prepared(
        self, body: GenerationBody, prompts: list[tuple[int, ...]], shape: Shape
    ) -> Prepared:
        text, choices = self._front.text, list[PreparedChoice]()
        for prompt in prompts:
            max_tokens = allowed_tokens(len(prompt), body.asked_max_tokens, self._front)
            sampling = body.sampling(max_tokens, text.vocab_size)
            output = text.output(
                prompt,
                stop=body.stop,
                min_tokens=body.min_tokens,
                skip_special_tokens=body.skip_special_tokens,
            )
            choices.append(PreparedChoice(prompt, sampling, output))
        options = body.stream_options
        return Prepared(
            shape=shape,
            model=self._front.model,
            choices=choices,
            streamed=body.stream,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
        )

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._front.model,
            "object": "model",
            "created": self._front.started_at,
            "owned_by": "kvlane",
            "max_model_len": self._front.max_model_len,
        }


def allowed_tokens(num_prompt_tokens: int, asked: int | None, front: Front) -> int:
    """How long the output may become.

    Raises:
        ApiError: 400, there is no prompt or it leaves less than what is asked.
    """
    limit = front.max_model_len
    if num_prompt_tokens == 0:
        raise invalid("the prompt is empty", "prompt")
    room = limit - num_prompt_tokens
    if room >= (asked or 1):
        return asked or room
    message = f"the model's context is {limit} tokens; the prompt has {num_prompt_tokens}"
    if asked is not None:
        message += f" and max_tokens is {asked}"
    raise ApiError(400, "context_length_exceeded", message, param="max_tokens" if asked else None)


class RequestId:
    """Returns the caller's x-request-id, or makes one, on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the header added to what goes back."""
        given = dict(scope["headers"]).get(REQUEST_ID) if scope["type"] == "http" else None
        request_id = given or uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _on_error(request: Request, error: Exception) -> Response:
    """Every exception a route may raise, in OpenAI's format; unknown ones are also logged."""
    match error:
        case ApiError():
            return error_response(error)
        case UserError():
            return error_response(ApiError(400, error.code, str(error), param=error.param))
        case HTTPException():
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            return error_response(ApiError(error.status_code, code, str(error.detail)))
        case ClientDisconnect():
            return Response(status_code=499)
        case _:
            return error_response(ApiError.of("internal_error", "internal error"))


def application(front: Front) -> ASGIApp:
    """The ASGI application over `front`."""
    routes, status = Routes(front), StatusRoutes(front)
    app = FastAPI(title="kvlane", version=version(), redoc_url=None)
    for path, endpoint in (
        ("/v1/chat/completions", routes.chat),
        ("/v1/completions", routes.completions),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    for path, endpoint in (
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.one_model),
        ("/health", status.health),
        ("/ready", status.ready),
        ("/metrics", status.metrics),
        ("/metrics/targets", status.targets),
        ("/config", status.config),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    for kind in (ApiError, UserError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    return RequestId(app)
