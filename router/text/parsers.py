"""Splits a model's output, as it arrives, into content and tool calls.

Parsers take text in pieces of any size and return what is certain so far. The sum of what they
return does not depend on the sizes. What looks like a call and is none becomes content; what a
limit of tokens has `cut` off before it could be told, and begins like a call, is dropped.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, cast

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

SURROGATE = re.compile("[\\ud800-\\udfff]")
MAX_HEAD = 512  # JSON that has not begun like a call after so many characters is content
HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
FIRST_KEY = re.compile(r'\s*\{\s*(?:"(\w*)("?)|$)')
KEYS = ("type", "name", "arguments", "parameters")  # with which the JSON of a call may begin


@dataclass(slots=True)
class CallPart:
    """What is new of one tool call; id and name come with its first part."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    is_custom: bool = False  # then `arguments` are the tool's input


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


def held(text: str, marker: str) -> int:
    """How many of the last characters of `text` could be the beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


class End:
    """Finds the end of a JSON object that arrives in pieces, from its opening brace on.

    With `quotes` of both kinds, and brackets in pairs of `brackets`, also that of Python's calls.
    """

    def __init__(self, quotes: str = '"', brackets: str = "{}[]") -> None:
        self._quotes, self._opening, self._closing = quotes, brackets[::2], brackets[1::2]
        self._depth = 0
        self._quote = ""  # in whose text it is
        self._escaped = False

    def feed(self, text: str) -> int:
        """Index just past the object's end in `text`; -1 if it does not end there."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in self._quotes:
                self._quote = char
            elif char in self._opening:
                self._depth += 1
            elif char in self._closing:
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return -1


class Call:
    """One call. It begins once its head is complete; arguments are passed on as they arrive."""

    def __init__(self, index: int) -> None:
        self.started = False
        self._index = index
        self._arguments: End | None = None

    def head(self, text: str) -> tuple[Parsed, int]:
        """The first part, and where in `text` the arguments begin; or nothing, and 0."""
        head = HEAD.match(text)
        name = _loaded(head.group(1)) if head else None
        if head is None or not _is_text(name):
            return Parsed(), 0
        self.started, self._arguments = True, End()
        return self._first(name, ""), head.end()

    def whole(self, text: str) -> Parsed | None:
        """The call that a complete JSON text is; None if it is no call."""
        value = _loaded(text)
        if not isinstance(value, dict):
            return None
        fields = cast("dict[str, Any]", value)
        name = fields.get("name")
        arguments = fields.get("arguments", fields.get("parameters", {}))
        text = json.dumps(arguments) if isinstance(arguments, dict) else arguments
        if not _is_text(name) or not _is_text(text):
            return None
        self.started = True
        return self._first(name, text)

    def arguments(self, text: str) -> tuple[Parsed, int]:
        """More of the arguments, and how many characters of `text` are theirs."""
        if self._arguments is None:
            return Parsed(), 0
        end = self._arguments.feed(text)
        if end >= 0:
            self._arguments = None
        taken = end if end >= 0 else len(text)
        part = CallPart(self._index, text[:taken])
        return Parsed(calls=[part] if taken else []), taken

    @property
    def over(self) -> bool:
        """Whether all of it is here."""
        return self.started and self._arguments is None

    def named(self, name: str) -> Parsed:
        """The first part of a call whose name stood apart; its arguments follow."""
        self.started, self._arguments = True, End()
        return self._first(name, "")

    def _first(self, name: str, arguments: str) -> Parsed:
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        return Parsed(calls=[CallPart(self._index, arguments, call_id, name)])


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether `value` is text for a response; an escape may have made half a surrogate pair."""
    return isinstance(value, str) and not SURROGATE.search(value)


class Calls(Parser):
    """What formats share: the text that is not parsed yet, taken step by step."""

    def __init__(self) -> None:
        self._text = ""  # not parsed yet
        self._call: Call | None = None
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

    def _arguments(self, call: Call) -> Parsed:
        """More of a call that has begun."""
        parsed, taken = call.arguments(self._text)
        self._text = self._text[taken:]
        return parsed

    def _to_its_end(self, call: Call) -> Parsed | None:
        """The same of a call that its arguments end."""
        parsed = self._arguments(call)
        if call.over:
            self._call = None
            self.num_calls += 1
            return parsed
        return parsed or None


class Hermes(Calls):
    """Calls are <tool_call>{"name": ..., "arguments": {...}}</tool_call>; the rest is content."""

    def __init__(self) -> None:
        super().__init__()
        self._in_content = False  # content was returned since the last call

    def finish(self, *, cut: bool = False) -> Parsed:
        parsed, call, text = Parsed(), self._call, self._text
        if call is None:
            num_held = held(text, CALL) if cut else 0
            parsed.content = text[:-num_held].rstrip() if num_held else text
        elif not call.started:
            whole = text[: len(text) - held(text, CALL_END)]
            parsed = call.whole(whole) or Parsed("" if cut else CALL + text)
        self._text, self._call = "", None
        return parsed

    def _step(self) -> Parsed | None:
        call = self._call
        if call is None:
            return self._content()
        if not call.started:
            parsed, start = call.head(self._text)
            if call.started:
                self._text = self._text[start:]
                return parsed
            body, end, rest = self._text.partition(CALL_END)
            if not end:
                return None
            self._text, self._call = rest, None
            parsed = call.whole(body) or Parsed(CALL + body + CALL_END)
            self.num_calls += call.started
            return parsed
        if parsed := self._arguments(call):
            return parsed
        _, end, rest = self._text.partition(CALL_END)
        if not end:
            return None
        self.num_calls += 1
        self._text, self._call = rest, None
        return Parsed()

    def _content(self) -> Parsed | None:
        """The content before a call; white space around calls only separates them."""
        if self.num_calls and not self._in_content:
            self._text = self._text.lstrip()
        before, marker, after = self._text.partition(CALL)
        if marker:
            self._text, self._call, self._in_content = after, Call(self.num_calls), False
            return Parsed(before.rstrip())
        cut = len(self._text[: len(self._text) - held(self._text, CALL)].rstrip())
        if not cut:
            return None
        text, self._text, self._in_content = self._text[:cut], self._text[cut:], True
        return Parsed(text)


class AllCalls(Calls):
    """All of the answer is calls of functions with these names, or it is content."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._is_content = False

    def feed(self, text: str) -> Parsed:
        return Parsed(text) if self._is_content else super().feed(text)

    def _give_up(self) -> Parsed:
        self._is_content, text, self._text = True, self._text, ""
        return Parsed(text)


class Llama3(AllCalls):
    """Calls are {"name": ..., "parameters": {...}} with ; between."""

    def finish(self, *, cut: bool = False) -> Parsed:
        rest, self._text = self._text, ""
        between = self.num_calls > 0 or self._call is not None
        is_call = cut and _may_be_call(rest.lstrip(" \r\n\t;}" if between else None))
        is_call = is_call or (between and not rest.strip(" \r\n\t;}"))
        return Parsed("" if is_call else rest)

    def _step(self) -> Parsed | None:
        if self._call is not None:
            return self._more(self._call)
        text = self._text.lstrip(" \r\n\t;" if self.num_calls else None)
        text = text.removeprefix(PYTHON_TAG).lstrip()
        if PYTHON_TAG.startswith(text):
            return None
        if not text.startswith("{"):
            return self._give_up()
        call = Call(self.num_calls)
        parsed, start = call.head(text)
        if not call.started:
            end = End().feed(text)
            if end < 0:
                return None if len(text) < MAX_HEAD else self._give_up()
            parsed, start = call.whole(text[:end]) or Parsed(), end
        if not parsed.calls or parsed.calls[0].name not in self._names:
            return self._give_up()
        self._text, self._call = text[start:], call
        return parsed

    def _more(self, call: Call) -> Parsed | None:
        if parsed := self._arguments(call):
            return parsed
        rest = self._text.lstrip()
        if not rest:
            return None
        self.num_calls += 1
        self._call = None
        self._text = rest.removeprefix("}")
        return Parsed()


def _may_be_call(text: str) -> bool:
    """Whether a text that was cut off is the beginning of one of Llama 3's calls."""
    if PYTHON_TAG.startswith(text):
        return bool(text)
    key = FIRST_KEY.match(text.removeprefix(PYTHON_TAG))
    if key is None or key[1] is None:
        return key is not None
    return key[1] in KEYS if key[2] else any(known.startswith(key[1]) for known in KEYS)


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
