"""Stored responses of all routers: the end of an id says who keeps it, and the others ask there.

    client ─▶ any router ── its own ─────────────▶ its store
                    └────── another's ── POST ───▶ that one's store, at its own port

No response is kept twice, so that what is deleted is deleted. What a router keeps that leaves goes
to another one; then all are asked.
"""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple, TypeVar, cast, get_args

import msgspec
from fastapi import Request, Response
from msgspec import Raw
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from router.adapters.responses import Wanted
from router.adapters.store import Kept, MissingResponse, ResponseStore, packed, tag_of, unpacked
from router.errors import ApiError
from router.show.front import Front
from worker.api import Member

Verb = Literal["shown", "desc", "asc", "all", "last", "delete", "cancel"]  # at a router's store

PATH = "/dashboard/responses"
NAME = re.compile(r"resp_[A-Za-z0-9_-]{1,200}-([0-9a-f]{8})")  # its end: `tag_of` a router
SMALL_BYTES = 64 << 10  # what is no larger takes no turn, and leaves at once
NUM_TURNS = 2  # conversations that are larger, prepared at a time
MAX_WAITING = 32  # for a turn
HAND_OVER_S = 3.0
MAX_BATCH_BYTES = 4 << 20

Result = TypeVar("Result")


class Known(NamedTuple):
    """What a request goes on with, of one owner; None of a response that is nowhere."""

    owner: str
    responses: Mapping[str, Kept | None]

    @property
    def is_slow(self) -> bool:
        """Whether something is to be decoded, which is not for the loop."""
        return bool(self.responses)


class StoredResponses:
    """What one router asks of its own store and of the others'."""

    def __init__(self, front: Front, store: ResponseStore) -> None:
        self.store, self._front, self._siblings = store, front, front.siblings
        self.tag = tag_of(front.siblings.incarnation)
        self._turns, self._waiting = asyncio.Semaphore(NUM_TURNS), Counter[str]()  # by owner
        self._leaves, self._ready = False, packed(())
        self._fetched: int = 0  # bytes of responses that are being continued
        self._showing = Counter[str]()  # bytes on their way to slow clients, by owner

    async def ask(self, verb: Verb, owner: str, name: str) -> bytes:
        """What the router says that keeps a response.

        Raises a MissingResponse, what that router has refused, or an ApiError, 429, if it does not
        answer.
        """
        found = NAME.fullmatch(name)
        if found is None:
            raise MissingResponse(name)
        others = self._siblings.routers()
        keeper = [other for other in others if tag_of(other.incarnation) == found[1]]
        if found[1] == self.tag:
            return await self._of_own(verb, owner, name)
        if keeper:
            return await self._of_other(keeper[0], verb, owner, name)
        asked = [self._of_other(other, verb, owner, name) for other in others]
        answers = await asyncio.gather(
            self._of_own(verb, owner, name), *asked, return_exceptions=True
        )
        kept = [answer for answer in answers if isinstance(answer, bytes)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        unknown = [error for error in errors if not isinstance(error, MissingResponse)]
        # One may have it twice: it is gone when all have said so.
        if kept and not (unknown and verb in ("delete", "cancel")):
            return kept[0]
        raise (unknown or errors)[0]

    async def answer(self, request: Request) -> Response:
        """What another router asks of this one: POST /dashboard/responses/{verb}/{owner}/{name}.

        take: what the router of this tag has ready, which leaves; ready: that.
        """
        verb, owner, name = (request.path_params[part] for part in ("verb", "owner", "name"))
        if verb == "take":
            return Response(await self._take(owner))
        if verb == "ready":
            return Response(self._ready)
        if verb not in get_args(Verb):
            raise MissingResponse(name)
        return Response(await self._of_own(cast("Verb", verb), owner, name))

    async def with_known(self, owner: str, work: Callable[[Known], Awaitable[Result]]) -> Result:
        """What `work` makes of the responses that it wants."""
        known, fetched = dict[str, Kept | None](), 0
        try:
            while True:
                try:
                    large = sum(kept.num_bytes for kept in known.values() if kept is not None)
                    async with self._turn(owner, large):
                        return await work(Known(owner, known))
                except Wanted as wanted:
                    names = wanted.names
                found = await asyncio.gather(*(self._known(owner, *pair) for pair in names.items()))
                known |= zip(names, found, strict=True)
                size = sum(kept.num_bytes for kept in found if kept is not None)
                fetched, self._fetched = fetched + size, self._fetched + size
                if self._fetched > self.store.max_bytes:
                    message = "too many stored responses are being continued"
                    limit = "router.stored_responses_mib"
                    raise ApiError("busy", f"{message}: {limit}")
        finally:
            self._fetched -= fetched

    async def _known(self, owner: str, name: str, param: str) -> Kept | None:
        try:
            if name.endswith(self.tag) and not self._leaves:
                return self.store.get(owner, name)
            verb = "all" if param == "previous_response_id" else "last"
            return unpacked(await self.ask(verb, owner, name))[0][0]
        except MissingResponse:
            return None
        except ApiError as error:
            error.param = param
            raise

    async def listed(self, owner: str, name: str, verb: Verb) -> bytes:
        """The items that a response of this router was asked with."""
        inputs = self.store.get(owner, name).parts[-2]

        def work() -> bytes:
            items = msgspec.json.decode(inputs, type=list[dict[str, Raw]])
            data = [{"id": f"{name}-{i}", **item} for i, item in enumerate(items)]
            if verb == "desc":
                data.reverse()
            ids: list[object] = [item["id"] for item in data] or [""]
            about = {"object": "list", "first_id": ids[0], "last_id": ids[-1], "has_more": False}
            return msgspec.json.encode({"data": data, **about})

        if len(inputs) <= SMALL_BYTES:
            return work()
        async with self._turn(owner, len(inputs)):
            return await asyncio.to_thread(work)

    def shown(self, owner: str, raw: bytes) -> Response:
        """The answer that tells this; raises an ApiError, 429, if too much is on its way."""
        if len(raw) <= SMALL_BYTES:
            return Response(raw, media_type="application/json")
        most = self.store.max_bytes
        if self._showing.total() + len(raw) > most or self._showing[owner] > most // 2:
            message = "stored responses are on their way to clients that read slowly"
            raise ApiError("busy", f"{message}: router.stored_responses_mib")
        return Slow(raw, owner, self._showing, self._front.served.config.keep_alive_s)

    @asynccontextmanager
    async def _turn(self, owner: str, num_bytes: int) -> AsyncGenerator[None]:
        """Few conversations are decoded at a time, if they are large."""
        if num_bytes <= SMALL_BYTES:
            yield
            return
        if self._waiting.total() >= MAX_WAITING or self._waiting[owner] >= MAX_WAITING // 2:
            message = "too many large conversations are being continued"
            raise ApiError("busy", message)
        self._waiting[owner] += 1
        try:
            async with self._turns:
                yield
        finally:
            self._waiting[owner] -= 1

    async def _of_own(self, verb: Verb, owner: str, name: str) -> bytes:
        if self._leaves:
            raise ApiError("busy", "this router hands over what it keeps")
        match verb:
            case "shown":
                return self.store.get(owner, name).shown
            case "all":
                return packed([(self.store.get(owner, name), 0.0)])
            case "last":
                kept = self.store.get(owner, name)
                return packed([(replace(kept, parts=kept.parts[-1:]), 0.0)])
            case "delete":
                self.store.delete(owner, name)
                return b"{}"
            case "cancel":
                return self.store.cancel(owner, name).shown
            case _:
                return await self.listed(owner, name, verb)

    async def _of_other(self, other: Member, verb: Verb, owner: str, name: str) -> bytes:
        answer = await self._siblings.tell(other, f"{PATH}/{verb}/{owner}/{name}")
        if answer is not None and answer.status_code == 200:
            return answer.content
        if answer is not None and answer.status_code == 404:
            raise MissingResponse(name)
        if answer is not None and answer.status_code == 400:
            raise ApiError("invalid_value", answer.json()["error"]["message"])
        message = "the router that keeps this response does not answer; try again"
        raise ApiError("busy", message)

    async def hand_over(self) -> None:
        """Have the other routers take what is kept, the newest first, as far as there is time.

        From now on this one answers that it is busy: what it has kept is deleted nowhere meanwhile.
        """
        self._leaves, until = True, time.monotonic() + HAND_OVER_S
        others, batch, size = self._siblings.routers(), list[tuple[Kept, float]](), 0
        random.shuffle(others)
        seen, kept = set[bytes](), self.store.all()
        for i, pair in enumerate(kept):
            parts = set(pair[0].parts)
            size += sum(len(part) for part in parts - seen) + len(pair[0].head)
            seen |= parts
            batch.append(pair)
            if size < MAX_BATCH_BYTES and i + 1 < len(kept):
                continue
            self._ready = packed(batch)
            while others and time.monotonic() < until:
                answer = await self._siblings.tell(others[0], f"{PATH}/take/{self.tag}/{i}")
                if answer is not None and answer.status_code == 200:
                    break
                others.pop(0)
            else:
                return
            batch, size, seen = [], 0, set[bytes]()

    async def _take(self, tag: str) -> bytes:
        """Keep what a router that leaves has ready; it is asked where members are known to be."""
        if self._front.draining:
            raise ApiError("draining", "the router is draining")
        for other in self._siblings.routers():
            if tag_of(other.incarnation) == tag:
                answer = await self._siblings.tell(other, f"{PATH}/ready/{tag}/0")
                if answer is None or answer.status_code != 200:
                    raise ApiError("busy", "it does not answer")
                for kept, left_s in reversed(unpacked(answer.content)):
                    self.store.take(kept, left_s)
                return b"{}"
        raise MissingResponse(tag)


class Slow(Response):
    """JSON that may be large: it leaves as its client reads, and is counted meanwhile."""

    def __init__(self, raw: bytes, owner: str, showing: Counter[str], keep_alive_s: float) -> None:
        super().__init__(None, media_type="application/json")
        self._raw, self._owner, self._showing, self._keep_alive_s = (
            raw,
            owner,
            showing,
            keep_alive_s,
        )
        self.raw_headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw, num = self._raw, len(self._raw)
        self._showing[self._owner] += num
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for at in range(0, num, SMALL_BYTES):
                part, more = raw[at : at + SMALL_BYTES], at + SMALL_BYTES < num
                async with asyncio.timeout(self._keep_alive_s):
                    await send({"type": "http.response.body", "body": part, "more_body": more})
                await asyncio.sleep(0)  # the kernel may take all at once: others have their turn
        except TimeoutError:
            scope["outlet"].close()
        finally:
            self._showing[self._owner] -= num
