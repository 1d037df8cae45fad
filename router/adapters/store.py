"""Responses that are kept, in memory: a bound of bytes and of time, the oldest go first."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.json import decode as from_json
from msgspec.json import encode as to_json

from router.errors import ApiError

Item = Mapping[str, Any]


class MissingResponse(ApiError):
    """404: no response of this id is kept here, or not for who asks. item: one of it is wanted."""

    def __init__(self, name: str, param: str | None, item: str = "") -> None:
        self.name = name
        what = f"item {item[:80]!r}" if item else f"response {name[:80]!r}"
        message = f"there is no {what}: it was not stored, or for too long"
        super().__init__("invalid_value", message, param=param)
        self.status = 404


@dataclass(frozen=True, slots=True)
class Kept:
    """A response; its conversation is all that a next one begins with, its own output last."""

    owner: str  # the name of its API key
    response: Mapping[str, Any]  # as it is shown
    inputs: Sequence[Item]  # of its own request
    conversation: Sequence[Item]


class ResponseStore:
    """Those of one router. Only the loop changes it; other threads may `get`.

    They are kept as JSON: as objects they took five times the memory, and every full collection of
    garbage would walk through them while all streams wait.
    """

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._kept: dict[str, tuple[str, bytes, float]] = {}  # owner, JSON, until when
        self._num_bytes = 0
        self._cancels: dict[str, Callable[[], None]] = {}  # of those that are being made

    def put(self, kept: Kept) -> None:
        """Keep a response; one of the same id is replaced. One beyond the bound is not kept."""
        name = kept.response["id"]
        self._drop(name)
        raw = to_json([kept.response, kept.inputs, kept.conversation])
        if len(raw) > self._max_bytes:
            return
        now = self._clock()
        while self._kept:
            oldest, (_, _, until) = next(iter(self._kept.items()))
            if until > now and self._num_bytes + len(raw) <= self._max_bytes:
                break
            self._drop(oldest)
        self._kept[name] = kept.owner, raw, now + self._ttl_s
        self._num_bytes += len(raw)

    def get(self, name: str, owner: str, param: str | None = None) -> Kept:
        """Raises a MissingResponse that names `param`, if this owner has none of this id."""
        kept = self.of_anybody(name, param)
        if kept.owner != owner:
            raise MissingResponse(name, param)
        return kept

    def item(self, name: str, owner: str, param: str) -> Item:
        """An item of a response's output: its id has that of the response; raises as `get`."""
        response = "resp_" + name.partition("_")[2].rpartition("-")[0]
        try:
            output: Sequence[Item] = self.get(response, owner, param).response["output"] or ()
        except MissingResponse:
            output = ()
        found = next((item for item in output if item["id"] == name), None)
        if found is None:
            raise MissingResponse(response, param, name)
        return found

    def of_anybody(self, name: str, param: str | None = None) -> Kept:
        """As `get`, whoever the owner is."""
        owner, raw, until = self._kept.get(name, ("", b"", 0.0))
        if not raw or until <= self._clock():
            raise MissingResponse(name, param)
        return Kept(owner, *from_json(raw))

    def delete(self, name: str, owner: str) -> None:
        """Raises as `get` does; one that is being made is cancelled."""
        self.get(name, owner)
        self._cancels.pop(name, lambda: None)()
        self._drop(name)

    def begin(self, name: str, cancel: Callable[[], None]) -> None:
        """A response is being made with nobody to wait for it."""
        self._cancels[name] = cancel

    def end(self, name: str) -> None:
        """It is no longer."""
        self._cancels.pop(name, None)

    def cancel(self, name: str, owner: str) -> Kept:
        """The response, which ends if it is being made.

        Raises as `get` does, and 400 for one that was made while its client waited.
        """
        kept = self.get(name, owner)
        if not kept.response["background"]:
            raise ApiError("invalid_value", "only background responses can be cancelled")
        if name in self._cancels:
            self._cancels.pop(name)()
            shown = {**kept.response, "status": "cancelled"}
            kept = Kept(owner, shown, kept.inputs, kept.conversation)
            self.put(kept)
        return kept

    def _drop(self, name: str) -> None:
        _, raw, _ = self._kept.pop(name, ("", b"", 0.0))
        self._num_bytes -= len(raw)
