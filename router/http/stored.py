"""Responses that this router has kept, or another one has."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from router.adapters.response_body import UNFIT
from router.adapters.store import Kept, MissingResponse, ResponseStore
from router.show.siblings import Siblings

MAX_FETCHED = 32  # for one request

Result = TypeVar("Result")


class StoredResponses:
    """Looks for what is missing in `store` at the other routers."""

    def __init__(self, store: ResponseStore, siblings: Siblings) -> None:
        self._store, self._siblings = store, siblings

    async def get(self, name: str, owner: str) -> Kept:
        """Raises a MissingResponse if no router has it."""

        async def work() -> Kept:
            return self._store.get(name, owner)

        return await self.with_all(owner, work)

    async def with_all(self, owner: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """What `work` makes, when responses that it misses have come from other routers."""
        fetched = set[str]()
        while True:
            try:
                return await work()
            except MissingResponse as missing:
                name = missing.name
                if name in fetched or len(fetched) == MAX_FETCHED:
                    raise
                if not await self._fetch(name, owner):
                    raise
                fetched.add(name)

    async def _fetch(self, name: str, owner: str) -> bool:
        """Whether another router has kept it for this owner; then it is kept here, too."""
        if UNFIT.search(name) is not None:
            return False
        answers = await self._siblings.ask_routers(f"/dashboard/responses/{name}")
        for text in filter(None, answers.values()):
            kept = msgspec.json.decode(text, type=Kept)
            if kept.owner == owner and kept.response["status"] != "in_progress":
                self._store.put(kept)
                return True
        return False
