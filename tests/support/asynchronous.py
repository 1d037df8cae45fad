"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

LIMIT_S = 10.0

P = ParamSpec("P")


def asynchronous(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test in an event loop of its own, for a limited time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return run
