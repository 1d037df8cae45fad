"""How long tests wait for what has to come: as upper bounds, where something hangs.

A shared machine may have a tenth of its cores for minutes (seen: 88 % were taken by others), and
may stand still for seconds. So no test may fail because something was slow.
"""

import time
from collections.abc import Callable

HANG_S = 300.0


def until(
    happened: Callable[[], bool],
    otherwise: str = "hangs",
    act: Callable[[], object] = lambda: time.sleep(0.005),
) -> None:
    """Acts again and again until something has happened.

    otherwise: what is wrong if it never does.
    """
    limit = time.monotonic() + HANG_S
    while not happened():
        assert time.monotonic() < limit, otherwise
        act()
