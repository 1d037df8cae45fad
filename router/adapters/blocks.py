"""The parts of a chat's answer in their order: reasoning, text and calls, as they arrive."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from router.dispatch.mailbox import Delta
from router.openai.chat import ChatWriter
from router.text.parsers import Parsed

Kind = Literal["reasoning", "text", "call", "custom"]


@dataclass(slots=True)
class Block:
    """One part; `text` is all of it so far, of a call its arguments, or a custom one's input."""

    kind: Kind
    index: int  # in the answer
    id: str = ""  # of a call, as its name
    name: str = ""
    text: str = ""


# What happened, to which, and the text that "more" adds.
Step = tuple[Literal["open", "more", "close"], Block, str]


class Blocks:
    """Those of one answer; the last of `all` may still be open. An answer has at least one."""

    def __init__(self, writer: ChatWriter) -> None:
        self.all: list[Block] = []
        self.reason: str | None = None  # why the answer has ended, as a chat says it
        self._writer = writer
        self._is_open = False

    def feed(self, delta: Delta) -> Iterator[Step]:
        """What a delta does; the last one closes the last block."""
        yield from self._parsed(self._writer.parsed(delta))
        self.reason = self._writer.reason(delta)
        if self.reason is not None:
            if not self.all:
                yield self._open("text")
            yield from self._close()

    def _parsed(self, parsed: Parsed) -> Iterator[Step]:
        kinds: tuple[tuple[Kind, str], ...] = (
            ("reasoning", parsed.reasoning), ("text", parsed.content),
        )  # fmt: skip
        for kind, text in kinds:
            if text:
                if not self._is_open or self.all[-1].kind != kind:
                    yield from self._close()
                    yield self._open(kind)
                yield self._more(text)
        for part in parsed.calls:
            if part.id:
                yield from self._close()
                yield self._open("custom" if part.is_custom else "call", part.id, part.name)
            if part.arguments:
                yield self._more(part.arguments)

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> Step:
        self._is_open = True
        self.all.append(Block(kind, len(self.all), call_id, name))
        return "open", self.all[-1], ""

    def _more(self, text: str) -> Step:
        self.all[-1].text += text
        return "more", self.all[-1], text

    def _close(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield "close", self.all[-1], ""
