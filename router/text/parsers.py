"""Splits a model's output, as it arrives, into content and tool calls.

Parsers take text in pieces of any size and return what is certain so far. The sum of what they
return does not depend on the sizes. What looks like a call and is none becomes content; what a
limit of tokens has `cut` off before it could be told, and begins like a call, is dropped.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallPart:
    """What is new of one tool call; id and name come with its first part."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    is_custom: bool = False  # then `arguments` are the tool's input

    @classmethod
    def begun(
        cls, index: int, name: str, arguments: str = "", *, short_id: bool = False
    ) -> CallPart:
        """The first part of a call; short_id: of 9 letters and digits, as some templates demand."""
        made = uuid.uuid4().hex
        return cls(index, arguments, made[:9] if short_id else f"call_{made[:24]}", name)


@dataclass(slots=True)
class Parsed:
    """The content, reasoning and calls that pieces of text turned out to hold."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list[CallPart])

    def __iadd__(self, other: Parsed) -> Parsed:
        self.content += other.content
        self.reasoning += other.reasoning
        for part in other.calls:
            last = self.calls[-1] if self.calls else None
            if last is not None and last.index == part.index:
                last.arguments += part.arguments
            else:
                self.calls.append(part)
        return self

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Parser(Protocol):
    """One answer's parser."""

    def feed(self, text: str) -> Parsed:
        """What `text` adds."""
        ...

    def finish(self, *, cut: bool = False) -> Parsed:
        """What was held back, now that the text has ended; `cut`: by a limit of tokens."""
        ...


class Plain(Parser):
    """Everything is content."""

    def feed(self, text: str) -> Parsed:
        return Parsed(text)

    def finish(self, *, cut: bool = False) -> Parsed:
        return Parsed()


def sure(text: str, *marks: str) -> str:
    """`text` without what at its end could be the beginning of one of `marks`."""
    num_held = 0
    for mark in marks:
        if mark[0] in text[1 - len(mark) :]:  # most often it is not
            sizes = range(min(len(mark) - 1, len(text)), num_held, -1)
            num_held = next((size for size in sizes if text.endswith(mark[:size])), num_held)
    return text[: len(text) - num_held]


class Calls(Parser):
    """What parsers of calls share: the text that is not parsed yet, taken step by step."""

    def __init__(self) -> None:
        self._text = ""  # not parsed yet
        self.num_calls: int = 0  # that have ended

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while (step := self._step()) is not None:
            parsed += step
        return parsed

    def _step(self) -> Parsed | None:
        """The next part that is certain; None when more text is needed."""
        raise NotImplementedError


class FirstCallOnly(Parser):
    """For parallel_tool_calls = false: the answer ends with its first call."""

    def __init__(self, inner: Calls) -> None:
        self._inner = inner

    @property
    def over(self) -> bool:
        """Whether the first call has ended."""
        return self._inner.num_calls > 0

    def feed(self, text: str) -> Parsed:
        return self._first(self._inner.feed(text))

    def finish(self, *, cut: bool = False) -> Parsed:
        return self._first(self._inner.finish(cut=cut))

    def _first(self, parsed: Parsed) -> Parsed:
        """Drop what the token that ended the first call began after it."""
        parsed.calls = [part for part in parsed.calls if part.index == 0]
        return parsed
