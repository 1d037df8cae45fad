"""What happens again and again is logged now and then; free of everything else of ours."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

MAX_TOLD = 1024  # of whom, and what they did
LATELY_S = 600.0  # after which the log says it again


@dataclass(slots=True)
class Seldom:
    """Counts what others do, and says when the log is to tell it. Any thread may ask."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since: float = 0.0
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def news(self, who: str, what: str) -> int:
        """How often somebody has done something lately, if the log is to say so: the first time,
        the tenth, the hundredth, ...; else 0.
        """
        now = time.monotonic()
        with self._lock:
            if len(self._counts) >= MAX_TOLD or now - self._since > LATELY_S:
                self._counts.clear()
                self._since = now
            self._counts[who, what] += 1
            num = self._counts[who, what]
        return num if num == 10 ** (len(str(num)) - 1) else 0
