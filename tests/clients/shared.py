"""What the checks of all libraries share: a question, a schema, a function, and how they are run.

Imports nothing of kvlane, as each virtual environment has its clients only. The bundled model
solves word problems and knows nothing else: that an answer has the form that was asked for is
kvlane's doing, and what stands in it is the model's text.
"""

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, Field

QUESTION = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?"
ANSWER = "#### 70"
USER: Any = [{"role": "user", "content": QUESTION}]
ADD_NAMED: Any = {"type": "function", "function": {"name": "add"}}


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
    others: list[Item] = Field(max_length=3)  # the model would list more until its context ends
    total: int = Field(description="the number that was asked for")
    note: str | None = None


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def add_tool(**number: int) -> Any:
    """`add` as OpenAI's API describes functions, with these limits of both numbers."""
    numbers = {name: {"type": "integer", **number} for name in ("a", "b")}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    described = {"description": "Add two numbers.", "parameters": parameters}
    return {"type": "function", "function": {"name": "add", **described}}


def text_of(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def main(
    library: str,
    *checks: Callable[[Any], None],
    connect: Callable[[str], Any] = str,
    at_once: bool = False,
) -> None:
    """Run the checks against the server whose address is the only argument; name the library.

    checks: take what `connect` makes of the API's address. at_once: beside one another.
    """
    print(library, version(library))

    def run(check: Callable[[Any], None]) -> None:
        check(connect(f"{sys.argv[1]}/v1"))
        print("passed", check.__name__, flush=True)

    with ThreadPoolExecutor(len(checks) if at_once else 1) as pool:
        list(pool.map(run, checks))
