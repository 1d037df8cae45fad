"""The contract of a store of KV objects, which a `Row` has; see `objects.py`.

`put`, `get` and `close` belong to the row's threads, and may hang: many of them call `get` at once,
but then nobody `put`. The engine's thread asks `exists` alone.
"""

from collections.abc import Callable
from typing import Protocol

Fill = Callable[[memoryview], bool]
Take = Callable[[memoryview], None]


class PageStore(Protocol):
    """Keeps objects of one length by key, as many as its budget allows; the oldest go first."""

    name: str  # of the tier, as metrics have it
    every: int  # of its objects' checksums
    run: int  # objects that a thread has at once; if several, they are good until the next `put`
    num_bytes: int  # kept

    def exists(self, key: bytes) -> bool:
        """Whether an object seems to be there; returns at once. For any thread."""
        ...

    def put(self, key: bytes, fill: Fill) -> bool:
        """Have `fill` write an object, which is kept if it returns True; whether it is kept.

        Raises OSError if the store has no room or does not work.
        """
        ...

    def get(self, key: bytes, take: Take) -> None:
        """Call `take` with an object, which is good until that returns; see `run`.

        Raises KeyError: there is none. OSError: the store does not work. And what `take` raises.
        """
        ...

    def forget(self, key: bytes = b"") -> None:
        """Delete an object, or all. For any thread."""
        ...

    def close(self) -> None:
        """Give back memory and descriptors; files stay."""
