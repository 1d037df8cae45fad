"""Requests that are not admitted yet: they wait for their grammar, or for another's prompt."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from worker.api import Generate, PeerId
from worker.errors import Busy
from worker.requests.admission import BUSY_RETRY_S, Admission
from worker.requests.replies import Key
from worker.schedule.req import Req

Stage = Literal["grammar", "sibling"]


class Waiting(NamedTuple):
    """A request that waits for its grammar, or, as a further choice, for the first one's prompt."""

    message: Generate
    received_at: float
    stage: Stage


class Deferred:
    """The requests in `waiting`, which hold no pages; at most as many as may be admitted.

    reqs: the admitted ones.
    """

    def __init__(self, admission: Admission, reqs: Mapping[tuple[str, int], Req]) -> None:
        self.waiting: dict[Key, Waiting] = {}
        self._admission, self._reqs = admission, reqs

    def num(self, stage: Stage) -> int:
        """How many wait in a stage; a thread that scrapes metrics may ask."""
        return [request.stage for request in list(self.waiting.values())].count(stage)

    def take(self, router: PeerId, message: Generate, received_at: float) -> bool:
        """Whether the request has to wait, which it does here; raises Busy if too many do."""
        key = router, message.req_id, message.dispatch
        if key in self.waiting:
            return True
        may_wait = bool(message.sampling.grammar or message.after)
        limit, waiting = self._admission.max_reqs, ((peer, 1) for peer, _, _ in self.waiting)
        left = limit - len(self.waiting) - 1
        if may_wait and not self._admission.shares.allow(router, limit, left, waiting):
            raise Busy("too many requests", BUSY_RETRY_S)
        if (stage := self._stage(router, message)) is None:
            return False
        self.waiting[key] = Waiting(message, received_at, stage)
        return True

    def ready(self) -> Iterator[tuple[PeerId, Waiting]]:
        """Requests whose stage has ended, and their routers; they leave."""
        for key, request in list(self.waiting.items()):
            if self._stage(key[0], request.message) != request.stage:
                del self.waiting[key]
                yield key[0], request

    def forget(self, is_meant: Callable[[Key], bool]) -> None:
        """Drop the requests whose key is meant."""
        self.waiting = {key: request for key, request in self.waiting.items() if not is_meant(key)}

    def _stage(self, router: PeerId, message: Generate) -> Stage | None:
        """What a request has to wait for; None: nothing."""
        if self._admission.compiles(message):
            return "grammar"
        return "sibling" if self._waits(router, message) else None

    def _waits(self, router: PeerId, message: Generate) -> bool:
        """Whether it is a further choice, and the first one's prompt is not in the prefix tree yet.

        Then it will match that prompt's whole pages, and prefill the rest, less than a page.
        """
        return bool(message.after) and any(
            req.req_id == message.after
            and req.router == router
            and req.num_computed_tokens < req.num_prompt_tokens - 1
            for req in self._reqs.values()
        )
