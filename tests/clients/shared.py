"""What the checks of all libraries share: a question, a schema, a function, and how they are run.

Imports nothing of kvlane, as each virtual environment has its clients only. The bundled model
solves word problems and knows nothing else: that an answer has the form that was asked for is
kvlane's doing, and what stands in it is the model's text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, Field

QUESTION = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?"
ANSWER = "#### 70"
USER: Any = [{"role": "user", "content": QUESTION}]


class Unit(StrEnum):
    """What is counted."""

    apples = "apples"
    bags = "bags"


class Item(BaseModel):
    """Something that somebody has."""

    unit: Unit
    count: int


class Solution(BaseModel):
    """The solution of a word problem."""

    reasoning: str = Field(description="how it was found")
    first: Item
    others: list[Item]
    total: int = Field(description="the number that was asked for")
    note: str | None = None


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


Check = Callable[[str], None]


def main(library: str, checks: Sequence[Check], *, at_once: bool = False) -> None:
    """Run every check against the server whose address is the only argument, and name it.

    at_once: beside one another, as the answers of none depend on what else is asked.
    """
    print(library, version(library))

    def run(check: Check) -> None:
        check(f"{sys.argv[1]}/v1")
        print("passed", check.__name__, flush=True)

    with ThreadPoolExecutor(len(checks) if at_once else 1) as pool:
        list(pool.map(run, checks))
