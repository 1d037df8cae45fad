"""Further choices of a request (n > 1): they wait for the first one's prompt, then share its pages.

The router sends every choice as a request of its own, later choices with `Generate.after`. Once the
first choice's prompt is in the prefix tree, later choices match its whole pages. Each prefills the
rest, less than a page, by itself.
"""

from collections.abc import Collection

from worker.api import Generate, PeerId
from worker.schedule.req import Req


class Siblings:
    """Choices that wait until the first one's prompt is in the prefix tree. They hold no pages."""

    def __init__(self) -> None:
        # Router, req_id, dispatch -> the request, and when it came.
        self.waiting: dict[tuple[PeerId, str, int], tuple[Generate, float]] = {}

    def defer(
        self, router: PeerId, message: Generate, received_at: float, reqs: Collection[Req]
    ) -> bool:
        """Queue `message` if it has to wait, and say whether it does."""
        waits = _must_wait(router, message, reqs)
        if waits:
            key = router, message.req_id, message.dispatch
            self.waiting.setdefault(key, (message, received_at))
        return waits

    def due(self, reqs: Collection[Req]) -> list[tuple[PeerId, Generate, float]]:
        """Remove and return requests that need not wait any longer, with the time of arrival."""
        due = [k for k, each in self.waiting.items() if not _must_wait(k[0], each[0], reqs)]
        return [(key[0], *self.waiting.pop(key)) for key in due]

    def abort(self, req_id: str, dispatch: int) -> None:
        """Forget the waiting request (req_id, dispatch)."""
        self.waiting = {k: v for k, v in self.waiting.items() if k[1:] != (req_id, dispatch)}

    def lost(self, router: PeerId) -> None:
        """Forget the waiting requests of `router`."""
        self.waiting = {k: v for k, v in self.waiting.items() if k[0] != router}


def _must_wait(router: PeerId, message: Generate, reqs: Collection[Req]) -> bool:
    return bool(message.after) and any(
        req.req_id == message.after
        and req.router == router
        and req.num_computed_tokens < req.num_prompt_tokens - 1
        for req in reqs
    )
