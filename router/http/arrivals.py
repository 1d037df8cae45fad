"""Requests on their way, from their head until they are dispatched or answered: how many a source
has, and how many bytes of bodies.
"""

from dataclasses import dataclass

from router.config import RouterConfig
from router.errors import ApiError


@dataclass(slots=True, eq=False)
class Arrival:
    """One request; it counts until `over`."""

    arrivals: "Arrivals"
    source: str
    num_bytes: int = 0
    is_over: bool = False

    def takes(self, num_bytes: int) -> None:
        """So much of its body has come; raises as `Arrivals.check`."""
        self.arrivals.check(self.source, num_bytes)
        self.num_bytes += num_bytes
        self.arrivals.add(self.source, num_bytes=num_bytes)

    def expects(self, num_bytes: int) -> None:
        """So long a body is announced; raises as `Arrivals.check`."""
        self.arrivals.check(self.source, num_bytes)

    def over(self) -> None:
        """Its body is not held any more; a second call does nothing."""
        if not self.is_over:
            self.is_over = True
            self.arrivals.add(self.source, num=-1, num_bytes=-self.num_bytes)


class Arrivals:
    """All of a router. A source has at most half of the bytes, or one body. Loop only."""

    def __init__(self, config: RouterConfig) -> None:
        self._max = max(config.max_bodies_mib << 20, config.max_body_bytes)
        self._own = max(self._max // 2, config.max_body_bytes)
        self._nums, self._bytes = dict[str, int](), dict[str, int]()
        self.num = self.num_bytes = 0

    def begin(self, source: str) -> Arrival:
        """A request, whose head is here."""
        self.add(source, num=1)
        return Arrival(self, source)

    def num_of(self, source: str) -> int:
        """Requests of a source."""
        return self._nums.get(source, 0)

    def check(self, source: str, num_bytes: int) -> None:
        """Raise an ApiError, 429, if so many more bytes of bodies are too many."""
        own = self._bytes.get(source, 0) + num_bytes > self._own
        if own or self.num_bytes + num_bytes > self._max:
            mib, whose = (self._own if own else self._max) >> 20, "one client's " if own else ""
            message = f"{whose}bodies on their way have {mib} MiB at most (router.max_bodies_mib)"
            raise ApiError("busy", message)

    def add(self, source: str, *, num: int = 0, num_bytes: int = 0) -> None:
        """Count more, or less."""
        self.num, self.num_bytes = self.num + num, self.num_bytes + num_bytes
        for counts, more in ((self._nums, num), (self._bytes, num_bytes)):
            if now := counts.get(source, 0) + more:
                counts[source] = now
            elif more:
                del counts[source]
