"""A reading that one scrape of the metrics shares."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
FRESH_S = 1.0  # for so long one reading serves all metrics of a scrape


class Fresh(Generic[T]):
    """Reads when it is asked, at most once in FRESH_S. Any thread may ask; one at a time reads."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._last: T
        self._read_at = float("-inf")

    def get(self) -> T:
        """What was read, at most FRESH_S ago."""
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_S:
                self._last, self._read_at = self._read(), time.monotonic()
            return self._last
