"""Requests that are not admitted yet: they wait for their grammar, or for another's prompt."""

from collections.abc import Callable, Iterator, Mapping

from worker.api import Generate, PeerId
from worker.errors import Busy
from worker.requests.admission import BUSY_RETRY_S, Admission
from worker.requests.replies import Key
from worker.schedule.req import Req


class Deferred:
    """They hold no pages. At most as many wait as may be admitted.

    `siblings` are further choices (n > 1) that wait for the first one's prompt, the others wait for
    their grammar; each with when it came. `reqs` are those that are admitted.
    """

    def __init__(self, admission: Admission, reqs: Mapping[tuple[str, int], Req]) -> None:
        self.siblings: dict[Key, tuple[Generate, float]] = {}
        self.compiling: dict[Key, tuple[Generate, float]] = {}
        self._admission, self._reqs = admission, reqs

    def __len__(self) -> int:
        return len(self.compiling) + len(self.siblings)

    def take(self, router: PeerId, message: Generate, received_at: float) -> bool:
        """Whether it has to wait, which it does here; raises Busy if too many do already."""
        key = router, message.req_id, message.dispatch
        if key in self.compiling or key in self.siblings:
            return True
        may_wait = bool(message.sampling.grammar or message.after)
        limit = self._admission.max_reqs
        waiting = ((each[0], 1) for each in (*self.compiling, *self.siblings))
        if may_wait and not self._admission.shares.allow(
            router, limit, limit - len(self) - 1, waiting
        ):
            raise Busy("too many requests", BUSY_RETRY_S)
        if self._admission.compiles(message):
            self.compiling[key] = message, received_at
            return True
        if self._waits(router, message):
            self.siblings[key] = message, received_at
            return True
        return False

    def ready(self) -> Iterator[tuple[PeerId, Generate, float, str]]:
        """Those that need not wait any more, and the stage in which they did; they leave."""
        waiting = self.compiling.items()
        for key in [key for key, (each, _) in waiting if not self._admission.compiles(each)]:
            yield key[0], *self.compiling.pop(key), "grammar"
        waiting = self.siblings.items()
        for key in [key for key, (each, _) in waiting if not self._waits(key[0], each)]:
            yield key[0], *self.siblings.pop(key), "sibling"

    def forget(self, is_meant: Callable[[Key], bool]) -> None:
        """Drop some."""
        for deferred in (self.siblings, self.compiling):
            for key in [key for key in deferred if is_meant(key)]:
                del deferred[key]

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
