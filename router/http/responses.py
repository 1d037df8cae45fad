"""`/v1/responses`: to make one, also with nobody to wait for it, and what is kept of them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from starlette.responses import JSONResponse
from starlette.types import Message

from router.adapters.compact import ASK, CompactAnswer
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
from router.adapters.store import Kept, ResponseStore
from router.errors import invalid, unsupported
from router.http.answer import Answer
from router.http.api import Api
from router.http.exchange import Exchange
from router.http.stored import StoredResponses
from router.openai.body import Prepared
from router.openai.reading import read
from router.show.front import Front, as_json


class Nowhere:
    """In place of the connection of a response that nobody waits for."""

    is_open = is_full = is_gone = False

    def hold(self) -> None:
        """As an `Outlet`'s."""

    def watch(self, leave: Callable[[], None] | None) -> None:
        """As an `Outlet`'s: nobody leaves."""


class ResponseRoutes:
    """The endpoints below `/v1/responses`. api: generates what their bodies are prepared to."""

    def __init__(self, front: Front, api: Api) -> None:
        self._served, self._api = front.served, api
        config = front.served.config
        self._store = ResponseStore(config.stored_responses_mib << 20, config.stored_response_ttl_s)
        self._stored = StoredResponses(self._store, front.siblings)
        self._tasks = set[asyncio.Task[None]]()  # the loop holds tasks weakly

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        owner, raw = self._owner(request), await self._api.body(request)
        begin = partial(self._api.generate, request, raw, partial(self._prepared, owner))
        answer = await self._stored.with_all(owner, begin)
        form = answer.form
        assert isinstance(form, ResponseAnswer)
        if not form.is_background:
            return answer
        begun = form.begin()
        self._store.begin(begun["id"], answer.leave)
        task = asyncio.create_task(self._run(answer, begun["id"]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JSONResponse(begun)

    async def compact(self, request: Request) -> Response:
        """POST /v1/responses/compact."""
        owner, raw = self._owner(request), await self._api.body(request)
        begin = partial(self._api.generate, request, raw, partial(self._condensed, owner))
        return await self._stored.with_all(owner, begin)

    async def count(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens."""
        owner, raw = self._owner(request), await self._api.body(request)
        own_salt = Exchange.of(request.scope).own_salt

        def counted(raw: bytes) -> dict[str, Any]:
            body = _read(raw)
            self._served.check_model(body.model)
            before, own = conversation_of(body, self._store, owner)
            chat = chat_of_response(body, [*before, *own])
            num = num_tokens(self._served, own_salt, chat)
            return {"object": "response.input_tokens", "input_tokens": num}

        return await self._stored.with_all(owner, lambda: self._api.told(request, raw, counted))

    async def get(self, request: Request) -> Response:
        """GET /v1/responses/{name}."""
        if request.query_params.get("stream") == "true":
            raise unsupported("stream: a response that is kept is not streamed", "stream")
        return JSONResponse(
            (await self._stored.get(request.path_params["name"], self._owner(request))).response
        )

    async def inputs(self, request: Request) -> Response:
        """GET /v1/responses/{name}/input_items."""
        name, items = (
            request.path_params["name"],
            (await self._found(request)).inputs,
        )
        data = [{"id": f"{name}-{i}", **item} for i, item in enumerate(items)]
        if request.query_params.get("order", "desc") == "desc":
            data.reverse()
        ids: list[Any] = [item["id"] for item in data] or [""]
        about = {"object": "list", "first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return JSONResponse({"data": data, **about})

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{name}."""
        name = request.path_params["name"]
        self._store.delete(name, self._owner(request))
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{name}/cancel."""
        kept = self._store.cancel(request.path_params["name"], self._owner(request))
        return JSONResponse(kept.response)

    async def own(self, request: Request) -> Response:
        """GET /dashboard/responses/{name}: what this router has kept, for the others."""
        kept = self._store.of_anybody(request.path_params["name"])
        return as_json(kept)

    async def _found(self, request: Request) -> Kept:
        return await self._stored.get(request.path_params["name"], self._owner(request))

    def _owner(self, request: Request) -> str:
        return Exchange.of(request.scope).client

    def _prepared(self, owner: str, raw: bytes, own_salt: str) -> Prepared:
        return self._made(read(ResponseBody, raw), owner, own_salt)

    def _condensed(self, owner: str, raw: bytes, own_salt: str) -> Prepared:
        """The summary is asked for as one more message; no tool is called and nothing is kept."""
        body = _read(raw)
        if body.stream or body.background:
            name = "stream" if body.stream else "background"
            raise invalid(f"{name}: /compact answers whole, and at once", name)
        fixed: dict[str, Any] = {"tools": [], "tool_choice": "auto", "text": {}, "store": False}
        body = body.model_copy(update=fixed)
        return self._made(body, owner, own_salt, condenses=True)

    def _made(
        self, body: ResponseBody, owner: str, own_salt: str, *, condenses: bool = False
    ) -> Prepared:
        before, own = conversation_of(body, self._store, owner)
        asks, form = ((ASK,), CompactAnswer) if condenses else ((), ResponseAnswer)
        chat = chat_of_response(body, [*before, *own, *asks])
        asked = Asked(
            head=head_of(body, self._served),
            owner=owner,
            inputs=own,
            conversation=[*before, *own],
            store=self._store,
            spaces=spaces_of(body),
            think_end=self._api.preparer.think_end,
        )
        prepared = self._api.preparer.of_chat(chat, own_salt)
        background = not condenses and bool(getattr(body, "background", False))
        return replace(prepared, form=partial(form, asked), is_background=background)

    async def _run(self, answer: Answer, name: str) -> None:
        async def nobody_reads(message: Message) -> None:
            pass

        async def nobody_writes() -> Message:
            return {"type": "http.disconnect"}

        scope = {"type": "http", "path": "/v1/responses", "outlet": Nowhere()}
        try:
            await answer(scope, nobody_writes, nobody_reads)
        finally:
            self._store.end(name)


def _read(raw: bytes) -> OpenResponseBody:
    body = read(OpenResponseBody, raw)
    if not body.input and body.previous_response_id is None:
        raise invalid("input: is needed, or previous_response_id", "input")
    return body
