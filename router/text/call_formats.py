"""How further families write calls, and gpt-oss all that it says; see `parsers`.

Marked   MARK [{"name": ..., "arguments": {...}}, ...]    Granite, Phi-4-mini, Mistral
         MARK name {...} MARK name [ARGS] {...}           Mistral from v11 on
         ```tool_code, name(argument=value, ...), ```     Gemma
Bare     name, a new line, {...}, and nothing else        GLM-4-0414
Harmony  <|channel|>...<|message|>...<|end|>              gpt-oss: reasoning, calls, content
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from router.text.parsers import AllCalls, Call, Calls, End, Parsed, held

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")  # of a message in harmony
RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?\s*(?:\[ARGS\])?\s*(?=\{)")
PYTHON = re.compile(r"[A-Za-z_][\w.]*\(")
BARE_NAME = re.compile(r"([\w.-]+)\s*(?=\{)")
BEGUN = re.compile(r"[\w.-]+(\[\w*\]?[\w-]*)*\s*")  # of NAME, as far as it is here
MAX_NAME = 256  # characters after which what begins like a name is none


def held_of(text: str, marks: Sequence[str]) -> int:
    """How many of the last characters of `text` could be the beginning of one of `marks`."""
    return max(held(text, mark) for mark in marks)


def first_of(text: str, marks: Sequence[str]) -> tuple[str, str, str] | None:
    """`text` before, at and behind the mark that comes first; None: there is none."""
    found = [(text.index(mark), -len(mark), mark) for mark in marks if mark in text]
    if not found:
        return None
    at, _, mark = min(found)
    return text[:at], mark, text[at + len(mark) :]


def python_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call with arguments by name; None: it is no such call."""
    try:
        call: Any = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and call.args:
            call = call.args[0]
        if not isinstance(call, ast.Call) or call.args:
            return None
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        return None if None in given else (ast.unparse(call.func), json.dumps(given))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


class Marked(Calls):
    """Content, and behind a mark calls: in JSON, one or a list, or names with their arguments.

    What stands behind calls, and is none, is content again. closes: marks that end calls. python:
    calls may be written as Python does.
    """

    def __init__(
        self, marks: Sequence[str], closes: Sequence[str] = (), *, python: bool = False
    ) -> None:
        super().__init__()
        self._marks, self._closes, self._python = marks, closes, python
        self._mark = ""  # behind which the text is
        self._num_before = 0  # calls before this mark

    def finish(self, *, cut: bool = False) -> Parsed:
        text, self._text = self._text, ""
        if self._call is not None:
            return Parsed()
        if not self._mark:
            num_held = held_of(text, self._marks) if cut else 0
            text = text[: len(text) - num_held] if num_held else text
            return Parsed(text.rstrip() if num_held or self.num_calls else text)
        begins_call = cut or self.num_calls > self._num_before
        return Parsed("" if begins_call else self._mark + text)

    def _step(self) -> Parsed | None:
        if self._call is not None:
            return self._to_its_end(self._call)
        if not self._mark:
            return self._content()
        is_first = self.num_calls == self._num_before
        text = self._text.lstrip(" \r\n\t[" if is_first else " \r\n\t,;]}")
        ends = () if is_first else (*self._marks, *self._closes)
        if not text or any(mark.startswith(text) and mark != text for mark in ends):
            return None
        closed = next((mark for mark in self._closes if text.startswith(mark)), "")
        if closed and not is_first:
            self._text, self._mark = text[len(closed) :], ""
            return Parsed()
        if text.startswith("{"):
            return self._json(text)
        if self._python and PYTHON.match(text):
            return self._of_python(text, is_first)
        if is_first and (found := NAME.match(text)):
            self._text, self._call = text[found.end() :], Call(self.num_calls)
            return self._call.named(found[1])
        begun = BEGUN.fullmatch(text)
        if (is_first or self._python) and begun is not None and len(text) < MAX_NAME:
            return None
        return self._no_call(is_first, text)

    def _json(self, text: str) -> Parsed | None:
        call = Call(self.num_calls)
        parsed, start = call.head(text)
        if not call.started:
            end = End().feed(text)
            if end < 0:
                return None
            whole, start = call.whole(text[:end]), end
            if whole is None:
                return self._no_call(self.num_calls == self._num_before, text)
            self.num_calls += 1
            self._text = text[start:]
            return whole
        self._text, self._call = text[start:], call
        return parsed

    def _of_python(self, text: str, is_first: bool) -> Parsed | None:
        end = End("\"'", "()[]{}").feed(text)
        if end < 0:
            return None
        made = python_call(text[:end])
        if made is None:
            return self._no_call(is_first, text)
        self._text, call = text[end:], Call(self.num_calls)
        parsed = call.named(made[0])
        parsed += call.arguments(made[1])[0]
        self.num_calls += 1
        return parsed

    def _content(self) -> Parsed | None:
        if found := first_of(self._text, self._marks):
            before, self._mark, self._text = found
            self._num_before = self.num_calls
            return Parsed(before.rstrip())
        cut = len(self._text[: len(self._text) - held_of(self._text, self._marks)].rstrip())
        if not cut:
            return None
        text, self._text = self._text[:cut], self._text[cut:]
        return Parsed(text)

    def _no_call(self, is_first: bool, text: str) -> Parsed:
        """What followed the mark, or the last call, is content."""
        shown = self._mark if is_first else ""
        self._text = self._text if is_first else text
        self._mark = ""
        return Parsed(shown)


class Bare(AllCalls):
    """The answer is one call: a name, a new line and arguments."""

    def finish(self, *, cut: bool = False) -> Parsed:
        text, self._text = self._text, ""
        is_call = self._call is not None or self.num_calls or (cut and self._may_be(text.lstrip()))
        return Parsed("" if is_call else text)

    def _step(self) -> Parsed | None:
        if self._call is not None:
            return self._to_its_end(self._call)
        text = self._text.lstrip()
        if self.num_calls or not text:
            return None
        found = BARE_NAME.match(text)
        if found and found[1] in self._names:
            self._text, self._call = text[found.end() :], Call(0)
            return self._call.named(found[1])
        if self._may_be(text):
            return None
        return self._give_up()

    def _may_be(self, text: str) -> bool:
        """Whether it is the beginning of a call."""
        is_name = any(text.rstrip() == name for name in self._names)
        return bool(text) and (is_name or any(name.startswith(text) for name in self._names))


class Harmony(Calls):
    """Messages in channels, which are reasoning ("analysis"), calls (to a function), or content."""

    def __init__(self) -> None:
        super().__init__()
        self._in_header = True
        self._channel = ""

    def finish(self, *, cut: bool = False) -> Parsed:
        text, self._text = self._text, ""
        if self._in_header or self._call is not None:
            return Parsed()  # a header, or arguments that are not whole
        return self._as(text[: len(text) - held_of(text, ENDS)] if cut else text)

    def _step(self) -> Parsed | None:
        if self._in_header:
            header, mark, rest = self._text.partition(MESSAGE)
            if not mark:
                return None
            self._text, self._in_header = rest, False
            self._channel = (header.rpartition(CHANNEL)[2].split() or [""])[0]
            if name := RECIPIENT.search(header):
                self._call = Call(self.num_calls)
                return self._call.named(name[1])
            return Parsed()
        found = first_of(self._text, ENDS)
        body = found[0] if found else self._text[: len(self._text) - held_of(self._text, ENDS)]
        if found is None and not body:
            return None
        self._text = found[2] if found else self._text[len(body) :]
        parsed = self._as(body) if self._call is None else self._call.arguments(body)[0]
        if found:
            self.num_calls += self._call is not None
            self._in_header, self._call = True, None
        return parsed

    def _as(self, text: str) -> Parsed:
        return Parsed(reasoning=text) if self._channel == "analysis" else Parsed(text)
