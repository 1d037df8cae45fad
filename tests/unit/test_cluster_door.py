"""Which router of a node listens alone, and which join it."""

from __future__ import annotations

import asyncio

import pytest

from cluster.door import Door, Listen
from worker.api import Member
from worker.errors import UserError

FREE = 4711


def listening(calls: list[tuple[int, bool]], error: Exception | None = None) -> Listen:
    async def listen(port: int, joins: bool) -> Member:
        calls.append((port, joins))
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return Member("router", "router", "1", f"http://x:{port or FREE}")

    return listen


def test_one_of_those_that_come_at_once_listens_alone_and_the_others_join_it() -> None:
    async def body() -> None:
        door, calls = Door(0), list[tuple[int, bool]]()
        await asyncio.gather(*(door.enter(name, listening(calls)) for name in "abc"))
        assert calls == [(0, False), (FREE, True), (FREE, True)]

    asyncio.run(body())


def test_where_the_first_one_fails_the_next_is_the_first() -> None:
    async def body() -> None:
        door, calls = Door(8000), list[tuple[int, bool]]()
        taken = UserError("cannot listen", "cluster.port")
        found = await asyncio.gather(
            door.enter("a", listening(calls, taken)),
            door.enter("b", listening(calls)),
            return_exceptions=True,
        )
        assert found[0] is taken
        assert calls == [(8000, False), (8000, False)]
        with pytest.raises(UserError):
            await door.enter("c", listening(calls, taken))
        assert calls[2:] == [(8000, True)]

    asyncio.run(body())


def test_a_router_that_is_replaced_joins_those_that_live_or_takes_the_same_port_alone() -> None:
    async def body() -> None:
        door, calls = Door(0), list[tuple[int, bool]]()
        for name in "ab":
            await door.enter(name, listening(calls))
        door.leave("a")
        door.leave("a")
        await door.enter("a again", listening(calls))
        for name in ("a again", "b"):
            door.leave(name)
        await door.enter("c", listening(calls))
        assert calls == [(0, False), (FREE, True), (FREE, True), (FREE, False)]

    asyncio.run(body())
