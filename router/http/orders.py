"""`/admin`: what `kvlane drain NAME` and `kvlane role NAME ROLE` do, over HTTP."""

import asyncio
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import Meta, Struct

from router.config import RouterConfig
from router.errors import ApiError, invalid
from router.http.request_body import read_body
from router.show.front import as_json

MAX_BYTES = 4096

Seconds = Annotated[float, Meta(ge=0, le=86400)]


class DrainOrder(Struct, forbid_unknown_fields=True):
    """Whom to drain and remove; timeout_s: null is `cluster.drain_timeout_s`."""

    name: str
    timeout_s: Seconds | None = None


class RoleOrder(Struct, forbid_unknown_fields=True):
    """Which worker becomes one of `role`, after it has handed over what it has."""

    name: str
    role: Literal["prefill", "decode"]
    timeout_s: Seconds | None = None


class Operator(Protocol):
    """Who carries orders out. Methods block, and raise a KvlaneError."""

    def drain(self, name: str, timeout_s: float | None) -> bool:
        """Whether all work was finished in time."""
        ...

    def turn(self, name: str, role: Literal["prefill", "decode"], timeout_s: float | None) -> None:
        """Returns once it has the role."""
        ...


Order = TypeVar("Order", bound=Struct)


class OrderRoutes:
    """The routes below `/admin`; `access.Door` lets in whose key says admin=yes."""

    def __init__(self, operator: Operator | None, config: RouterConfig, *, keys: bool) -> None:
        self._operator, self._config, self._keys = operator, config, keys

    async def drain(self, request: Request) -> Response:
        """POST /admin/drain."""
        operator, order = self._allowed(), await self._read(request, DrainOrder)
        idle = await asyncio.to_thread(operator.drain, order.name, order.timeout_s)
        return as_json({"name": order.name, "finished": idle})

    async def role(self, request: Request) -> Response:
        """POST /admin/role."""
        operator, order = self._allowed(), await self._read(request, RoleOrder)
        await asyncio.to_thread(operator.turn, order.name, order.role, order.timeout_s)
        return as_json({"name": order.name, "role": order.role})

    async def _read(self, request: Request, kind: type[Order]) -> Order:
        body = await read_body(request, MAX_BYTES, self._config.body_timeout_s)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise invalid(f"the order cannot be read: {error}") from error

    def _allowed(self) -> Operator:
        if not self._keys:
            message = "orders need router.api_key_file with a key that says admin=yes"
            raise ApiError("unsupported", message).answered(403)
        if self._operator is None:
            raise ApiError("unsupported", "this router has no controller to ask").answered(403)
        return self._operator
