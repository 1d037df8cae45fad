"""Which router of a node listens alone, and which join it."""

import asyncio

import pytest

from cluster.sites.shared_port import SharedPort
from tests.support.asynchronous import asynchronous
from worker.api import Member
from worker.errors import UserError

FREE = 4711
TAKEN = UserError("cannot listen", "cluster.port")


class Routers:
    def __init__(self, port: int) -> None:
        self.port, self.calls = SharedPort(port), list[tuple[int, bool]]()

    async def enter(self, name: str, error: Exception | None = None) -> Member:
        async def listen(port: int, joins: bool) -> Member:
            self.calls.append((port, joins))
            await asyncio.sleep(0)
            if error is not None:
                raise error
            return Member("router", "router", "1", f"http://x:{port or FREE}")

        return await self.port.enter(name, listen)


@asynchronous
async def test_one_of_those_that_come_at_once_listens_alone_and_the_others_join_it() -> None:
    routers = Routers(0)
    await asyncio.gather(*map(routers.enter, "abc"))
    assert routers.calls == [(0, False), (FREE, True), (FREE, True)]


@asynchronous
async def test_where_the_first_one_fails_the_next_is_the_first() -> None:
    routers = Routers(8000)
    entering = routers.enter("a", TAKEN), routers.enter("b")
    assert (await asyncio.gather(*entering, return_exceptions=True))[0] is TAKEN
    assert routers.calls == [(8000, False), (8000, False)]
    with pytest.raises(UserError):
        await routers.enter("c", TAKEN)
    assert routers.calls[2:] == [(8000, True)]


@asynchronous
async def test_a_router_that_is_replaced_joins_those_that_live_or_takes_the_port_alone() -> None:
    routers = Routers(0)
    for name in "ab":
        await routers.enter(name)
    for name in "aa":
        routers.port.leave(name)
    await routers.enter("a again")
    for name in ("a again", "b"):
        routers.port.leave(name)
    await routers.enter("c")
    assert routers.calls == [(0, False), (FREE, True), (FREE, True), (FREE, False)]
