"""`/v1/responses`: to make one, also with nobody to wait for it, and what is kept of them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from starlette.responses import JSONResponse
from starlette.types import Message

from router.adapters.compact import ASK, CompactAnswer, said_in
from router.adapters.messages import num_tokens
from router.adapters.response_body import Asked, ResponseAnswer
from router.adapters.responses import (
    OpenResponseBody,
    ResponseBody,
    chat_of_response,
    conversation_of,
    head_of,
    spaces_of,
)
from router.adapters.store import owner_of
from router.errors import invalid, unsupported
from router.http.answer import Answer
from router.http.api import Api
from router.http.exchange import Exchange
from router.http.stored import Known, StoredResponses, Verb
from router.openai.body import Prepared
from router.openai.reading import read
from router.show.front import Front


class Nowhere:
    """In place of the connection of a response that nobody waits for."""

    is_open = is_full = is_gone = False

    def hold(self) -> None:
        """As an `Outlet`'s."""

    def watch(self, leave: Callable[[], None] | None) -> None:
        """As an `Outlet`'s: nobody leaves."""


class ResponseRoutes:
    """The endpoints below `/v1/responses`. api: generates what their bodies are prepared to."""

    def __init__(self, front: Front, api: Api, stored: StoredResponses) -> None:
        self._served, self._api, self._stored = front.served, api, stored
        self._tasks = set[asyncio.Task[None]]()  # the loop holds tasks weakly

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        answer = await self._generate(request, self._prepared)
        form = answer.form
        assert isinstance(form, ResponseAnswer)
        if not form.is_background:
            return answer
        self._stored.store.watch(form.name, answer.leave)
        task = asyncio.create_task(_run(answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Response(form.begun, media_type="application/json")

    async def compact(self, request: Request) -> Response:
        """POST /v1/responses/compact."""
        return await self._generate(request, self._condensed)

    async def _generate(self, request: Request, prepared: Callable[..., Prepared]) -> Answer:
        owner, raw = owner_of_request(request), await self._api.body(request)

        async def begin(known: Known) -> Answer:
            prepare = partial(prepared, known)
            return await self._api.generate(request, raw, prepare, slow=known.is_slow)

        return await self._stored.with_known(owner, begin)

    async def count(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens."""
        owner, raw = owner_of_request(request), await self._api.body(request)
        own_salt = Exchange.of(request.scope).own_salt

        def counted(known: Known, raw: bytes) -> dict[str, Any]:
            body = _read(raw)
            self._served.check_model(body.model)
            _, items = conversation_of(body, known.responses)
            num = num_tokens(self._served, own_salt, chat_of_response(body, items))
            return {"object": "response.input_tokens", "input_tokens": num}

        async def count(known: Known) -> Response:
            work = partial(counted, known)
            return await self._api.told(request, raw, work, slow=known.is_slow)

        return await self._stored.with_known(owner, count)

    async def get(self, request: Request) -> Response:
        """GET /v1/responses/{name}."""
        if request.query_params.get("stream") == "true":
            raise unsupported("stream: a response that is kept is not streamed", "stream")
        return await self._told(request, "shown")

    async def inputs(self, request: Request) -> Response:
        """GET /v1/responses/{name}/input_items."""
        is_last_first = request.query_params.get("order", "desc") == "desc"
        return await self._told(request, "desc" if is_last_first else "asc")

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{name}."""
        name = request.path_params["name"]
        await self._stored.ask("delete", owner_of_request(request), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{name}/cancel."""
        return await self._told(request, "cancel")

    async def _told(self, request: Request, verb: Verb) -> Response:
        owner = owner_of_request(request)
        raw = await self._stored.ask(verb, owner, request.path_params["name"])
        return self._stored.shown(owner, raw)

    def _prepared(self, known: Known, raw: bytes, own_salt: str) -> Prepared:
        return self._made(known, read(ResponseBody, raw), own_salt)

    def _condensed(self, known: Known, raw: bytes, own_salt: str) -> Prepared:
        """The summary is asked for as one more message; no tool is called and nothing is kept."""
        body = _read(raw)
        if body.stream or body.background:
            name = "stream" if body.stream else "background"
            raise invalid(f"{name}: /compact answers whole, and at once", name)
        fixed: dict[str, Any] = {"tools": [], "tool_choice": "auto", "text": {}, "store": False}
        body = body.model_copy(update=fixed)
        return self._made(known, body, own_salt, condenses=True)

    def _made(
        self, known: Known, body: ResponseBody, own_salt: str, *, condenses: bool = False
    ) -> Prepared:
        parts, items = conversation_of(body, known.responses)
        asks, form = ((ASK,), CompactAnswer) if condenses else ((), ResponseAnswer)
        chat = chat_of_response(body, [*items, *asks])
        store, head = self._stored.store, head_of(body, self._served)
        keeps = body.store and store.max_bytes > 0
        if condenses:
            parts = (said_in(items), *parts)
        if keeps:
            store.check(sum(map(len, head.values())), parts)
        asked = Asked(
            head=head,
            owner=known.owner,
            tag=self._stored.tag,
            parts=parts,
            store=store,
            spaces=spaces_of(body),
            think_end=self._api.preparer.think_end,
            keeps=keeps,
            is_background=body.background,
        )
        prepared = self._api.preparer.of_chat(chat, own_salt)
        background = not condenses and bool(getattr(body, "background", False))
        before = known.responses.get(body.previous_response_id or "")
        session = before.session if before is not None else ""
        named = prepared.named._replace(previous=session, begins=keeps)
        return replace(prepared, form=partial(form, asked), is_background=background, named=named)


async def _run(answer: Answer) -> None:
    async def nobody_reads(message: Message) -> None:
        pass

    async def nobody_writes() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "path": "/v1/responses", "outlet": Nowhere()}
    await answer(scope, nobody_writes, nobody_reads)


def owner_of_request(request: Request) -> str:
    """Whose responses it may be about."""
    return owner_of(Exchange.of(request.scope).client)


def _read(raw: bytes) -> OpenResponseBody:
    body = read(OpenResponseBody, raw)
    if not body.input and body.previous_response_id is None:
        raise invalid("input: is needed, or previous_response_id", "input")
    return body
