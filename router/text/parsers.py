"""Splits a model's output, as it arrives, into its parts in their order: text, reasoning, calls.

Parsers take text in pieces of any size and return what is certain so far. The sum of what they
return does not depend on the sizes. What looks like a call and is none becomes text; what was `cut`
off before it could be told, and begins like a call, is dropped.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Literal, Protocol

# How a text has ended: by itself, by a limit of tokens, or before this stop string.
Cut = bool | str


@dataclass(slots=True)
class TextPart:
    """More of a text, or of the reasoning."""

    text: str
    kind: Literal["text", "reasoning"] = "text"


@dataclass(slots=True)
class CallPart:
    """What is new of one tool call; id and name come with its first part."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    is_whole: bool = False  # they end with these
    is_custom: bool = False  # then `arguments` are the tool's input

    @classmethod
    def begun(
        cls, index: int, name: str, arguments: str = "", *, short_id: bool = False
    ) -> CallPart:
        """The first part of a call; short_id: of 9 letters and digits, as some templates demand."""
        made = uuid.uuid4().hex
        call_id = made[:9] if short_id else f"call_{made[:24]}"
        return cls(index, arguments, call_id, name, is_whole=bool(arguments))


class Parsed:
    """What pieces of text turned out to hold, in order: neighbours are of different parts."""

    __slots__ = ("parts",)

    def __init__(self, *parts: TextPart | CallPart) -> None:
        self.parts = list(parts)

    @classmethod
    def of(cls, text: str, kind: Literal["text", "reasoning"] = "text") -> Parsed:
        """One part, or none if it is empty."""
        return cls(TextPart(text, kind)) if text else cls()

    def __iadd__(self, other: Parsed) -> Parsed:
        for part in other.parts:
            last = self.parts[-1] if self.parts else None
            if isinstance(part, TextPart):
                if isinstance(last, TextPart) and last.kind == part.kind:
                    last.text += part.text
                    continue
            elif isinstance(last, CallPart) and last.index == part.index:
                last.arguments += part.arguments
                last.is_whole = part.is_whole
                continue
            self.parts.append(part)
        return self

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def content(self) -> str:
        """All text."""
        return self._all("text")

    @property
    def reasoning(self) -> str:
        """All of it."""
        return self._all("reasoning")

    @property
    def calls(self) -> list[CallPart]:
        """The parts of calls."""
        return [part for part in self.parts if isinstance(part, CallPart)]

    def _all(self, kind: str) -> str:
        texts = (part for part in self.parts if isinstance(part, TextPart))
        return "".join(part.text for part in texts if part.kind == kind)


class Parser(Protocol):
    """One answer's parser."""

    def feed(self, text: str) -> Parsed:
        """What `text` adds."""
        ...

    def finish(self, *, cut: Cut = False) -> Parsed:
        """What was held back, now that the text has ended."""
        ...


class Plain(Parser):
    """Everything is content."""

    def feed(self, text: str) -> Parsed:
        return Parsed.of(text)

    def finish(self, *, cut: Cut = False) -> Parsed:
        return Parsed()


def sure(text: str, *marks: str) -> str:
    """`text` without what at its end could be the beginning of one of `marks`."""
    num_held = 0
    for mark in marks:
        if mark[0] in text[1 - len(mark) :]:  # most often it is not
            sizes = range(min(len(mark) - 1, len(text)), num_held, -1)
            num_held = next((size for size in sizes if text.endswith(mark[:size])), num_held)
    return text[: len(text) - num_held]


def kept(text: str, cut: Cut, *marks: str) -> str:
    """What there is of `text` at its end: one of `marks` that was cut off is no part of it."""
    if not cut:
        return text
    sure_text = sure(text, *marks)
    if cut is True:
        return sure_text
    begun = text[len(sure_text) :] + cut
    return sure_text if any(m.startswith(begun) or begun.startswith(m) for m in marks) else text


class Calls(Parser):
    """What parsers of calls share: the text that is not parsed yet, taken step by step."""

    def __init__(self) -> None:
        self._text = ""  # not parsed yet
        self.num_calls: int = 0  # that have ended

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while (step := self._step()) is not None:
            if parsed.parts:
                parsed += step
            else:
                parsed = step
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

    def finish(self, *, cut: Cut = False) -> Parsed:
        return self._first(self._inner.finish(cut=cut))

    def _first(self, parsed: Parsed) -> Parsed:
        """Drop what the token that ended the first call began after it."""
        calls = [part for part in parsed.calls if part.index > 0]
        parsed.parts = [part for part in parsed.parts if part not in calls]
        return parsed
