"""The router's event loop: it takes few events a turn.

What other threads post, tokens of all streams among it, has its turn between them. asyncio takes
all there are: 5,000 clients that asked or left in one moment held every stream up by 40 to 60 ms.
"""

import asyncio
import select
import selectors

MAX_TURN_EVENTS = 32


class _Epoll:
    """`select.epoll` that reports few events at a time; the kernel goes round."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.register, self.modify = self._epoll.register, self._epoll.modify
        self.unregister, self.close = self._epoll.unregister, self._epoll.close
        self.fileno = self._epoll.fileno

    def poll(self, timeout: float, max_events: int) -> list[tuple[int, int]]:
        """As `select.epoll.poll`."""
        return self._epoll.poll(timeout, min(max_events, MAX_TURN_EVENTS))


class _Selector(selectors.EpollSelector):
    _selector_cls = _Epoll  # the standard library makes one of these


def new_loop() -> asyncio.AbstractEventLoop:
    """For `asyncio.Runner`."""
    return asyncio.SelectorEventLoop(_Selector())
