"""Reads the arguments of one call, as they arrive, and returns them as JSON.

A reader takes text of any size and returns what is certain. What it returns adds up to a JSON
object, whatever the sizes, or to the beginning of one if the text ends before the call does.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from router.text.forms.form import Tags, segments
from router.text.forms.schema import TEXT
from router.text.forms.values import Depth, escaped, text_json, typed
from router.text.parsers import sure

CDATA, CDATA_END = "<![CDATA[", "]]>"
MAX_NAME = 256  # characters after which what begins like a name is none

Kinds = Callable[[str], frozenset[str]]  # the types of an argument, by its name


class Read(NamedTuple):
    """What a reader makes of a text: JSON, and how many characters it has taken."""

    made: str
    num_taken: int


class Reader(Protocol):
    """Reads the arguments of one call."""

    over: bool  # all of them are here; what is not taken is no part of them

    def feed(self, text: str) -> Read:
        """`text` begins with what was not taken before."""
        ...

    def finish(self, text: str) -> str:
        """The JSON of the rest: `text` was not taken, and nothing follows."""
        ...


class JsonReader(Reader):
    """A JSON object, passed on as it is."""

    def __init__(self) -> None:
        self.over = False
        self._depth = Depth()

    def feed(self, text: str) -> Read:
        end = self._depth.feed(text)
        self.over = end >= 0
        size = end if self.over else len(text)
        return Read(text[:size], size)

    def finish(self, text: str) -> str:
        return ""


class _Value:
    """An argument of which a part is here.

    ends: the text that ends it; its own first white space may be what it began with.
    """

    def __init__(self, kinds: frozenset[str], ends: str, num_skipped: int) -> None:
        self.kinds, self.ends = kinds, ends
        self.num_skipped = num_skipped  # characters before it that are not its own, still to come
        self.text = ""  # of a value that must be whole before its JSON can be told

    @property
    def streams(self) -> bool:
        """Whether what comes can be passed on, but for a mark that ends it."""
        return self.kinds == TEXT and not self.num_skipped


class TagsReader(Reader):
    """Texts between marks. Strings are passed on as they come, other values when they are whole.

    follows: what may stand behind the last argument; a mark in a value, with something else behind
    it, is text.
    """

    def __init__(self, style: Tags, follows: Sequence[str], kinds: Kinds) -> None:
        self.over = False
        self._style, self._kinds = style, kinds
        opens, named = map(_flexible, (style.opens, style.named))
        between = "".join(f"(?:{re.escape(part)})?\\s*" for part in segments(style.between))
        other = f"|(?P<other>{_flexible(style.other)})" if style.other else ""
        name = f"([^\\n]{{0,{MAX_NAME}}}?)"
        self._head = re.compile(rf"\s*{between}{opens}{name}(?:{named}{other})")
        num_lines = len(segments(style.opens) + segments(max(style.named, style.other, key=len)))
        self._begun_head = re.compile(
            rf"[^\n]{{0,{2 * MAX_NAME}}}(?:\n[^\n]{{0,64}}){{0,{num_lines}}}"
        )
        self._opens = segments(style.opens)[:1]
        self._follows = (*segments(style.between)[:1], *self._opens, *follows)
        space = re.match(r"\s*", style.closes)
        self._space = space[0] if space else ""  # before the mark, where a value has it, too
        self._close = style.closes.strip()
        self._value: _Value | None = None
        self._num = 0

    def feed(self, text: str) -> Read:
        value = self._value
        if value is not None and value.streams and value.ends[0] not in text:  # most often
            return Read(escaped(text), len(text))
        made, at = "", 0
        while not self.over:
            before = at
            if self._value is None:
                added, at = self._begun(text, at)
            else:
                added, at = self._more(self._value, text, at)
            made += added
            if at == before:
                break
        return Read(made, at)

    def finish(self, text: str) -> str:
        value = self._value
        if value is None:
            return "" if self.over else self._end()
        rest = sure(text, value.ends)[value.num_skipped :]
        made = escaped(rest) + '"' if value.kinds == TEXT else self._typed(value, rest)
        return made + self._end()

    def _begun(self, text: str, at: int) -> Read:
        """The next argument's name, or the end of all."""
        found = self._head.match(text, at)
        if found is None:
            rest = text[at:].lstrip()
            marks = self._follows[: 1 + bool(self._style.between.strip())]
            waits = any(mark.startswith(rest) for mark in marks) or (
                rest.startswith(marks) and self._begun_head.fullmatch(rest)
            )
            if waits:
                return Read("", at)
            return Read(self._end(), at)
        start, space = found.end(), self._space
        opened = bool(space) and self._style.named.endswith(space)
        if self._style.cdata and CDATA.startswith(text[start : start + len(CDATA)]):
            if len(text) - start < len(CDATA):
                return Read("", at)
            start, ends = start + len(CDATA), CDATA_END + self._style.closes.rstrip()
        elif opened and start == len(text):  # whether the white space is here is not known yet
            return Read("", at)
        else:
            opened = opened and text.startswith(space, start)
            ends = self._close if space and not opened else space + self._close
        is_other = bool(self._style.other) and found["other"] is not None
        name = found[1].strip()
        kinds = self._kinds(name)
        if self._style.other:
            kinds = kinds - TEXT if is_other else TEXT
        self._value = _Value(kinds, ends, len(space) * opened)
        made = f"{', ' if self._num else '{'}{text_json(name)}: "
        self._num += 1
        return Read(made + '"' * (kinds == TEXT), start)

    def _more(self, value: _Value, text: str, at: int) -> Read:
        """More of a value, and its end."""
        end = text.find(value.ends, at)
        while end >= 0:
            behind = text[end + len(value.ends) :].lstrip()
            if not self._follows or behind.startswith(self._follows):
                self._value = None
                own = text[at + value.num_skipped : end]
                made = escaped(own) + '"' if value.kinds == TEXT else self._typed(value, own)
                return Read(made, end + len(value.ends))
            if any(mark.startswith(behind) for mark in self._follows):
                break
            end = text.find(value.ends, end + 1)
        end = end if end >= 0 else at + len(sure(text[at:], value.ends))
        if end == at:
            return Read("", at)
        own, value.num_skipped = text[at + value.num_skipped : end], 0
        if value.kinds == TEXT:
            return Read(escaped(own), end)
        value.text += own
        return Read("", end)

    def _typed(self, value: _Value, last: str) -> str:
        return typed(value.text + last, value.kinds)

    def _end(self) -> str:
        self.over = True
        return "}" if self._num else "{}"


def _flexible(text: str) -> str:
    """A pattern of `text` in which white space may be other; what is at its ends stays out."""
    return r"[ \t]{0,8}\n?[ \t]{0,8}".join(map(re.escape, segments(text)))
