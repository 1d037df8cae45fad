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
from typing import Any, Protocol

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


class Library(Protocol):
    """What a library for chats does with the API; whatever it yields is checked in one place."""

    def texts(self) -> Iterable[str]:
        """Answers to the question, in each way that the library has."""
        ...

    def streams(self) -> Iterable[list[str]]:
        """The pieces of such answers."""
        ...

    def calls(self) -> Iterable[dict[str, Any]]:
        """Arguments of calls of `add` that were demanded; their results have been sent back."""
        ...

    def solutions(self) -> Iterable[Any]:
        """Answers of the form `Solution`."""
        ...


def chat(library: Library) -> None:
    assert all([text.endswith(ANSWER) for text in library.texts()])


def stream(library: Library) -> None:
    for pieces in library.streams():
        assert len(pieces) > 5
        assert "".join(pieces).endswith(ANSWER)


def tools(library: Library) -> None:
    calls = list(library.calls())
    assert calls
    for call in calls:
        Add.model_validate(call)


def structured_output(library: Library) -> None:
    for made in library.solutions():
        assert isinstance(made, Solution)


CHATS: tuple[Callable[[Any], None], ...] = (chat, stream, tools, structured_output)


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
