"""How a worker tells of its start, before it can serve. Free of torch."""

from collections.abc import Callable
from typing import TypeAlias

# Called with the stage, `load` or `capture`, how much of it is done, and of how much.
Progress: TypeAlias = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """The Progress of a start that nobody watches."""
