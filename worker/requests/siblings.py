"""Further choices of a request (n > 1): they wait for the first one's prompt, then share its pages.

The router sends every choice as a request of its own, the later ones with `Generate.after`. Held
here until the first one's prompt is in the prefix tree, they match its whole pages and prefill the
rest, less than a page, by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from worker.api import Generate, PeerId
from worker.schedule.req import Req


class Siblings:
    """Requests that wait for another one. They hold no pages."""

    def __init__(self) -> None:
        self._held: list[tuple[PeerId, Generate]] = []

    @property
    def num_held(self) -> int:
        """Requests that wait."""
        return len(self._held)

    def holds(self, router: PeerId, message: Generate, reqs: Iterable[Req]) -> bool:
        """Keep `message` if it has to wait; False if it may be admitted now."""
        if not self._must_wait(router, message, reqs):
            return False
        same = [each for each in self._held if _key(each) == _key((router, message))]
        if not same:
            self._held.append((router, message))
        return True

    def due(self, reqs: Iterable[Req]) -> list[tuple[PeerId, Generate]]:
        """Those that need not wait any longer; they are forgotten here."""
        if not self._held:
            return []
        reqs = list(reqs)
        due = [each for each in self._held if not self._must_wait(*each, reqs)]
        self._held = [each for each in self._held if each not in due]
        return due

    def abort(self, req_id: str, dispatch: int) -> None:
        """That one is no longer wanted."""
        self._held = [e for e in self._held if (e[1].req_id, e[1].dispatch) != (req_id, dispatch)]

    def lost(self, router: PeerId) -> None:
        """Nobody wants what `router` asked for."""
        self._held = [each for each in self._held if each[0] != router]

    def _must_wait(self, router: PeerId, message: Generate, reqs: Iterable[Req]) -> bool:
        if not message.after:
            return False
        return any(
            req.req_id == message.after
            and req.router == router
            and req.num_computed_tokens < req.num_prompt_tokens - 1
            for req in reqs
        )


def _key(held: tuple[PeerId, Generate]) -> tuple[PeerId, str, int]:
    router, message = held
    return router, message.req_id, message.dispatch
