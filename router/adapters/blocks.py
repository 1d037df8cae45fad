"""The parts of a chat's answer in their order: reasoning, text and calls, as they arrive."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from msgspec.structs import replace

from router.dispatch.mailbox import Delta
from router.openai.chat import ChatWriter
from router.text.parsers import CallPart, TextPart

Kind = Literal["reasoning", "text", "call", "custom"]


@dataclass(slots=True)
class Block:
    """One part; `text` is all of it so far, of a call its arguments, or a custom one's input."""

    kind: Kind
    index: int  # in the answer
    id: str = ""  # of a call, as its name
    name: str = ""
    text: str = ""
    is_cut: bool = False  # a call that is not whole, or text that a limit of tokens has ended
    scored: list[Any] = field(default_factory=list[Any])  # logprobs of its tokens, if wanted


# What happened, to which, and the text that "more" adds.
Step = tuple[Literal["open", "more", "close"], Block, str]


class Blocks:
    """Those of one answer; the last of `all` may still be open. An answer has at least one."""

    def __init__(self, writer: ChatWriter) -> None:
        self.all: list[Block] = []
        self.reason: str | None = None  # why the answer has ended, as a chat says it
        self._writer = writer
        self._is_open = False
        self._places = Places()

    def feed(self, delta: Delta, scored: Sequence[Any] = ()) -> Iterator[Step]:
        """What a delta does; the last one closes the last block. scored: its tokens' logprobs."""
        for piece in self._places.pieces(delta, scored):
            for part in self._writer.parsed(piece).parts:
                yield from self._call(part) if isinstance(part, CallPart) else self._text(part)
        self.reason = self._writer.reason(delta)
        if self.reason is not None:
            if not self.all:
                yield self._open("text")
            if self.all[-1].kind == "text" and self.reason == "length":
                self.all[-1].is_cut = True
            yield from self._close()

    @property
    def is_cut(self) -> bool:
        """Whether the answer has not come to its own end."""
        return self.reason == "length" or (self.reason == "stop" and self.all[-1].is_cut)

    def _text(self, part: TextPart) -> Iterator[Step]:
        if not self._is_open or self.all[-1].kind != part.kind:
            yield from self._close()
            yield self._open(part.kind)
        found = self._places.take(part.text)
        if part.kind == "text":
            self.all[-1].scored += found
        yield self._more(part.text)

    def _call(self, part: CallPart) -> Iterator[Step]:
        self._places.skip()
        if part.id:
            yield from self._close()
            yield self._open("custom" if part.is_custom else "call", part.id, part.name)
        if part.arguments:
            yield self._more(part.arguments)
        if part.is_whole:
            self.all[-1].is_cut = False
            yield from self._close()

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> Step:
        self._is_open = True
        self.all.append(Block(kind, len(self.all), call_id, name, is_cut=bool(call_id)))
        return "open", self.all[-1], ""

    def _more(self, text: str) -> Step:
        self.all[-1].text += text
        return "more", self.all[-1], text

    def _close(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield "close", self.all[-1], ""


class Places:
    """Which tokens with logprobs stand in which text. Positions count from the answer's start.

    A delta is parsed token by token, so what a token makes certain ends with it, but for what may
    be a mark: a text that does not go on is the last of its kind there.
    """

    def __init__(self) -> None:
        self._text = ""  # all that was parsed
        self._end = 0  # of the last text that was taken
        self._goes_on = True  # no call has come since
        self._tokens: list[tuple[int, Any]] = []  # where they begin; which of them are behind it

    def pieces(self, delta: Delta, scored: Sequence[Any]) -> Iterator[Delta]:
        """A delta as the deltas of its tokens."""
        if not scored and not self._tokens:
            yield delta
            return
        self._tokens += zip(delta.starts, scored, strict=True)
        begun, size, at = len(self._text), len(delta.text), 0
        coming = takewhile(lambda token: token[0] > begun, reversed(self._tokens))
        for cut in sorted({start - begun for start, _ in coming}):
            if cut < size:
                self._text += delta.text[at:cut]
                yield Delta(delta.index, delta.text[at:cut])
                at = cut
        self._text += delta.text[at:]
        yield replace(delta, text=delta.text[at:])

    def skip(self) -> None:
        """A call has come."""
        self._goes_on = False

    def take(self, text: str) -> list[Any]:
        """The logprobs of the tokens of a text that was found; they are taken once."""
        if not self._tokens:
            return []
        if not (self._goes_on and self._text.startswith(text, self._end)):
            self._end = max(self._end, self._text.rfind(text, self._end))
        begin, self._end, self._goes_on = self._end, self._end + len(text), True
        found, num = list[Any](), 0
        while num < len(self._tokens) and self._tokens[num][0] < self._end:
            start, scores = self._tokens[num]
            num += 1
            end = self._tokens[num][0] if num < len(self._tokens) else len(self._text)
            if max(end, start + 1) > begin:  # those of a part of a character have no width
                found.append(scores)
        del self._tokens[:num]
        return found
