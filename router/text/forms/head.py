"""The beginning of a call: what stands before its name, the name, and where its arguments begin."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from router.text.forms.arguments import MAX_NAME
from router.text.forms.form import ID, Form, Pairs, Tags, segments
from router.text.forms.values import Depth, fields_of, loaded, object_of
from router.text.parsers import sure

SPACE = re.compile(r"\s*")
NAME = re.compile(rf"[\w.-]{{1,{MAX_NAME}}}")
# Of a JSON object: a key and what stands before it; a value that is no list or object; how far a
# key may have come.
KEY = re.compile(r'\s*[{,]?\s*"((?:[^"\\]|\\.)*)"\s*:\s*')
SCALAR = re.compile(r'("(?:[^"\\]|\\.)*"|[\w.+-]+(?=\s*[,}]))\s*')
BEGUN = re.compile(r'\s*[{,]?\s*(?:"(?P<key>(?:[^"\\]|\\.)*)\\?(?P<whole>"\s*:?\s*)?)?')
INNER = "function"  # holds name and arguments, in the JSON of some
MAX_HEAD = 1024  # characters in which a call must tell its name, or become a whole object
MAX_SKIPS = 16  # texts before a name that are no part of the form
KNOWN = ("type", "id", "name", "arguments", "parameters", INNER)
SURROGATE = re.compile("[\ud800-\udfff]")


class Head(NamedTuple):
    """A call that has begun."""

    name: str
    end: int  # of what it takes of the text; there its arguments begin
    made: str = ""  # all of them; empty: they are still to be read
    is_json: bool = True
    num_objects: int = 0  # of JSON in which the arguments stand


NONE = Head("", 0)  # there is no call
_WHOLE = Head("", -1)  # only the whole object tells


class Heads:
    """Finds how the calls of one answer begin; it is asked again with more text until it knows."""

    def __init__(self, form: Form, functions: Mapping[str, Any]) -> None:
        self._form, self._functions = form, functions
        self._skips = form.skips + form.marks
        name, arguments = form.keys or ("name", "")
        self._names = (name, "name")
        self._arguments = (arguments, "arguments", "parameters")
        self._known = {*KNOWN, name, arguments}
        self._after_name = form.behind_name + segments(form.named)
        style = form.style
        self._opens = segments(style.opens)[:1] if isinstance(style, Tags) else ()
        self._depth: Depth | None = None  # of what must be whole, as far as it was looked at
        self._num_seen = 0

    def of(self, text: str, *, within: bool) -> Head | None:
        """The call with which `text` begins, or NONE; None: more of it is needed.

        within: another call has come before it, in the same section.
        """
        head = self._of(text, self._form.own_lead if within else self._form.lead)
        if head is not None:
            self._depth = None
            if self._form.bare and head.name not in self._functions:
                return NONE
        return head

    def _of(self, text: str, lead: Sequence[str]) -> Head | None:
        at = num = 0
        for _ in range(len(lead) + MAX_SKIPS):
            at = _behind_space(text, at)
            if at > MAX_HEAD:
                return NONE
            if at == len(text):
                return None
            if text.startswith("{", at):
                return self._object(text, at)
            found = self._next(text, at, (*lead[num:], *self._skips))
            if found is None:
                return None
            i, end = found
            if i < 0:
                break
            at, num = end, num + i + 1 if num + i < len(lead) else num
        else:
            return NONE
        own = self._form.own_lead
        if self._form.keys is not None or (own and num < len(lead)):
            return NONE
        return self._named(text, at)

    def _next(self, text: str, at: int, texts: Sequence[str]) -> tuple[int, int] | None:
        """Which of `texts` is at a place of `text`, and its end; -1: none; None: not known yet."""
        rest = text[at:]
        for i, part in enumerate(texts):
            if part == ID:
                found = NAME.match(text, at)
                if found and found.end() < len(text):
                    return i, found.end()
            elif rest.startswith(part):
                return i, at + len(part)
        waits = any(
            part.startswith(rest) or (part == ID and NAME.fullmatch(rest)) for part in texts
        )
        return None if waits else (-1, at)

    def _named(self, text: str, at: int) -> Head | None:
        """The same of a call that begins with its name."""
        found = NAME.match(text, at)
        if found is None:
            return NONE
        name, end, num = found[0], found.end(), 0
        if end == len(text):
            may_be = not self._form.bare or any(one.startswith(name) for one in self._functions)
            return None if may_be else NONE
        if self._form.bare and name not in self._functions:
            return NONE
        while True:
            end = _behind_space(text, end)
            if end - at > MAX_HEAD:
                return NONE
            after = self._next(text, end, self._after_name[num:])
            if after is None:
                return None
            if after[0] < 0:
                break
            num, end = num + after[0] + 1, after[1]
        if isinstance(self._form.style, Pairs):
            whole = num == len(self._after_name)
            return self._pairs(self._form.style, name, text, end) if whole else NONE
        if text.startswith("{", end):
            return Head(name, end)
        begins = self._next(text, end, (*self._opens, *self._form.tail))
        if begins is None or end == len(text):
            return None
        if begins[0] < 0:
            return NONE
        has_arguments = begins[0] < len(self._opens)
        return Head(name, end, "" if has_arguments else "{}", is_json=False)

    def _pairs(self, style: Pairs, name: str, text: str, start: int) -> Head | None:
        quotes = (style.quote,) if style.quote else "\"'"
        whole = text if not style.quote else sure(text, style.quote)
        end = self._end(whole, start, lambda: Depth(quotes, depth=1))
        if end < 0:
            return None
        made = object_of(text[start : end - 1], style.equals, style.quote)
        return NONE if made is None else Head(name, end, made)

    def _object(self, text: str, at: int) -> Head | None:
        """The same of a call that is a JSON object."""
        if self._depth is None:
            head = self._by_keys(text[: at + MAX_HEAD], at)
            if head is None and len(text) < at + MAX_HEAD:
                return None
            if head is not None and head is not _WHOLE:
                return head
        end = self._end(text, at, Depth)
        return self._whole(text[at:end], end) if end >= 0 else None

    def _by_keys(self, text: str, at: int) -> Head | None:
        """What keys tell before the object is whole; arguments may come as soon as a name has."""
        name, pos, depth = "", at, 1
        while key := KEY.match(text, pos):
            pos = key.end()
            if self._form.bare and key[1] not in self._known:
                return NONE
            if pos == len(text):
                return None
            if text[pos] == "{":
                if not self._names[0]:  # the name is the key
                    return Head(key[1], pos, num_objects=depth)
                if name and key[1] in self._arguments:
                    return Head(name, pos, num_objects=depth)
                if key[1] != INNER:
                    return _WHOLE
                depth += 1
                continue
            if text[pos] == "[" or key[1] in self._arguments:
                return _WHOLE
            value = SCALAR.match(text, pos)
            if value is None:
                return None
            if key[1] in self._names:
                name = _name(loaded(value[1]))
                if not name or (self._form.bare and name not in self._functions):
                    return NONE
            pos = value.end()
        begun = BEGUN.fullmatch(text, pos)
        if begun is None:
            return _WHOLE if pos > at and text.startswith("}", pos) else NONE
        said, whole = begun["key"], begun["whole"]
        if self._form.bare and said is not None:
            known = (
                said in self._known if whole else any(one.startswith(said) for one in self._known)
            )
            return None if known else NONE
        return None

    def _whole(self, text: str, end: int) -> Head:
        fields = fields_of(text)
        if isinstance(inner := fields.get(INNER, (None,))[0], dict) and "name" in inner:
            fields = fields_of(fields[INNER][1])
        name = _name(next((fields[key][0] for key in self._names if key in fields), None))
        value, made = next((fields[key] for key in self._arguments if key in fields), (None, "{}"))
        if isinstance(value, str):
            made = value
        elif value is None:
            made = "{}"
        is_call = name and isinstance(value, str | dict | None) and not SURROGATE.search(made)
        return Head(name, end, made or "{}") if is_call else NONE

    def _end(self, text: str, start: int, depth: Callable[[], Depth]) -> int:
        """Where the brackets are closed that open at `start`, or have; -1: not yet."""
        if self._depth is None:
            self._depth, self._num_seen = depth(), start
        end, seen = self._depth.feed(text[self._num_seen :]), self._num_seen
        self._num_seen = len(text)
        return seen + end if end >= 0 else -1


def _behind_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return found.end() if found else at


def _name(value: Any) -> str:
    """A function's name; empty if it is none. An escape may have made half a surrogate pair."""
    return value if isinstance(value, str) and not SURROGATE.search(value) else ""
