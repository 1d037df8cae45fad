"""What all routes of a router share."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from fastapi import Response

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.pool import Pool
from router.observe.metrics import RouterMetrics
from router.openai.served import Served
from router.show.period import Period, read
from router.show.siblings import Siblings

if TYPE_CHECKING:
    from worker.observe.spans import Tracer


def as_json(body: object, **headers: str) -> Response:
    """An answer of what msgspec can encode."""
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


@dataclass(slots=True)
class Front:
    """What all routes share. Only `draining` and `num_open` change, on the router's loop."""

    served: Served
    dispatcher: Dispatcher
    metrics: RouterMetrics
    siblings: Siblings
    shown: Mapping[str, object]  # the resolved configuration
    cors_origins: Sequence[str] = ()  # whose pages may read answers
    tracer: "Tracer | None" = None
    draining: bool = False
    num_open: int = 0  # HTTP generation requests that have not ended
    hand_over: Callable[[], Awaitable[None]] | None = None  # what is kept, to others, at the end
    period: Period = field(init=False)  # of what it has done
    pool: Pool = field(default_factory=Pool)  # for what would hold the loop up

    def __post_init__(self) -> None:
        self.period = Period(lambda: read(self.metrics))

    def closed(self) -> None:
        """An HTTP generation request has ended."""
        self.num_open -= 1
